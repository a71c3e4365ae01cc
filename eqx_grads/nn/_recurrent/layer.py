"""What all recurrent layers share: layouts, padding, directions, stacks, initial states."""

import abc
from collections.abc import Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Inexact, Integer, Key, Num, PyTree

from ..._errors import rule_error, type_of
from ..._tangent_spaces import promote


class AbstractRecurrent(eqx.Module):
    """A layer that runs cells over time: one for each layer of a stack and direction."""

    cells: eqx.AbstractVar[tuple[tuple[Any, ...], ...]]
    initial_state: eqx.AbstractVar[PyTree]
    dropout: eqx.AbstractVar[eqx.nn.Dropout]
    reverse: eqx.AbstractVar[bool]
    time_major: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def _run(
        self, cell: Any, xs: Array, state: PyTree, valid: Array | None, reverse: bool
    ) -> tuple[Array, PyTree]:
        """All outputs, `(time, batch, out)`, and the last state."""

    @abc.abstractmethod
    def _zero_state(self) -> PyTree:
        """The initial state of one cell for one example, unless one is learned."""

    def __call__(
        self,
        xs: Num[Array, "..."],
        state: PyTree[Inexact[Array, "..."]] = None,
        *,
        lengths: Integer[Array, "..."] | Sequence[int] | int | None = None,
        key: Key[Array, ""] | None = None,
        inference: bool | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Run over a sequence, or over a batch of them.

        **Arguments:**

        - `xs`: one sequence, `(time, in)`, or a batch, `(batch, time, in)`, or
            `(time, batch, in)` if the layer is `time_major`. To `jax.vmap` the layer over a
            batch costs the same.
        - `state`: where to start, like the state returned. The default is
            `initial_state`, which is zero unless it is learned.
        - `lengths`: the number of steps that count, for each example of the batch. Past them,
            outputs are zero, the state stays what it is, and nothing has a gradient; what
            runs backward in time begins at the last step that counts. Under `jit`, where
            they can't be looked at, more than there are steps counts as all of them.
        - `key`: for dropout.
        - `inference`: whether dropout is off; the default is the layer's own.

        **Returns:**

        `ys, state`: the outputs of all steps, in the layout of `xs`, and the last state. The
        state of a single cell is what the cell has, with a batch axis for a batch. That of
        several has one more axis in front: for each layer the one that runs forward,
        then the one that runs backward.
        """
        if xs.ndim not in (2, 3):
            raise rule_error(
                f"`{type(self).__name__}` was given `xs` with {xs.ndim} axes.",
                f"`xs` is {type_of(xs)}",
                do="Pass `(time, in)` or a batch of such, and `jax.vmap` for more.",
            )
        one = xs.ndim == 2
        if one:
            xs = xs[:, None]
        elif not self.time_major:
            xs = jnp.swapaxes(xs, 0, 1)
        valid = self._valid(lengths, xs, one)
        if valid is not None:
            # The padding may hold anything, also what is not a number.
            xs = jnp.where(valid[:, :, None], xs, 0)
        cells = [cell for layer in self.cells for cell in layer]
        states = iter(self._start(state, len(cells), xs, one))
        last = []
        for i, layer in enumerate(self.cells):
            if i > 0:
                key, subkey = (None, None) if key is None else jr.split(key)
                xs = self.dropout(xs, key=subkey, inference=inference)
            outputs = []
            for cell, reverse in zip(layer, (self.reverse, not self.reverse), strict=False):
                ys, end = self._run(cell, xs, next(states), valid, reverse)
                if valid is not None:
                    ys = jax.tree.map(lambda y: _zero_past_the_end(y, valid), ys)
                outputs.append(ys)
                last.append(end)
            xs = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, -1)
        if len(cells) == 1:
            end = last[0]
        else:
            end = jax.tree.map(lambda *leaves: jnp.stack(leaves), *last)
        if one:
            axis = 0 if len(cells) == 1 else 1
            ys = jax.tree.map(lambda y: y[:, 0], xs)
            return ys, jax.tree.map(lambda s: jnp.squeeze(s, axis), end)
        if not self.time_major:
            xs = jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1), xs)
        return xs, end

    def _valid(self, lengths, xs, one):
        if lengths is None:
            return None
        if not isinstance(lengths, Tracer):
            lengths = np.asarray(lengths)
        steps, batch = xs.shape[:2]
        expected = () if one else (batch,)
        if lengths.shape != expected or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise rule_error(
                f"`{type(self).__name__}` was given `lengths` that do not fit `xs`.",
                f"`lengths` is {type_of(lengths)}",
                do=f"Pass integers of shape {expected}: one for each example.",
            )
        if isinstance(lengths, np.ndarray) and lengths.size > 0:
            longest, shortest = int(np.max(lengths)), int(np.min(lengths))
            if longest > steps or shortest < 0:
                raise rule_error(
                    f"`{type(self).__name__}` was given `lengths` out of range.",
                    f"they are from {shortest} to {longest}, and `xs` has {steps} steps",
                    do="Did you swap the time axis and the batch axis? See `time_major`.",
                )
        return jnp.arange(steps)[:, None] < jnp.asarray(lengths).reshape(1, batch)

    def _start(self, state, n_cells, xs, one):
        """The initial state of each cell, with a batch axis."""
        axis = 0 if n_cells == 1 else 1
        add_batch = lambda tree: jax.tree.map(lambda s: jnp.expand_dims(s, axis), tree)
        default = self.initial_state
        if default is None:
            default = stacked(self._zero_state(), n_cells)
        default = jax.tree.map(jnp.asarray, default)
        repeat = lambda s: jnp.repeat(s, xs.shape[1], axis)
        expected = default if one else jax.tree.map(repeat, add_batch(default))
        if state is None:
            state = expected
        state = jax.tree.map(jnp.asarray, state)
        shapes = lambda tree: jax.tree.map(jnp.shape, tree)
        if shapes(state) != shapes(expected):
            raise rule_error(
                f"`{type(self).__name__}` was given a `state` that does not fit.",
                f"its shape is {shapes(state)}, and has to be {shapes(expected)}",
                do="Pass what an earlier call returned, or `None`.",
            )
        if one:
            state = add_batch(state)
        state = jax.tree.map(lambda s: _one_for_each_device(s, xs), state)
        if n_cells == 1:
            return [state]
        return [jax.tree.map(lambda s, i=i: s[i], state) for i in range(n_cells)]


def _zero_past_the_end(ys: Array, valid: Array) -> Array:
    mask = valid.reshape(*valid.shape, *(1,) * (ys.ndim - 2))
    return jnp.where(mask, ys, jnp.zeros_like(ys))


def _one_for_each_device(state: Array, xs: Array) -> Array:
    """Under `shard_map`, the states differ between devices as soon as the inputs do, and the
    first has to be of a type that says so. Elsewhere nothing happens."""
    never = jnp.zeros_like(xs, shape=(), dtype=bool)
    if jax.typeof(never) == jax.typeof(jnp.zeros((), bool)):
        return state
    return jnp.where(never, jnp.zeros_like(state), state)


def common_dtype(*xs: Array | None) -> list[Any]:
    """All in one inexact dtype. A bfloat16 weight with float32 inputs is float32 here, and
    gets a gradient in its own."""
    dtype = promote([x for x in xs if x is not None])
    return [None if x is None else x.astype(dtype) for x in xs]


def check_features(layer: str, cell: Any, xs: Array) -> None:
    if xs.shape[-1] != cell.input_size:
        step = jax.ShapeDtypeStruct(xs.shape[2:], xs.dtype)  # there may be none
        raise rule_error(
            f"`{layer}` was given inputs of the wrong size.",
            f"a step of `xs` is {type_of(step)}, and `input_size` is {cell.input_size}",
            do="The last axis of `xs` is `input_size` long.",
        )


def make_cells(make, input_size, hidden_size, num_layers, bidirectional, key):
    """A cell for each layer and direction."""
    directions = 2 if bidirectional else 1
    keys = iter(jr.split(key, num_layers * directions))
    return tuple(
        tuple(
            make(input_size if i == 0 else directions * hidden_size, next(keys))
            for _ in range(directions)
        )
        for i in range(num_layers)
    )


def check_sizes(layer: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise rule_error(
                f"`{layer}` was given a size that is not a positive integer.",
                f"`{name}` is {size!r:.60}",
                do="Give a positive integer.",
            )


def check_option(layer: str, name: str, option: Any, known: Collection[str]) -> None:
    if not isinstance(option, str) or option not in known:
        raise rule_error(
            f"`{layer}` was given an option that it does not know.",
            f"`{name}` is {option!r:.60}",
            do=f"Give one of {', '.join(map(repr, known))}.",
        )


def check_cell(layer: str, cell: Any, expected: type) -> None:
    if not isinstance(cell, expected):
        raise rule_error(
            f"`{layer}.from_cell` was given another cell than it runs.",
            f"it is a `{type(cell).__name__}`, and has to be a `{expected.__name__}`",
            do="`eqx_grads.nn.Recurrent` runs any cell.",
        )


def stacked(zero: PyTree, n_cells: int) -> PyTree:
    """The first state of all cells, given that of one."""
    if n_cells == 1:
        return zero
    return jax.tree.map(lambda s: jnp.zeros((n_cells, *s.shape), s.dtype), zero)


def single_cell(layer: Any) -> Any:
    """The only cell of a layer."""
    cells = [cell for stage in layer.cells for cell in stage]
    if len(cells) != 1:
        raise rule_error(
            f"`{type(layer).__name__}.to_cell` was asked for one of {len(cells)} cells.",
            do="They are in `cells[layer][direction]`.",
        )
    return cells[0]
