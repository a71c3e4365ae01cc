"""One step of a long short-term memory with a projected hidden state."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Inexact, Key

from ..._errors import rule_error
from .._argument_checks import as_sizes
from .._dtypes import default_dtype


class ProjectedLSTMCell(eqx.Module):
    """One step of a long short-term memory whose hidden state is $h' = P\\,(o \\tanh(c'))$.

    The gates are in the order in, forget, cell, out, as in `equinox.nn.LSTMCell`.
    """

    weight_ih: Inexact[Array, "gates in"]
    weight_hh: Inexact[Array, "gates proj"]
    bias: Inexact[Array, " gates"] | None
    weight_hr: Inexact[Array, "proj hidden"]
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        proj_size: int,
        use_bias: bool = True,
        dtype: Any = None,
        key: Key[Array, ""],
    ):
        limit = hidden_size**-0.5
        dtype = default_dtype(dtype)
        keys = jr.split(key, 4)
        make = lambda key, *shape: jr.uniform(key, shape, dtype, -limit, limit)
        self.weight_ih = make(keys[0], 4 * hidden_size, input_size)
        self.weight_hh = make(keys[1], 4 * hidden_size, proj_size)
        self.bias = make(keys[2], 4 * hidden_size) if use_bias else None
        self.weight_hr = make(keys[3], proj_size, hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size

    def __call__(self, x: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        h, c = state
        arguments = self.weight_ih @ x + self.weight_hh @ h
        arguments = arguments if self.bias is None else arguments + self.bias
        i, f, g, o = jnp.split(arguments, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return self.weight_hr @ (jax.nn.sigmoid(o) * jnp.tanh(c)), c


def as_projection(proj_size: Any, hidden_size: int) -> int:
    """The size of a projected state, which is smaller than the cell."""
    (known,) = as_sizes("LSTM", proj_size=proj_size)
    if known >= hidden_size:
        raise rule_error(
            "`LSTM` was given a projection that is not smaller than its cell.",
            f"`proj_size` is {known}, `hidden_size` is {hidden_size}",
            do="Choose a smaller `proj_size`, or leave it out.",
        )
    return known
