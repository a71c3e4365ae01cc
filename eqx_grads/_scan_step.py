"""A step of a scan, from PyTrees to arrays: what varies, what is static, what fits."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._calls import is_dynamic, Rest
from ._errors import name_of, place_of, rule_error, show_tree, type_of
from ._spaces import as_array_list


class BecomesArray(Exception):
    """Python integers in the carry turn out to vary: the leaves with these numbers."""

    def __init__(self, places: frozenset[int]):
        Exception.__init__(self)
        self.places = places


def is_sliced(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _is_number(x):
    return is_sliced(x) or isinstance(x, bool | int | float | complex)


class Step:
    """`f` of a scan as a function of lists of arrays.

    - `init`, `xs` are the arrays that the loop starts from and slices.
    - `numbers` says which Python integers in the carry are arrays.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        init: Any,
        xs: Any,
        carry_gradient: Callable[..., Any] | None,
        numbers: frozenset[int],
    ):
        self._f = f
        self._carry_gradient = carry_gradient
        leaves, treedef = jax.tree.flatten(init)
        dynamic = [is_sliced(x) or is_dynamic(x) or i in numbers for i, x in enumerate(leaves)]
        places = [i for i, d in enumerate(dynamic) if d]
        self.init = as_array_list(leaves[i] for i in places)
        static = [None if d else x for x, d in zip(leaves, dynamic, strict=True)]
        self._carry = Rest(treedef, places, static)
        self._x, self.xs = Rest.split(xs, is_sliced)
        # Whoever traces the step leaves here what is not an array in `y`.
        self._y: list[Rest] = []

    def __call__(self, carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        carry_tree = self._carry.tree(as_array_list(carry))
        if self._carry_gradient is not None:
            passed = self._carry_gradient(carry_tree)
            self._check_carry(passed, self._carry_gradient, "`carry_gradient`")
            carry_tree = passed
        result = self._f(carry_tree, self._x.tree(as_array_list(x)))
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise rule_error(
                f"`{name_of(self._f)}`, a step of `filter_scan`, did not return a pair.",
                f"it returned {show_tree(result)}",
                place_of(self._f),
                do="Return `carry, y`; `y` may be `None`.",
            )
        new_carry = self._check_carry(result[0], self._f, f"`{name_of(self._f)}`")
        y, ys = Rest.split(result[1], _is_number)
        self._y[:] = [y]
        return new_carry, ys

    def outputs(self, carry: Sequence[Any], ys: Sequence[Any]) -> tuple[Any, Any]:
        """What `filter_scan` returns."""
        return self._carry.tree(carry), self._y[0].tree(ys)

    def _check_carry(self, new: Any, fn: Any, name: str) -> list[Any]:
        """The arrays of a carry, which has to be like the one that came in."""
        old = self._carry

        def fail(*where, do):
            return rule_error(
                f"{name} of `filter_scan` returned another carry than it was given."
                if name == "`carry_gradient`"
                else f"{name}, a step of `filter_scan`, returned another carry than it was "
                "given.",
                *where,
                place_of(fn),
                do=do,
            )

        leaves, treedef = jax.tree.flatten(new)
        if treedef != old.treedef:
            before = old.tree([_Varies()] * len(old.places))
            path, what = _structure_difference(before, new) or ("", "the structure")
            raise fail(
                f"at carry{path}: {what}",
                do="Every step returns a carry of the structure of `init`.",
            )
        paths = jax.tree_util.tree_leaves_with_path(new)
        where = lambda i: f"carry{jax.tree_util.keystr(paths[i][0])}"
        dynamic = set(old.places)
        becomes_array = set()
        for i, (before, after) in enumerate(zip(old.static, leaves, strict=True)):
            if i in dynamic or _same_static(before, after):
                continue
            if isinstance(before, bool | int) and _is_number(after):
                becomes_array.add(i)
                continue
            raise fail(
                f"at {where(i)}: it was {type_of(before)}, and is {type_of(after)}",
                do="What is not an array is static, and stays as it is. Hold what "
                "varies in an array, or choose with `jax.lax.cond`.",
            )
        if becomes_array:
            raise BecomesArray(frozenset(becomes_array))
        arrays = []
        for i, start in zip(old.places, self.init, strict=True):
            if not _is_number(leaves[i]):
                raise fail(
                    f"at {where(i)}: it was {type_of(start)}, and is {type_of(leaves[i])}",
                    do="Return an array.",
                )
            (after,) = as_array_list([leaves[i]])
            if not _fits(start, after):
                raise fail(
                    f"at {where(i)}: it was {type_of(start)}, and is {type_of(after)}",
                    do=_advice(start, after),
                )
            arrays.append(after)
        return arrays


@dataclasses.dataclass(frozen=True)
class _Varies:
    """Stands where an array was, when structures are compared."""


def _fits(before, after) -> bool:
    if before.shape != after.shape:
        return False
    if before.dtype == after.dtype:
        return True
    # A Python number has no dtype of its own: JAX gives `init` that of the steps.
    if not getattr(before, "weak_type", False):
        return False
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(before, after) == after.dtype


def _advice(before, after) -> str:
    if before.shape == after.shape:
        return (
            f"Give `init` the dtype {after.dtype}, or cast what the step returns to "
            f"{before.dtype}."
        )
    return f"Give `init` the shape {after.shape}, or return what has shape {before.shape}."


def _same_static(a, b) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, jax.Array | np.ndarray):
        return False
    # Two functions made by the same line of code are the same function to a reader, unless
    # they close over something.
    code = getattr(a, "__code__", None)
    if code is not None and code == getattr(b, "__code__", None):
        return a.__closure__ == b.__closure__ and a.__defaults__ == b.__defaults__
    try:
        return bool(a == b)
    except Exception:
        return False


def _structure_difference(a, b) -> tuple[str, str] | None:
    """Where the structures of two trees first differ, and how."""
    if jax.tree.structure(a) == jax.tree.structure(b):
        return None
    if type(a) is not type(b):
        return "", f"it was {_describe(a)}, and is {_describe(b)}"
    below_a = jax.tree_util.tree_flatten_with_path(a, is_leaf=lambda x: x is not a)[0]
    below_b = jax.tree_util.tree_flatten_with_path(b, is_leaf=lambda x: x is not b)[0]
    paths_a, paths_b = [p for p, _ in below_a], [p for p, _ in below_b]
    if paths_a != paths_b:
        return "", f"it was {_describe(a)}, and is {_describe(b)}"
    for (path, x), (_, y) in zip(below_a, below_b, strict=True):
        below = _structure_difference(x, y)
        if below is not None:
            return jax.tree_util.keystr(path) + below[0], below[1]
    fields = getattr(type(a), "__dataclass_fields__", {})
    for name in fields:
        x, y = getattr(a, name, None), getattr(b, name, None)
        if fields[name].metadata.get("static", False) and not _same_static(x, y):
            return f".{name}", f"it was {x!r:.60}, and is {y!r:.60}, a static field"
    return "", f"it was {_describe(a)}, and is {_describe(b)}"


def _describe(x) -> str:
    if x is None:
        return "None"
    if isinstance(x, _Varies):
        return "an array"
    if _is_number(x):
        return type_of(x)
    if isinstance(x, tuple | list | dict):
        keys = f" with the keys {list(x)}" if isinstance(x, dict) else f" of {len(x)}"
        return f"a {type(x).__name__}{keys}"
    return f"a {type(x).__name__}"
