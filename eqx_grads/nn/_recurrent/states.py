"""The states of all cells of a layer.

The state of one cell is what the cell has, with a batch axis for a batch. The states of several
cells have one more axis in front.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..._errors import rule_error, show_tree
from ..._rules.explicit_sharding import distribute_like, explicit_spec
from ..._tangent_spaces import dtype_of_array
from ..._trees import mirror
from .padding import show_batch


def zero_state(cell: Any) -> PyTree:
    """The first state of a cell, for one example, unless one is learned. `None` if it is not
    known, and has to be given."""
    if callable(getattr(cell, "initial_state", None)):
        return cell.initial_state()
    if not isinstance(cell, eqx.nn.GRUCell | eqx.nn.LSTMCell):
        return None
    zero = jnp.zeros(cell.hidden_size, cell.weight_hh.dtype)
    return (zero, zero) if isinstance(cell, eqx.nn.LSTMCell) else zero


def zero_states(layer: str, cells: Sequence[Sequence[Any]]) -> PyTree:
    """The first states of all cells for one example, or `None` if they are not known."""
    states = [zero_state(cell) for stage in cells for cell in stage]
    if len(states) == 1:
        return states[0]
    if any(state is None for state in states):
        return None
    shapes = [mirror(jnp.shape, state) for state in states]
    if any(shape != shapes[0] for shape in shapes):
        raise rule_error(
            f"The cells of `{layer}` are not of one size.",
            f"their states have the shapes {', '.join(map(str, shapes))}",
            do="States of all cells are stacked: give all cells the same size, or make a layer "
            "for each.",
        )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def first_states(
    layer: str, state: PyTree, default: PyTree, n_cells: int, xs: Array, is_batch: bool
) -> list[PyTree]:
    """The first state of each cell, with a batch axis."""
    axis = 0 if n_cells == 1 else 1
    add_batch = lambda s: jnp.expand_dims(s, axis)
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
        expected = jax.tree.map(lambda s: jnp.repeat(add_batch(s), xs.shape[1], axis), expected)
    if state is None:
        state = expected
    elif expected is not None and _kinds(state) != _kinds(expected):
        raise rule_error(
            f"`{layer}` was given a `state` that does not fit.",
            f"it is {show_tree(state)}, and has to be {show_tree(expected)}",
            f"`xs` is {show_batch(xs, is_batch)}",
            do="Pass what an earlier call returned, with a state for each example of a batch, "
            "or `None`. Lengths and keys are passed by name, as in `layer(xs, lengths=lengths)`"
            " and `layer(xs, key=key)`; for a mask, pass `lengths=mask.sum(-1)`.",
        )
    state = jax.tree.map(jnp.asarray, state)
    if not is_batch:
        state = jax.tree.map(add_batch, state)
    state = jax.tree.map(lambda s: _varying_like(xs, _sharded_like(xs, s, axis)), state)
    if n_cells == 1:
        return [state]
    return [jax.tree.map(lambda s, i=i: s[i], state) for i in range(n_cells)]


def _kinds(state: PyTree) -> Any:
    """What a state has in common with the first one: structure, shapes, kinds of numbers."""
    leaves, treedef = jax.tree.flatten(state)
    # Integers would be rounded, and a mask would be taken for zeros and ones.
    kinds = (jnp.floating, jnp.complexfloating, jax.dtypes.extended)
    dtypes = map(dtype_of_array, leaves)
    of_dtype = lambda dtype: dtype and [jnp.issubdtype(dtype, kind) for kind in kinds]
    return treedef, [*map(jnp.shape, leaves)], [*map(of_dtype, dtypes)]


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
    """The state, whose batch at `axis` is sharded over explicit mesh axes as the batch of the
    `xs`. Elsewhere this is the identity."""
    spec, of_batch = explicit_spec(state), explicit_spec(xs)[1]
    return distribute_like(state, xs, (*spec[:axis], of_batch, *spec[axis + 1 :]))
