"""The gated recurrent unit, as a layer over time."""

import functools as ft
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, Key

from ..._control_flow.called_cells import cells_are_called
from ..._rules.explicit_sharding import gathered_leaves
from .._argument_checks import as_sizes, check_option, check_real, check_stack
from .._dtypes import common_dtype, layer_dtype
from .cell_scan import scan_gated_cell
from .gru_vjp import gru
from .layer import AbstractRecurrent, layer_from_cell, single_cell, zero_hidden
from .stack import make_cells, Stack


class GRU(AbstractRecurrent):
    r"""A gated recurrent unit over time, with a backward pass written by hand.

    Up to rounding the same numbers as `equinox.nn.GRUCell` in a `jax.lax.scan`:

    $$r = \sigma(W_r x + V_r h + b_r), \quad z = \sigma(W_z x + V_z h + b_z), \quad
    n = \tanh(W_n x + b_n + r\,(V_n h + c_n)), \quad h' = n + z\,(h - n).$$

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        gru = eqg.nn.GRU(3, 8, num_layers=2, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(gru):
            ys, state = gru(xs)
            print(ys.shape, state.shape)
            return jnp.sum(ys**2)

        print(gradient(gru).cells[0][0].weight_ih.shape)
        ```

        ```text
        (5, 20, 8) (2, 5, 8)
        (24, 3)
        ```

    **Derivative:**

    Written by hand, over chunks of several steps. With $\bar h'$ the cotangent of a state and
    $a = (1 - z)(1 - n^2)\,\bar h'$, the cotangents of the gates' arguments are
    $\bar n = a$, $\bar r = a\,(V_n h + c_n)\,r\,(1 - r)$ and
    $\bar z = (h - n)\,z\,(1 - z)\,\bar h'$. The gradient of each weight is one matrix product
    for a chunk, and is not computed for frozen weights. Both modes (forward mode by plain
    differentiation), all orders; `jax.vmap` of the layer computes one gradient for the batch.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (eqx.nn.GRUCell,)
    cells: tuple[tuple[eqx.nn.GRUCell, ...], ...]
    initial_state: Inexact[Array, "..."] | None
    stack: Stack
    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        learn_initial_state: bool = False,
        keep: str = "gates",
        reverse: bool = False,
        time_major: bool = False,
        dtype: Any = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`: as for `equinox.nn.GRUCell`.
        - `num_layers`: the number of layers; the outputs of one are the inputs of the next.
        - `bidirectional`: each layer has another cell, which runs backward in time. The outputs
            of the two are concatenated.
        - `dropout`: the probability of dropping an output between two layers.
        - `use_bias`: whether there are biases.
        - `learn_initial_state`: whether the first state is a parameter.
        - `keep`: the residuals of the recurrence. `"gates"`: the states and all gates.
            `"states"`: the states only, and the backward pass recomputes the gates. This needs
            0.25 to 0.81 of the memory at the measured shapes with 128 steps and more and 50000
            states (time x batch x units) and more. With up to 8192 states, for which both need
            half a megabyte or so, it needs up to 1.4 times as much.
        - `reverse`: run from the last step to the first.
        - `time_major`: whether a batch is `(time, batch, in)`.
        - `dtype`, `key`: as for `equinox.nn.GRUCell`.
        """
        input_size, hidden_size = as_sizes(
            "GRU", input_size=input_size, hidden_size=hidden_size
        )
        check_stack(
            "GRU",
            num_layers=num_layers,
            use_bias=use_bias,
            bidirectional=bidirectional,
            dropout=dropout,
            learn_initial_state=learn_initial_state,
            reverse=reverse,
            time_major=time_major,
        )
        dtype = layer_dtype("GRU", dtype)
        check_option("GRU", "keep", keep, ("gates", "states"))
        make = ft.partial(
            eqx.nn.GRUCell, hidden_size=hidden_size, use_bias=bool(use_bias), dtype=dtype
        )
        self.cells = make_cells(make, input_size, hidden_size, num_layers, bidirectional, key)
        self.initial_state = self._zero_states() if learn_initial_state else None
        self.stack = Stack(dropout, reverse, time_major, self.cells)
        self.keep = keep

    def _zero_state(self):
        return zero_hidden(self.cells[0][0])

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_real("GRU", cell, xs, state)
        if cells_are_called():
            return scan_gated_cell(cell, xs, state, valid, reverse)
        cell = gathered_leaves(cell)
        xs, h, w_in, w_state, bias, bias_n = common_dtype(
            xs, state, cell.weight_ih, cell.weight_hh, cell.bias, cell.bias_n
        )
        return gru(w_in, w_state, bias, bias_n, xs, h, valid, reverse=reverse, keep=self.keep)

    @staticmethod
    def from_cell(
        cell: Any,
        *,
        keep: str = "gates",
        reverse: bool = False,
        time_major: bool = False,
        learn_initial_state: bool = False,
    ) -> "GRU":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an `equinox.nn.GRUCell`.
        - `keep`, `reverse`, `time_major`, `learn_initial_state`: as for the layer itself.

        **Returns:**

        A `GRU` of one layer, which shares the arrays of `cell`.
        For several cells, make the layer with `num_layers` or `bidirectional`, and put them in
        its `cells`: `eqx.tree_at(lambda layer: layer.cells, layer, ((forward, backward),))`.
        """
        return layer_from_cell(
            GRU,
            cell,
            eqx.nn.GRUCell,
            keep=keep,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> eqx.nn.GRUCell:
        """The only cell of a layer that has one."""
        return single_cell(self)
