"""Scan carries: split into arrays and static leaves, and checked for a fixed type."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import place_of, rule_error, show_path, type_of, unlike
from .._jaxprs.current_trace import is_jit_disabled
from .._jaxprs.operands import fill
from .._rules.tree_split import is_equal, TreeSplit
from .._tangent_spaces import as_array_list, is_arraylike, is_dynamic, promote
from .._trees import leaf_paths


def is_sliced(x: Any) -> bool:
    """Whether a leaf of `xs` has a leading time axis, so that each step gets a slice."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_number(x: Any) -> bool:
    """Whether JAX can make an array of a leaf."""
    return is_sliced(x) or isinstance(x, bool | int | float | complex)


def common_length(
    caller: str, xs: Any, is_sliced: Callable[[Any], bool], length: int | None = None
) -> Any:
    """The length of the first axis, which all arrays in `xs` share: an integer, or symbolic.
    `length` is what the user says."""
    found, where = length, "`length`"
    for path, x in jax.tree_util.tree_leaves_with_path(xs):
        if not is_sliced(x):
            continue
        name, shape = f"`xs{show_path(path)}`", jnp.shape(x)
        if not shape:
            what, where = "an array without a first axis", f"{name} is {type_of(x)}"
            raise rule_error(f"{caller} was given {what}.", where, do=_SLICES)
        found, where = (shape[0], name) if found is None else (found, where)
        if shape[0] != found:
            where = f"{where} says {found}, {name} is {type_of(x)}"
            raise rule_error(f"{caller} was given lengths that differ.", where, do=_SLICES)
    if found is None:
        do = "Pass an array, such as `jnp.arange(n)`; `filter_scan` also takes `length=`."
        raise rule_error(f"{caller} can't tell its length.", "`xs` has no array", do=do)
    return found


_SLICES = (
    "Every array in `xs` has one slice for each step or call, along its first axis. Close over "
    "what is the same for all."
)


def as_array_if_varying(x: Any) -> Any:
    """A leaf of the first carry: an array if it certainly varies from step to step."""
    return jnp.asarray(x) if is_arraylike(x) and not isinstance(x, bool | int) else x


class Carry:
    """The structure of a carry, without its arrays: the static leaves, and the indices of the
    leaves that are arrays."""

    def __init__(self, init: Any):
        leaves, treedef = jax.tree.flatten(init)
        indices = [i for i, x in enumerate(leaves) if is_sliced(x) or is_dynamic(x)]
        static = fill(leaves, indices, [None] * len(indices))
        self._split = TreeSplit(treedef, indices, static)
        # The integers that a step changes, while it is traced to find them.
        self._varying: set[int] | None = None

    def first(self, init: Any) -> list[jax.Array]:
        """The arrays that the loop starts from."""
        leaves = jax.tree.leaves(init)
        return as_array_list(leaves[i] for i in self._split.indices)

    @staticmethod
    def settled(init: Any, step_of: Callable[..., Any]) -> "tuple[Carry, Any]":
        """The carry, and `init` with an array for each Python integer that a step changes.

        `step_of(carry, init)` returns a step and its arguments. The step is traced to find the
        integers, or run if there is no `jit`, where it may depend on values. It may show some
        of them only where others are arrays. No exception may end that trace: JAX would keep
        its tracers, if it closes over a tracer, for as long as the process lives.
        """
        carry = Carry(init)
        if any(isinstance(x, bool | int) for x in carry._split.static):
            varying = carry._varying = set()
            step, *args = step_of(carry, init)
            step(*args) if is_jit_disabled() else jax.make_jaxpr(step)(*args)
            carry._varying = None
            if varying:
                leaves, treedef = jax.tree.flatten(init)
                leaves = fill(leaves, varying, [jnp.asarray(leaves[i]) for i in varying])
                return Carry.settled(treedef.unflatten(leaves), step_of)
        return carry, init

    def paths(self) -> list[str]:
        """Where each array is, as the user would write it."""
        paths = leaf_paths(self._split.treedef)
        return [f"carry{show_path(paths[i])}" for i in self._split.indices]

    def tree(self, arrays: Sequence[Any]) -> Any:
        return self._split.tree(as_array_list(arrays))

    def arrays(
        self, new: Any, given: Sequence[Any], fn: Callable[..., Any], error: str
    ) -> list[Any]:
        """The arrays of the carry `new` that `fn` returned. It has to be like the carry that
        `fn` was `given`; `error` is the first line of the message if it is not."""
        old = self._split
        fail = lambda *where, do: rule_error(error, *where, place_of(fn), do=do)
        leaves, treedef = jax.tree.flatten(new)
        if treedef != old.treedef:
            text = "it was {}, and is {}"
            where = unlike(self.tree(given), new, "carry", text, lambda x: True)
            raise fail(*where, do="Every step returns a carry of the structure of `init`.")

        def misfit(i, before, after, do):
            where = f"carry{show_path(leaf_paths(treedef)[i])}"
            was = f"at {where}: it was {type_of(before)}, and is {type_of(after)}"
            return fail(was, do=do)

        dynamic = set(old.indices)
        for i, (before, after) in enumerate(zip(old.static, leaves, strict=True)):
            if i in dynamic or is_equal(before, after):
                continue
            can_vary = isinstance(before, bool | int) and is_number(after)
            if not can_vary or self._varying is None:
                raise misfit(i, before, after, _STATIC)
            self._varying.add(i)
        if self._varying:
            return list(given)  # the step is traced once more, with these as arrays
        arrays = []
        for i, start in zip(old.indices, given, strict=True):
            if not is_number(leaves[i]):
                raise misfit(i, start, leaves[i], "Return an array.")
            (after,) = as_array_list([leaves[i]])
            if not _fits(start, after):
                raise misfit(i, start, after, _advice(start, after))
            arrays.append(after)
        return arrays


_STATIC = (
    "A leaf that is not an array is static: it must not change, and a function is one object. "
    "Store a value that varies as an array, or choose with `jax.lax.cond`."
)


def _fits(before, after) -> bool:
    if before.shape != after.shape or before.dtype == after.dtype:
        return before.shape == after.shape
    # The dtype of a Python number is weak: `jax.lax.scan` casts `init` to the dtype of the
    # steps.
    return getattr(before, "weak_type", False) and promote([before, after]) == after.dtype


def _advice(before, after) -> str:
    if before.shape == after.shape:
        return (
            f"Give `init` the dtype {after.dtype}, or cast what the step returns to "
            f"{before.dtype}."
        )
    return f"Give `init` the shape {after.shape}, or return the shape {before.shape}."
