"""The call of recurrent layers, which they all share."""

import abc
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Key, Num, PyTree

from ..._control_flow.visible_steps import AbstractCellLayer
from ..._errors import bad_argument, check_flags, rule_error, type_of
from ..._rules.explicit_sharding import explicit_spec, gathered_leaves
from ..._rules.float_args import check_key
from ..._tangent_spaces import holds_numbers
from .._arguments import check_features
from .padding import valid_steps, zero_padding
from .stack import make_cells, Stack
from .states import first_states, last_states, zero_states


class AbstractRecurrent(AbstractCellLayer):
    """A layer that runs cells over time: one for each layer of a stack and direction.

    A step of an input has one axis, or as many as the `input_size` of the cells if that is a
    tuple. `cells`, `initial_state` (`None` unless it is learned) and `stack` are what
    `make_stack` returns.
    """

    cells: eqx.AbstractVar[tuple[tuple[Any, ...], ...]]
    initial_state: eqx.AbstractVar[PyTree]
    stack: eqx.AbstractVar[Stack]

    @abc.abstractmethod
    def _run_cell(
        self, cell: Any, xs: Array, state: PyTree, valid: Array | None, reverse: bool
    ) -> tuple[PyTree, PyTree]:
        """All outputs, `(time, batch, ...)`, and the last state. `valid` is the `(time, batch)`
        mask of the steps that count, or `None`: at all others the state does not change."""

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

    def _is_batch(self, xs: Any, name: str = "xs") -> bool:
        """Whether these are the inputs of a batch: of sequences, or of one step `x`."""
        size, is_step = getattr(self.cells[0][0], "input_size", None), name == "x"
        axes = (len(size) if isinstance(size, tuple) else 1) + (not is_step)
        is_array = isinstance(xs, jax.Array | np.ndarray) and holds_numbers(xs)
        if not is_array or xs.ndim not in (axes, axes + 1):
            step = "*input_size" if isinstance(size, tuple) else "in"
            raise rule_error(
                f"`{type(self).__name__}` was given `{name}` that does not fit.",
                f"`{name}` is {type_of(xs)}",
                do=f"Pass an array `({step},)` or a batch of them. For a sequence, call the "
                "layer itself."
                if is_step
                else f"Pass an array `(time, {step})` or a batch of them, and `jax.vmap` for "
                "more axes. A sequence of numbers is `xs[:, None]`, a list of steps "
                "`jnp.stack(xs)`, and one step is for `layer.step(x)`. If it is the pair `ys, "
                "state` of another recurrent layer, as in `equinox.nn.Sequential`, pass on the "
                "outputs only: `eqx_grads.nn.Outputs` of that layer returns them.",
            )
        return xs.ndim == axes + 1

    def __call__(
        self,
        xs: Num[Array, "..."],
        state: PyTree = None,
        *,
        lengths: Integer[Array, "..."] | Sequence[int] | int | None = None,
        key: Key[Array, ""] | None = None,
        inference: bool | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Run over a sequence, or over a batch of sequences.

        **Arguments:**

        - `xs`: one sequence, `(time, in)`, or a batch, `(batch, time, in)`, or
            `(time, batch, in)` if the layer is `time_major`. `jax.vmap` of the layer over a
            batch costs the same, and computes the same without dropout (see `key`).
        - `state`: where to start, like the state returned, with one for each example of a
            batch. The default is `initial_state`, which is zero unless it is learned.
        - `lengths`: the number of steps that count, for each example of the batch. For a mask
            that is true at these steps, pass `mask.sum(-1)`. After these steps, outputs are
            zero, the state does not change, so that the last state is the state of the last
            step that counts, and no gradient passes. A cell that runs backward in time begins
            at the last step that counts. Under `jit`, where the values are not known, a length
            greater than the number of steps counts as all steps, and a negative length as none.
        - `key`: for dropout; you need it only if dropout is on. The key is split once
            before each layer but the first, whose inputs are not dropped. One key is enough
            for a batch: each number of each step of each example is dropped by itself. Under
            `jax.vmap`, give each example its own key, as in
            `jax.vmap(lambda x, key: layer(x, key=key))(xs, jax.random.split(key, len(xs)))`.
            This drops other numbers than one key for the batch, with the same probability. One
            key for all examples drops the same numbers in each.
        - `inference`: whether dropout is off; the default is the layer's own, which
            `equinox.nn.inference_mode(layer)` sets.

        **Returns:**

        `ys, state`: the outputs of all steps, in the layout of `xs`, and the last state. With a
        single cell, it is the state of the cell, with a batch axis for a batch. With several
        cells, it has one more axis in front: for each layer the cell that runs forward, then
        the cell that runs backward. In `equinox.nn.Sequential`, where the next layer takes an
        array, use [`eqx_grads.nn.Outputs`][] of this layer, which returns `ys` only.
        """
        name, is_batch = type(self).__name__, self._is_batch(xs)
        if inference is not None:
            check_flags(name, inference=inference)
        if len(self.cells) > 1 and self.stack.drops(inference):
            if key is None:
                do = "To train, call `layer(xs, key=key)` with another key in each step. "
                do += "Without dropout, `layer(xs, inference=True)`, or "
                do += "`equinox.nn.inference_mode(model)`."
                raise bad_argument(name, "key", "given, and `dropout` needs it", key, do)
            check_key(name, key)
        xs = self.stack.time_first(xs, is_batch)
        cells = list(self.cells)
        check_features(name, cells[0][0], xs)
        valid = valid_steps(name, lengths, xs, is_batch)
        xs = zero_padding(xs, valid)  # which may hold anything, NaN included
        first = gathered_leaves(self.initial_state)
        if any(explicit_spec(xs)):
            # The batch and the units can't share a mesh axis.
            cells = gathered_leaves(cells)
        if first is None:
            first = zero_states(name, cells)
        states = first_states(name, state, first, sum(map(len, cells)), xs, is_batch)
        ys, states = self.stack.run(
            self._run_cell, cells, xs, states, valid, key=key, inference=inference
        )
        return self.stack.as_given(ys, is_batch), last_states(states, is_batch)

    def step(
        self, x: Num[Array, "..."], state: PyTree = None, **options: Any
    ) -> tuple[PyTree, PyTree]:
        """Run one step, as for generation. A layer with `reverse` is given the last step first.

        **Arguments:**

        - `x`: one input, `(in,)`, or one input for each example of a batch, `(batch, in)`.
        - `state`, `**options`: as for a call of the layer.

        **Returns:**

        `y, state`: the output, and the state for the next step.

        **Raises:**

        [`eqx_grads.RuleError`][] if the layer is `bidirectional`.
        """
        if any(len(directions) > 1 for directions in self.cells):
            raise rule_error(
                f"`{type(self).__name__}.step` was called on a layer of two directions.",
                "the cell that runs backward in time starts at the last step",
                do="Call the layer with the whole sequence, or leave out `bidirectional`.",
            )
        axis = int(self._is_batch(x, "x") and not self.time_major)
        ys, state = self(jnp.expand_dims(x, axis), state, **options)
        return jax.tree.map(lambda y: jnp.squeeze(y, axis), ys), state


class AbstractStacked(AbstractRecurrent):
    """A layer over time with the fields that most have."""

    cells: tuple[tuple[Any, ...], ...]
    initial_state: PyTree
    stack: Stack

    def _set_cells(self, make, sizes, dtype, key, options, output_size=None):
        """Set these fields, in `__init__`: see `make_cells`."""
        name = type(self).__name__
        made = make_cells(name, make, sizes, dtype, key, output_size, **options)
        self.cells, self.initial_state, self.stack = made
