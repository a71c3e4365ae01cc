"""How cells are stacked and run: layers, directions, dropout, padding, layout of a batch."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from ..._errors import rule_error, show_path, type_of
from ..._errors.trees import mirror
from ..._rules.explicit_sharding import distribute_like, explicit_spec
from ..._rules.float_args import is_key_array
from ..._tangent_spaces import holds_numbers


class Stack(eqx.Module):
    """Runs the cells of a layer, whatever they are: one for each layer and direction.

    - `dropout`: between two layers.
    - `reverse`: whether the first direction runs from the last step to the first.
    - `time_major`: whether a batch is `(time, batch, in)`.
    - `directions`: of each layer, the number of cells that it was made with.
    """

    dropout: eqx.nn.Dropout
    reverse: bool = eqx.field(static=True)
    time_major: bool = eqx.field(static=True)
    directions: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        dropout: float,
        reverse: bool,
        time_major: bool,
        cells: Sequence[Sequence[Any]],
    ):
        # Equinox draws with `1 - dropout`, and JAX refuses an integer there.
        self.dropout = eqx.nn.Dropout(float(dropout))
        self.directions = tuple(map(len, cells))
        self.reverse = bool(reverse)
        self.time_major = bool(time_major)

    def drops(self, inference: bool | None) -> bool:
        """Whether there is dropout in a call with this `inference`."""
        is_off = self.dropout.inference if inference is None else inference
        return not is_off and self.dropout.p != 0

    def time_first(self, xs: Array) -> Array:
        """One sequence or a batch of them as `(time, batch, in)`."""
        if xs.ndim == 2:
            return xs[:, None]
        return xs if self.time_major else jnp.swapaxes(xs, 0, 1)

    def as_given(self, ys: PyTree, is_batch: bool) -> PyTree:
        """The inverse of `time_first`."""
        if not is_batch:
            return jax.tree.map(lambda y: y[:, 0], ys)
        return ys if self.time_major else jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1), ys)

    def run(
        self,
        run_cell: Callable[..., tuple[PyTree, PyTree]],
        cells: Sequence[Sequence[Any]],
        xs: Array,
        states: Sequence[PyTree],
        valid: Array | None,
        *,
        key: Array | None,
        inference: bool | None,
    ) -> tuple[PyTree, list[PyTree]]:
        """The outputs of the last layer, and the last states of all cells.

        `run_cell(cell, xs, state, valid, reverse)` returns all outputs and the last state.
        """
        remaining = iter(states)
        last = []
        for i, layer in enumerate(cells):
            if i > 0:
                key, subkey = (None, None) if key is None else jr.split(key)
                xs = self.dropout(xs, key=subkey, inference=inference)
            outputs = []
            for cell, reverse in zip(layer, (self.reverse, not self.reverse), strict=False):
                ys, end = run_cell(cell, xs, next(remaining), valid, reverse)
                if valid is not None:
                    ys = jax.tree.map(lambda y: _zero_padding(y, valid), ys)
                outputs.append(ys)
                last.append(end)
            xs = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, -1)
        return xs, last


def make_cells(
    make: Callable[..., Any],
    input_size: int,
    output_size: int,
    num_layers: int,
    bidirectional: bool,
    key: Array | None,
) -> tuple[tuple[Any, ...], ...]:
    """`make(input_size, key=key)` for each layer and direction. If there is no key, `make` is
    given `None`."""
    directions = 2 if bidirectional else 1
    n = num_layers * directions
    keys = iter(n * (None,) if key is None else jr.split(key, n))
    return tuple(
        tuple(
            make(input_size if i == 0 else directions * output_size, key=next(keys))
            for _ in range(directions)
        )
        for i in range(num_layers)
    )


def check_cells(
    layer: str, cells: Any, directions: tuple[int, ...], types: tuple[type, ...]
) -> None:
    """Check that the cells of a layer, which may have been replaced, are as many as it was made
    with, of its types, and of one size."""
    is_nested = isinstance(cells, tuple | list) and all(
        isinstance(stage, tuple | list) for stage in cells
    )
    if not is_nested or tuple(map(len, cells)) != directions:
        found = f"has {list(map(len, cells))}" if is_nested else "is not a tuple of tuples"
        raise rule_error(
            f"The `cells` of `{layer}` are not as many as it was made with.",
            f"it was made with {list(directions)} cells in its layers, and `cells` {found}",
            do="`cells[i]` is a tuple of the cells of layer `i`, one for each direction. Put "
            "as many there, or make the layer with the `num_layers=` and `bidirectional=` of "
            "your cells.",
        )
    flat = {f"cells[{i}][{j}]": c for i, stage in enumerate(cells) for j, c in enumerate(stage)}
    known = " or ".join(f"`{kind.__name__}`" for kind in types)
    for name, cell in flat.items():
        if not isinstance(cell, types):
            raise rule_error(
                f"A cell of `{layer}` is not one that this layer runs.",
                f"`{name}` is a `{type(cell).__name__}`, and has to be of type {known}",
                do="Give it such a cell, or take the layer of your cell. "
                "`eqx_grads.nn.Recurrent` runs any cell.",
            )
    sizes = {name: c.hidden_size for name, c in flat.items() if hasattr(c, "hidden_size")}
    if len(set(sizes.values())) > 1:
        raise rule_error(
            f"The cells of `{layer}` are not of one size.",
            *(f"`{name}` has `hidden_size` {size}" for name, size in sizes.items()),
            do="States of all cells are stacked: give all cells the same `hidden_size`, or "
            "make a layer for each.",
        )


# ---------------------------------------------------------------- padding


def valid_steps(layer: str, lengths: Any, xs: Array, is_batch: bool) -> Array | None:
    """The `(time, batch)` mask of the steps that count, or `None` if all do."""
    if lengths is None:
        return None
    if not isinstance(lengths, Tracer):
        lengths = _as_numpy(lengths)
    steps, batch = xs.shape[:2]
    expected = (batch,) if is_batch else ()
    if lengths.shape != expected or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise rule_error(
            f"`{layer}` was given `lengths` that do not fit `xs`.",
            f"`lengths` is {type_of(lengths)}",
            f"`xs` is {_show_batch(xs, is_batch)}",
            do=_what_lengths_to_pass(lengths, xs, is_batch),
        )
    if isinstance(lengths, np.ndarray) and lengths.size > 0:
        longest, shortest = int(np.max(lengths)), int(np.min(lengths))
        if longest > steps or shortest < 0:
            raise rule_error(
                f"`{layer}` was given `lengths` out of range.",
                f"they are from {shortest} to {longest}, and `xs` has {steps} steps",
                f"`xs` is {_show_batch(xs, is_batch)}",
                do="Did you swap the time axis and the batch axis? See `time_major`.",
            )
    times = jnp.arange(steps)[:, None]
    return times < jnp.asarray(lengths).astype(times.dtype).reshape(1, batch)


def _show_batch(xs: Array, is_batch: bool) -> str:
    steps, batch = xs.shape[:2]
    of_sequences = f"a batch of {batch} sequences" if is_batch else "one sequence"
    return f"{of_sequences} of {steps} steps"


def _what_lengths_to_pass(lengths: Any, xs: Array, is_batch: bool) -> str:
    steps, batch = xs.shape[:2]
    if not is_batch:
        return (
            "Pass one integer. In a `jax.vmap` over sequences, map their lengths as well: "
            "`jax.vmap(lambda x, n: layer(x, lengths=n))(xs, lengths)`."
        )
    if lengths.shape == (steps,) != (batch,):
        return "Did you swap the time axis and the batch axis? See `time_major`."
    return (
        f"Pass integers of shape {(batch,)}: one for each example. Of a mask with ones first "
        "and zeros after them, that is the sum over the time axis, such as `mask.sum(-1)`."
    )


def _as_numpy(x: Any) -> np.ndarray:
    """A list of integers or an array. What is neither becomes an array of an object."""
    try:
        return np.asarray(x)
    except (TypeError, ValueError):
        return np.asarray(None)


def _zero_padding(ys: Array, valid: Array) -> Array:
    mask = valid.reshape(*valid.shape, *(1,) * (ys.ndim - 2))
    return jnp.where(mask, ys, jnp.zeros_like(ys))


# ---------------------------------------------------------------- states
#
# The state of one cell is what the cell has, with a batch axis for a batch. The states of
# several cells have one more axis in front.


def zero_states(zero: PyTree, n_cells: int) -> PyTree:
    """The first states of all cells, given the first state of one."""
    if n_cells == 1:
        return zero
    return jax.tree.map(lambda s: jnp.zeros((n_cells, *s.shape), s.dtype), zero)


def first_states(
    layer: str, state: PyTree, default: PyTree, n_cells: int, xs: Array, is_batch: bool
) -> list[PyTree]:
    """The first state of each cell, with a batch axis."""
    axis = 0 if n_cells == 1 else 1
    add_batch = lambda tree: jax.tree.map(lambda s: jnp.expand_dims(s, axis), tree)
    repeat = lambda s: jnp.repeat(s, xs.shape[1], axis)
    if default is None and state is None:
        raise rule_error(
            f"`{layer}` does not know the first state of its cell.",
            "the cell has no method `initial_state()`, and the call has no `state`",
            do="Give the cell a method `initial_state()`, which returns the state of one "
            "example, or pass `state` in each call, or `initial_state=` to the layer, which "
            "becomes a parameter and is trained.",
        )
    expected = jax.tree.map(jnp.asarray, default)
    if is_batch:
        expected = jax.tree.map(repeat, add_batch(expected))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not holds_numbers(leaf):
            raise rule_error(
                f"`{layer}` was given a `state` that is not of arrays.",
                f"state{show_path(path)} is {type_of(leaf)}",
                do=_BY_NAME["key"] if is_key_array(leaf) else _PASS_STATE,
            )
    given = default if state is None else state
    state = expected if state is None else jax.tree.map(jnp.asarray, state)
    shapes = lambda tree: mirror(jnp.shape, tree)
    if default is None:  # then the cell may have a state of any shape
        expected = state
        if is_batch and {s.shape[:1] for s in jax.tree.leaves(state)} - {xs.shape[1:2]}:
            raise rule_error(
                f"`{layer}` was given a `state` that does not fit.",
                f"its shape is {shapes(state)}",
                f"`xs` is {_show_batch(xs, is_batch)}",
                do=f"Pass a state for each example: the first axis of each array is the batch, "
                f"of size {xs.shape[1]}.",
            )
    if shapes(state) != shapes(expected):
        raise rule_error(
            f"`{layer}` was given a `state` that does not fit.",
            f"its shape is {shapes(state)}, and has to be {shapes(expected)}",
            f"`xs` is {_show_batch(xs, is_batch)}",
            do=_what_state_to_pass(given, default, xs),
        )
    for leaf, like in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        if leaf.dtype == jnp.bool_ and jnp.issubdtype(like.dtype, jnp.inexact):
            raise rule_error(
                f"`{layer}` was given bools as a `state`.",
                f"its shape is {shapes(state)}",
                do=_BY_NAME["lengths"] + " Of a mask, they are the sums over the time axis.",
            )
    if not is_batch:
        state = add_batch(state)
    state = jax.tree.map(lambda s: _varying_like(xs, _sharded_like(xs, s, axis)), state)
    if n_cells == 1:
        return [state]
    return [jax.tree.map(lambda s, i=i: s[i], state) for i in range(n_cells)]


_PASS_STATE = "Pass what an earlier call returned, or `None`."
_BY_NAME = {
    name: f"The second argument is a state. Pass {what} by name: `layer(xs, {name}={name})`."
    for name, what in (("lengths", "lengths"), ("key", "a key"))
}


def _what_state_to_pass(state: PyTree, default: PyTree, xs: Array) -> str:
    """What to do instead of passing this state: it may be what follows in a call."""
    steps, batch = xs.shape[:2]
    shapes, dtypes = [], []
    for leaf in jax.tree.leaves(state):
        shapes.append(jnp.shape(leaf))
        dtypes.append(jnp.result_type(leaf))
    if shapes == [(2,)] and dtypes == [jnp.uint32]:
        return _BY_NAME["key"]
    if not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return _BY_NAME["lengths"]
    if shapes == [jnp.shape(leaf) for leaf in jax.tree.leaves(default)]:
        return (
            "This is the state of one example. Repeat it for each example of the batch, or "
            "pass `None` to begin with the initial state of the layer."
        )
    if set(shapes) <= {(), (batch,), (steps,), (batch, steps), (steps, batch)}:
        return _BY_NAME["lengths"]
    return _PASS_STATE


def last_states(states: Sequence[PyTree], is_batch: bool) -> PyTree:
    """The last states of all cells, as the user gets them."""
    if len(states) == 1:
        axis, state = 0, states[0]
    else:
        axis, state = 1, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return state if is_batch else jax.tree.map(lambda s: jnp.squeeze(s, axis), state)


def _varying_like(xs: Array, state: Array) -> Array:
    """The state, with a type that varies over the mesh axes that `xs` varies over.

    Under `jax.shard_map`, the states of a scan differ between devices as soon as its inputs do,
    and the type of the first state has to say so
    (https://docs.jax.dev/en/latest/notebooks/shard_map.html#scan-vma). Elsewhere this is the
    identity.
    """
    never = jnp.zeros_like(xs, shape=(), dtype=bool)
    if jax.typeof(never) == jax.typeof(jnp.zeros((), bool)):
        return state
    return jnp.where(never, jnp.zeros_like(state), state)


def _sharded_like(xs: Array, state: Array, axis: int) -> Array:
    """The state, whose batch at `axis` is sharded over explicit mesh axes as that of the `xs`.
    Elsewhere this is the identity."""
    spec, of_batch = explicit_spec(state), explicit_spec(xs)[1]
    return distribute_like(state, xs, (*spec[:axis], of_batch, *spec[axis + 1 :]))
