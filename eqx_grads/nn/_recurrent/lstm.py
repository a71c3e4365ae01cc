"""The long short-term memory, as a layer over time."""

import functools as ft
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, Key

from ..._control_flow.called_cells import cells_are_called
from ..._rules.explicit_sharding import gathered_leaves
from .._argument_checks import as_sizes, check_option, check_real, check_stack
from .._dtypes import common_dtype, layer_dtype
from .cell_scan import scan_gated_cell
from .layer import AbstractRecurrent, layer_from_cell, single_cell, zero_hidden
from .lstm_vjp import lstm
from .projected_lstm import as_projection, ProjectedLSTMCell
from .projected_lstm_vjp import projected_lstm
from .stack import make_cells, Stack


class LSTM(AbstractRecurrent):
    r"""A long short-term memory over time, with a backward pass written by hand.

    Up to rounding the same numbers as `equinox.nn.LSTMCell` in a `jax.lax.scan`:

    $$i, f, o = \sigma(W x + V h + b), \quad g = \tanh(W x + V h + b), \quad
    c' = f\,c + i\,g, \quad h' = o \tanh(c').$$

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        lstm = eqg.nn.LSTM(3, 8, bidirectional=True, key=jax.random.key(0))
        xs = jnp.ones((20, 3))

        @eqx.filter_grad
        def gradient(lstm):
            ys, (h, c) = lstm(xs)
            print(ys.shape, h.shape, c.shape)
            return jnp.sum(ys**2)

        print(gradient(lstm).cells[0][1].weight_ih.shape)
        ```

        ```text
        (20, 16) (2, 8) (2, 8)
        (32, 3)
        ```

    The state is the pair `(h, c)`.

    With `proj_size`, $h' = P\,(o \tanh(c'))$ with a matrix $P$, so that states and outputs may
    be smaller than the cell ([Sak et al. 2014](https://arxiv.org/abs/1402.1128), as in
    PyTorch). The cells are then not those of Equinox; they have one more weight, `weight_hr`.

    **Derivative:**

    Written by hand, over chunks of several steps. With $\bar h'$ the cotangent of a hidden
    state and $d = \bar c' + \bar h'\,o\,(1 - \tanh^2 c')$, the cotangents of the gates'
    arguments are $d\,g\,i\,(1 - i)$, $d\,c\,f\,(1 - f)$, $d\,i\,(1 - g^2)$ and
    $\bar h' \tanh(c')\,o\,(1 - o)$, and $\bar c = d\,f$. The gradients of the weights are one
    matrix product for a chunk. With `proj_size`, $P^T \bar h'$ takes the place of $\bar h'$.
    Both modes (forward mode by plain differentiation), all orders; `jax.vmap` of the layer
    computes one gradient for the batch.
    """

    _cell_types: ClassVar[tuple[type, ...]] = (eqx.nn.LSTMCell, ProjectedLSTMCell)
    cells: tuple[tuple[eqx.nn.LSTMCell | ProjectedLSTMCell, ...], ...]
    initial_state: tuple[Inexact[Array, "..."], Inexact[Array, "..."]] | None
    stack: Stack
    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        proj_size: int | None = None,
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

        - `proj_size`: the size of the hidden state and of the output, less than `hidden_size`,
            which is then the size of the cell state only. By default there is no projection.

        All others as for [`eqx_grads.nn.GRU`][]. With `keep="states"`, the residuals need half
        of the memory; with `proj_size` it has no effect.
        """
        input_size, hidden_size = as_sizes(
            "LSTM", input_size=input_size, hidden_size=hidden_size
        )
        check_stack(
            "LSTM",
            num_layers=num_layers,
            use_bias=use_bias,
            bidirectional=bidirectional,
            dropout=dropout,
            learn_initial_state=learn_initial_state,
            reverse=reverse,
            time_major=time_major,
        )
        dtype = layer_dtype("LSTM", dtype)
        check_option("LSTM", "keep", keep, ("gates", "states"))
        make = ft.partial(
            eqx.nn.LSTMCell, hidden_size=hidden_size, use_bias=bool(use_bias), dtype=dtype
        )
        output_size = hidden_size
        if proj_size is not None:
            output_size = as_projection(proj_size, hidden_size)
            make = ft.partial(ProjectedLSTMCell, proj_size=output_size, **make.keywords)
        self.cells = make_cells(make, input_size, output_size, num_layers, bidirectional, key)
        self.initial_state = self._zero_states() if learn_initial_state else None
        self.stack = Stack(dropout, reverse, time_major, self.cells)
        self.keep = keep

    def _zero_state(self):
        zero = zero_hidden(self.cells[0][0])
        return zero[: self.cells[0][0].weight_hh.shape[1]], zero

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_real("LSTM", cell, xs, *state)
        if cells_are_called():
            return scan_gated_cell(cell, xs, state, valid, reverse)
        cell = gathered_leaves(cell)
        if isinstance(cell, ProjectedLSTMCell):
            xs, h, c, w_in, w_state, bias, w_out = common_dtype(
                xs, *state, cell.weight_ih, cell.weight_hh, cell.bias, cell.weight_hr
            )
            return projected_lstm(
                w_in, w_state, bias, w_out, xs, (h, c), valid, reverse=reverse
            )
        xs, h, c, w_in, w_state, bias = common_dtype(
            xs, *state, cell.weight_ih, cell.weight_hh, cell.bias
        )
        return lstm(w_in, w_state, bias, xs, (h, c), valid, reverse=reverse, keep=self.keep)

    @staticmethod
    def from_cell(
        cell: Any,
        *,
        keep: str = "gates",
        reverse: bool = False,
        time_major: bool = False,
        learn_initial_state: bool = False,
    ) -> "LSTM":
        """The layer that runs this cell.

        **Arguments:**

        - `cell`: an `equinox.nn.LSTMCell`.
        - `keep`, `reverse`, `time_major`, `learn_initial_state`: as for the layer itself.

        **Returns:**

        An `LSTM` of one layer, which shares the arrays of `cell`.
        Several cells are put into a layer as for [`eqx_grads.nn.GRU`][].
        """
        return layer_from_cell(
            LSTM,
            cell,
            eqx.nn.LSTMCell,
            keep=keep,
            reverse=reverse,
            time_major=time_major,
            learn_initial_state=learn_initial_state,
        )

    def to_cell(self) -> eqx.nn.LSTMCell | ProjectedLSTMCell:
        """The only cell of a layer that has one."""
        return single_cell(self)
