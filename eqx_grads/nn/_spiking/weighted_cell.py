"""A spiking cell with input weights."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Key, Num

from ..._errors import check_flags, rule_error, type_of
from ..._tangent_spaces import holds_numbers
from .._argument_checks import as_sizes
from .._dtypes import common_dtype


class WeightedCell(eqx.Module):
    r"""A spiking cell with input weights: its input is $W x + b$.

    One cell of a layer like [`eqx_grads.nn.LIF`][], where it is in `cells[layer][direction]`.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        cell = eqg.nn.WeightedCell(3, eqg.nn.LIFCell(8, beta=0.9), key=jax.random.key(0))
        layer = eqg.nn.LIF.from_cell(cell)

        @eqx.filter_grad
        def gradient(layer, xs):
            spikes, _ = layer(xs)
            return jnp.sum(spikes)

        print(gradient(layer, jnp.ones((20, 3))).cells[0][0].weight_ih.shape)
        ```

        ```text
        (8, 3)
        ```

    **Derivative:**

    That of the cell.
    """

    weight_ih: Float[Array, "hidden in"]
    bias: Float[Array, " hidden"] | None
    cell: Any

    def __init__(
        self,
        input_size: int,
        cell: Any,
        *,
        use_bias: bool = True,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `input_size`: the number of inputs.
        - `cell`: the spiking cell.
        - `use_bias`: whether there is a bias.
        - `key`: for weights and bias, which are initialized as in `equinox.nn.Linear`: uniform
            within $\\pm 1/\\sqrt{\\mathrm{input\\_size}}$. Their dtype is that of the cell.
        """
        (input_size,) = as_sizes("WeightedCell", input_size=input_size)
        check_flags("WeightedCell", use_bias=use_bias)
        membrane = _membrane_at_rest(cell)
        limit = 1 / math.sqrt(input_size)
        key1, key2 = jr.split(key)
        make = lambda key, *shape: jr.uniform(key, shape, membrane.dtype, -limit, limit)
        self.weight_ih = make(key1, len(membrane), input_size)
        self.bias = make(key2, len(membrane)) if use_bias else None
        self.cell = cell

    @property
    def input_size(self) -> int:
        """The number of inputs."""
        return self.weight_ih.shape[1]

    @property
    def hidden_size(self) -> int:
        """The number of neurons."""
        return self.weight_ih.shape[0]

    def initial_state(self) -> Any:
        """The neurons at rest, in the dtype of the weights: the model may have been cast."""
        dtype = self.weight_ih.dtype
        return jax.tree.map(lambda s: s.astype(dtype), self.cell.initial_state())

    def __call__(self, x: Num[Array, " in"], state: Any) -> Any:
        """**Arguments:**

        - `x`: the input of this step.
        - `state`: what the last step returned, or `initial_state()`.

        **Returns:**

        The next state of the cell.
        """
        if not holds_numbers(x) or jnp.shape(x) != (self.weight_ih.shape[1],):
            raise rule_error(
                "`WeightedCell` was given an input of the wrong size.",
                f"`x` is {type_of(x)}, and has to be of shape {(self.weight_ih.shape[1],)}",
                do="A cell takes one step of one example: use `jax.vmap` for a batch.",
            )
        x, weight, bias = common_dtype(x, self.weight_ih, self.bias)
        current = weight @ x
        return self.cell(current if bias is None else current + bias, state)


def _membrane_at_rest(cell):
    """The potentials of a spiking cell at rest, which have to be a vector."""
    initial_state = getattr(cell, "initial_state", None)
    membrane = getattr(initial_state(), "membrane", None) if callable(initial_state) else None
    if membrane is not None and jnp.ndim(membrane) == 1:
        return membrane
    where = f"`cell` is {cell!r:.60}"
    if membrane is not None:
        where = f"the shape of its neurons is {jnp.shape(membrane)}"
    raise rule_error(
        "`WeightedCell` was given something else than a spiking cell of a vector of neurons.",
        where,
        do="Give it one like `eqx_grads.nn.LIFCell(8, beta=0.9)`.",
    )
