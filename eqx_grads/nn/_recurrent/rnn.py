"""The vanilla recurrent network, as a cell and as a layer over time."""

import functools as ft
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Inexact, Key

from ..._control_flow.called_cells import cells_are_called
from ..._errors import check_flags, rule_error, type_of
from ..._rules.explicit_sharding import gathered_leaves
from ..._tangent_spaces import holds_numbers
from .._argument_checks import as_sizes, check_option, check_real, check_stack
from .._dtypes import common_dtype, layer_dtype
from .cell_scan import scan_gated_cell
from .layer import AbstractRecurrent, layer_from_cell, single_cell, zero_hidden
from .rnn_vjp import ACTIVATIONS, rnn
from .stack import make_cells, Stack


class RNNCell(eqx.Module):
    r"""One step of a vanilla recurrent network, $h' = \phi(W x + V h + b)$."""

    weight_ih: Inexact[Array, "hidden in"]
    weight_hh: Inexact[Array, "hidden hidden"]
    bias: Inexact[Array, " hidden"] | None
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        activation: str = "tanh",
        use_bias: bool = True,
        dtype: Any = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`, `use_bias`, `dtype`, `key`: as for
            `equinox.nn.GRUCell`.
        - `activation`: $\\phi$, `"tanh"` or `"relu"`.
        """
        input_size, hidden_size = as_sizes(
            "RNNCell", input_size=input_size, hidden_size=hidden_size
        )
        check_flags("RNNCell", use_bias=use_bias)
        check_option("RNNCell", "activation", activation, ACTIVATIONS)
        limit = hidden_size**-0.5
        dtype = layer_dtype("RNNCell", dtype)
        keys = jr.split(key, 3)
        make = lambda key, *shape: jr.uniform(key, shape, dtype, -limit, limit)
        self.weight_ih = make(keys[0], hidden_size, input_size)
        self.weight_hh = make(keys[1], hidden_size, hidden_size)
        self.bias = make(keys[2], hidden_size) if use_bias else None
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.activation = activation

    def __call__(
        self, x: Inexact[Array, " in"], h: Inexact[Array, " hidden"]
    ) -> Inexact[Array, " hidden"]:
        """**Arguments:**

        - `x`: the input of this step.
        - `h`: the state.

        **Returns:**

        The next state.
        """
        for name, array, size in (("x", x, self.input_size), ("h", h, self.hidden_size)):
            if not holds_numbers(array) or jnp.shape(array) != (size,):
                raise rule_error(
                    "`RNNCell` was given an array of another shape than it takes.",
                    f"`{name}` is {type_of(array)}, and has to be of shape {(size,)}",
                    do="A cell takes one step of one example: use `jax.vmap` for a batch.",
                )
        h = self.weight_ih @ x + self.weight_hh @ h
        return ACTIVATIONS[self.activation](h if self.bias is None else h + self.bias)


class RNN(AbstractRecurrent):
    r"""A vanilla recurrent network over time, $h' = \phi(W x + V h + b)$.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        rnn = eqg.nn.RNN(3, 8, activation="relu", key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))

        @eqx.filter_grad
        def gradient(rnn):
            ys, _ = rnn(xs, lengths=jnp.array([20, 3, 7, 1, 0]))
            return jnp.sum(ys**2)

        print(gradient(rnn).cells[0][0].weight_ih.shape)
        ```

        ```text
        (8, 3)
        ```

    **Derivative:**

    Written by hand, over chunks of several steps. The slope of $\phi$ is computed from its
    value, $1 - h'^2$ or $h' > 0$ (zero at the kink), so the states are the only residuals of
    the recurrence. The gradient of each weight is one matrix product for a chunk. Both modes,
    all orders; `jax.vmap` of the layer computes one gradient for the batch.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (RNNCell,)
    cells: tuple[tuple[RNNCell, ...], ...]
    initial_state: Inexact[Array, "..."] | None
    stack: Stack

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        activation: str = "tanh",
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        learn_initial_state: bool = False,
        reverse: bool = False,
        time_major: bool = False,
        dtype: Any = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `activation`: $\\phi$, `"tanh"` or `"relu"`.

        All others as for [`eqx_grads.nn.GRU`][].
        """
        input_size, hidden_size = as_sizes(
            "RNN", input_size=input_size, hidden_size=hidden_size
        )
        check_stack(
            "RNN",
            num_layers=num_layers,
            use_bias=use_bias,
            bidirectional=bidirectional,
            dropout=dropout,
            learn_initial_state=learn_initial_state,
            reverse=reverse,
            time_major=time_major,
        )
        dtype = layer_dtype("RNN", dtype)
        options = {"activation": activation, "use_bias": use_bias, "dtype": dtype}
        make = ft.partial(RNNCell, hidden_size=hidden_size, **options)
        self.cells = make_cells(make, input_size, hidden_size, num_layers, bidirectional, key)
        self.initial_state = self._zero_states() if learn_initial_state else None
        self.stack = Stack(dropout, reverse, time_major, self.cells)

    def _zero_state(self):
        return zero_hidden(self.cells[0][0])

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_real("RNN", cell, xs, state)
        if cells_are_called():
            return scan_gated_cell(cell, xs, state, valid, reverse)
        cell = gathered_leaves(cell)
        xs, h, w_in, w_state, bias = common_dtype(
            xs, state, cell.weight_ih, cell.weight_hh, cell.bias
        )
        return rnn(
            w_in, w_state, bias, xs, h, valid, reverse=reverse, activation=cell.activation
        )

    @staticmethod
    def from_cell(
        cell: Any,
        *,
        reverse: bool = False,
        time_major: bool = False,
        learn_initial_state: bool = False,
    ) -> "RNN":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an [`eqx_grads.nn.RNNCell`][].
        - `reverse`, `time_major`, `learn_initial_state`: as for the layer itself.

        **Returns:**

        An `RNN` of one layer, which shares the arrays of `cell`.
        Several cells are put into a layer as for [`eqx_grads.nn.GRU`][].
        """
        return layer_from_cell(
            RNN,
            cell,
            RNNCell,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> RNNCell:
        """The only cell of a layer that has one."""
        return single_cell(self)
