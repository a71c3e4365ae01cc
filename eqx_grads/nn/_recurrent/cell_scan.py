"""Run a cell over time and batch: by a backward pass of its own, or one call for each step."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..._control_flow import compile_eager_calls
from ..._control_flow.scan import filter_scan
from ..._control_flow.visible_steps import cells_are_called
from ..._errors import place_of, rule_error, show_path, show_tree, type_of
from ..._rules.explicit_sharding import explicit_spec, gathered_leaves, sharding_like
from ..._tangent_spaces import promote
from ..._trees import leaf_paths, mirror, mirror_of
from .padding import where_valid


# Functions `run(cell, xs, state, valid, reverse, keep)` for cells of exactly these types: a
# subclass may have another step.
FAST_PATHS: dict[type, Callable[..., tuple[Array, PyTree]]] = {}


def run_cell(
    cell: Any,
    xs: Array,
    state: PyTree,
    valid: Array | None,
    reverse: bool,
    keep: str | None = "auto",
    *,
    output: Callable[[PyTree], Any] | None = None,
    checkpoint: int | str | None = "auto",
) -> tuple[PyTree, PyTree]:
    """All outputs, `(time, batch, ...)`, and the last state, by the fast path of this cell if
    it has one. `keep` is what that path keeps for its backward pass: "gates", "states", or
    "auto"; with `None` the cell is called at each step, and so it is with an `output`, which is
    a function of the state, by default its first array."""
    fast = FAST_PATHS.get(type(cell))
    arrays = list(filter(eqx.is_inexact_array, jax.tree.leaves((cell, xs, state))))
    is_complex, called = any(map(jnp.iscomplexobj, arrays)), cells_are_called()
    if called and not is_complex:
        # In the common dtype, as the rules compute.
        dtype = promote(arrays)
        cast = lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x
        cell, xs, state = jax.tree.map(cast, (cell, xs, state))
    if fast is None or keep is None or output is not None or called or is_complex:
        checkpoint = None if called else checkpoint
        return _scan_cell(cell, output, xs, state, valid, reverse, checkpoint)
    return fast(gathered_leaves(cell), xs, state, valid, reverse, keep)


@compile_eager_calls
def _scan_cell(cell, output, xs, state, valid, reverse, checkpoint):
    def step(state, inputs):
        x, valid = inputs
        new = jax.vmap(lambda x, s: cell(x, s))(x, state)
        new = where_valid(valid, new, state)
        if output is None:
            return new, jax.tree.leaves(new)[0]
        return new, jax.vmap(output)(new)

    try:
        state = _widened(cell, lambda *args: step(*args)[0], state, (xs, valid))
        last, ys = filter_scan(step, state, (xs, valid), reverse=reverse, checkpoint=checkpoint)
    except Exception as error:
        error.add_note(
            f"It was raised in a step of a recurrent layer, {place_of(cell)}. The cell was "
            f"called with one input, {show_tree(_of_one(_type_of_step(xs)))}, and one state, "
            f"{show_tree(mirror(_of_one, state))}: the last axis of `xs` and the first state "
            "have to be of the sizes that it takes."
        )
        raise
    return ys, last


def _of_one(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _type_of_step(x: Array) -> jax.ShapeDtypeStruct:
    sharding = sharding_like(x, explicit_spec(x)[1:])
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def _widened(
    cell: Any, next_state: Callable[..., PyTree], state: PyTree, inputs: PyTree
) -> PyTree:
    """The first state in the dtypes of the next one, which the inputs may have widened."""
    found: list[Any] = []

    def leaves_of_next(*args):
        leaves, treedef = jax.tree.flatten(next_state(*args))
        found[:] = [treedef]
        return leaves

    inputs = jax.tree.map(_type_of_step, inputs)
    leaves, treedef = jax.tree.flatten(state)
    new = jax.eval_shape(leaves_of_next, state, inputs)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    if found[0] == treedef:
        for _ in leaves:  # a wide leaf widens those that are computed from it
            pairs = zip(leaves, new, strict=True)
            wide = [s.astype(t.dtype) if is_float(s) and is_float(t) else s for s, t in pairs]
            if [x.dtype for x in wide] == [x.dtype for x in leaves]:
                break
            leaves = wide
            new = jax.eval_shape(leaves_of_next, jax.tree.unflatten(treedef, leaves), inputs)
        given, returned = ([type_of(_of_one(x)) for x in xs] for xs in (leaves, new))
        where = [
            f"at state{show_path(path)}: it was given {s}, and returned {t}"
            for path, s, t in zip(leaf_paths(treedef), given, returned, strict=True)
            if s != t
        ]
    else:
        returned = show_tree(mirror_of(found[0], map(_of_one, new)))
        where = [f"it was given {show_tree(mirror(_of_one, state))}, and returned {returned}"]
    if where:
        raise rule_error(
            "The cell of `Recurrent` returned a different state than it was given.",
            *where,
            place_of(cell),
            do="Return a state like the first one, cast to its dtypes, or give another "
            "`initial_state` to the layer.",
        )
    return jax.tree.unflatten(treedef, leaves)
