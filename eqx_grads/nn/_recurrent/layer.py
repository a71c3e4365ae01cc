"""The interface of a recurrent layer: how it is called, conversion from and to one cell."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Inexact, Integer, Key, Num, PyTree

from ..._control_flow.called_cells import AbstractCellLayer
from ..._errors import check_flags, name_of, rule_error, type_of
from ..._rules.explicit_sharding import explicit_spec, gathered_leaves
from ..._rules.float_args import check_key
from .stack import check_cells, first_states, last_states, Stack, valid_steps, zero_states


class AbstractRecurrent(AbstractCellLayer):
    """A layer that runs cells over time: one for each layer of a stack and direction."""

    _cell_types: eqx.AbstractClassVar[tuple[type, ...]]

    cells: eqx.AbstractVar[tuple[tuple[Any, ...], ...]]
    initial_state: eqx.AbstractVar[PyTree]
    stack: eqx.AbstractVar[Stack]

    @abc.abstractmethod
    def _run_cell(
        self, cell: Any, xs: Array, state: PyTree, valid: Array | None, reverse: bool
    ) -> tuple[Array, PyTree]:
        """All outputs, `(time, batch, out)`, and the last state."""

    @abc.abstractmethod
    def _zero_state(self) -> PyTree:
        """The initial state of one cell for one example, unless one is learned. `None` if
        it is not known, and has to be given."""

    @property
    def dropout(self) -> eqx.nn.Dropout:
        """The dropout between two layers."""
        return self.stack.dropout

    @property
    def reverse(self) -> bool:
        """Whether the first direction runs from the last step to the first."""
        return self.stack.reverse

    @property
    def time_major(self) -> bool:
        """Whether a batch is `(time, batch, in)`."""
        return self.stack.time_major

    def _zero_states(self) -> PyTree:
        """The initial state of all cells, unless one is learned."""
        return zero_states(self._zero_state(), sum(map(len, self.cells)))

    def __call__(
        self,
        xs: Num[Array, "..."],
        state: PyTree[Inexact[Array, "..."]] = None,
        *,
        lengths: Integer[Array, "..."] | Sequence[int] | int | None = None,
        key: Key[Array, ""] | None = None,
        inference: bool | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Run over a sequence, or over a batch of sequences.

        **Arguments:**

        - `xs`: one sequence, `(time, in)`, or a batch, `(batch, time, in)`, or
            `(time, batch, in)` if the layer is `time_major`. To `jax.vmap` the layer over a
            batch costs the same, and computes the same if there is no dropout (see `key`).
        - `state`: where to start, like the state returned, with one for each example of a
            batch. The default is `initial_state`, which is zero unless it is learned.
        - `lengths`: the number of steps that count, for each example of the batch: of a mask
            that is true at these steps, `mask.sum(-1)`. After them, outputs are zero, the
            state does not change, so that the last state is that of the last step that counts,
            and no gradient passes; a cell that runs backward in time begins at the last step
            that counts. Under `jit`, where their values are not known, a length greater than
            the number of steps counts as all steps, and a negative one as none.
        - `key`: for dropout, needed unless there is none or it is off. The key is split once
            before each layer but the first, whose inputs are not dropped. One key is enough
            for a batch: each number of each step of each example is dropped by itself. Under
            `jax.vmap`, give each example a key of its own, as in
            `jax.vmap(lambda x, key: layer(x, key=key))(xs, jax.random.split(key, len(xs)))`.
            This drops others than one key for the batch, with the same probability. One key
            for all examples drops the same in each of them.
        - `inference`: whether dropout is off; the default is the layer's own, which
            `equinox.nn.inference_mode(layer)` sets.

        **Returns:**

        `ys, state`: the outputs of all steps, in the layout of `xs`, and the last state. The
        state of a single cell is what the cell has, with a batch axis for a batch. The state of
        several cells has one more axis in front: for each layer the cell that runs forward,
        then the cell that runs backward. In `equinox.nn.Sequential`, where the next layer takes
        an array, use [`eqx_grads.nn.Outputs`][] of this layer, which returns `ys` only.
        """
        name = type(self).__name__
        if not isinstance(xs, jax.Array | np.ndarray):
            raise rule_error(
                f"`{name}` was given `xs` that are not an array.",
                f"`xs` is a `{type(xs).__name__}`",
                do="Pass one array, `jnp.stack(xs)` for a list of steps. If it is the pair "
                "`ys, state` of another recurrent layer, as in `equinox.nn.Sequential`, pass "
                "on the outputs only: `eqx_grads.nn.Outputs` of that layer returns them.",
            )
        if xs.ndim not in (2, 3):
            raise rule_error(
                f"`{name}` was given `xs` with {xs.ndim} axes.",
                f"`xs` is {type_of(xs)}",
                do="Pass `(time, in)` or a batch of sequences, and `jax.vmap` for more axes. "
                "One step is `xs[None]`, and a sequence of numbers `xs[:, None]`.",
            )
        check_cells(name, self.cells, self.stack.directions, self._cell_types)
        if inference is not None:
            check_flags(name, inference=inference)
        if len(self.cells) > 1 and self.stack.drops(inference):
            _check_dropout_key(name, self.dropout.p, key)
        is_batch = xs.ndim == 3
        xs = self.stack.time_first(xs)
        valid = valid_steps(name, lengths, xs, is_batch)
        if valid is not None:
            # The padding may hold anything, NaN included.
            xs = jnp.where(valid[:, :, None], xs, jnp.zeros((), xs.dtype))
        learned, cells = gathered_leaves(self.initial_state), self.cells
        if any(explicit_spec(xs)):
            # The mesh axis of the batch can't be that of the units as well.
            cells = gathered_leaves(cells)
        default = self._zero_states() if learned is None else learned
        n_cells = sum(map(len, self.cells))
        states = first_states(name, state, default, n_cells, xs, is_batch)
        ys, states = self.stack.run(
            self._run_cell, cells, xs, states, valid, key=key, inference=inference
        )
        return self.stack.as_given(ys, is_batch), last_states(states, is_batch)


def _check_dropout_key(layer, probability, key):
    if key is None:
        raise rule_error(
            f"A call of `{layer}` with dropout was given no random key.",
            f"`dropout` is {probability}, and `key` of the call is None",
            do="To train, call `layer(xs, key=key)` with another key in each step. Without "
            "dropout, call `layer(xs, inference=True)`, or `equinox.nn.inference_mode(model)`.",
        )
    check_key(layer, key)


_SEVERAL_CELLS = (
    "Of several cells, make a layer with `num_layers=` or `bidirectional=`, and replace its "
    "own: `eqx.tree_at(lambda layer: layer.cells, layer, cells)`, where `cells[i]` is a tuple "
    "of the cells of layer `i`, one for each direction."
)


def layer_from_cell(make: Callable[..., Any], cell: Any, expected: type, **options: Any) -> Any:
    """The layer `make(...)` that runs one given cell."""
    if not isinstance(cell, expected):
        raise rule_error(
            f"`{name_of(make)}.from_cell` was given another cell than it runs.",
            f"it is a `{type(cell).__name__}`, and has to be a `{expected.__name__}`",
            do="`eqx_grads.nn.Recurrent` runs any cell." if callable(cell) else _SEVERAL_CELLS,
        )
    dtype = cell.weight_hh.dtype
    layer = make(1, cell.hidden_size, dtype=dtype, key=jr.key(0), **options)
    return eqx.tree_at(lambda layer: layer.cells, layer, ((cell,),))


def single_cell(layer: AbstractRecurrent) -> Any:
    """The only cell of a layer."""
    cells = [cell for stage in layer.cells for cell in stage]
    if len(cells) != 1:
        raise rule_error(
            f"`{type(layer).__name__}.to_cell` was asked for one of {len(cells)} cells.",
            do="They are in `cells[layer][direction]`.",
        )
    return cells[0]


def zero_hidden(cell: Any) -> Array:
    """A hidden state of zeros, in the dtype of the cell's weights."""
    return jnp.zeros(cell.hidden_size, cell.weight_hh.dtype)
