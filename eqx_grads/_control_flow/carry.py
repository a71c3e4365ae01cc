"""What a loop carries from step to step: what varies, what is static, what fits."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import place_of, rule_error, type_of
from .._rules.flatten_call import is_dynamic, TreeSplit
from .._tangent_spaces import as_array_list


class BecomesArray(Exception):
    """Python integers in the carry turn out to vary: the leaves with these numbers."""

    def __init__(self, places: frozenset[int]):
        Exception.__init__(self)
        self.places = places


def is_sliced(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_number(x):
    return is_sliced(x) or isinstance(x, bool | int | float | complex)


class Carry:
    """A carry as a list of arrays.

    - `first` are those that the loop starts from.
    - `numbers` says which Python integers are arrays.
    """

    def __init__(self, init: Any, numbers: frozenset[int]):
        leaves, treedef = jax.tree.flatten(init)
        dynamic = [is_sliced(x) or is_dynamic(x) or i in numbers for i, x in enumerate(leaves)]
        places = [i for i, d in enumerate(dynamic) if d]
        self.first = as_array_list(leaves[i] for i in places)
        static = [None if d else x for x, d in zip(leaves, dynamic, strict=True)]
        self._rest = TreeSplit(treedef, places, static)

    def tree(self, arrays: Sequence[Any]) -> Any:
        return self._rest.tree(as_array_list(arrays))

    def arrays(self, new: Any, fn: Callable[..., Any], error: str) -> list[Any]:
        """The arrays of a carry that `fn` returned, which has to be like the first one;
        `error` is the first line of the message if it is not."""
        old = self._rest
        fail = lambda where, do: rule_error(error, where, place_of(fn), do=do)
        leaves, treedef = jax.tree.flatten(new)
        if treedef != old.treedef:
            before = old.tree([_Varies()] * len(old.indices))
            path, was, is_now = structure_difference(before, new)
            raise fail(
                f"at carry{path}: it was {was}, and is {is_now}",
                do="Every step returns a carry of the structure of `init`.",
            )
        paths = jax.tree_util.tree_leaves_with_path(new)
        where = lambda i: f"carry{jax.tree_util.keystr(paths[i][0])}"
        dynamic = set(old.indices)
        becomes_array = set()
        for i, (before, after) in enumerate(zip(old.static, leaves, strict=True)):
            if i in dynamic or same_static(before, after):
                continue
            if isinstance(before, bool | int) and is_number(after):
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
        for i, start in zip(old.indices, self.first, strict=True):
            if not is_number(leaves[i]):
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


def same_static(a, b) -> bool:
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
    except Exception:  # whatever a user's `==` may raise: they are not known to be the same
        return False


def structure_difference(a, b) -> tuple[str, str, str]:
    """Where two trees of different structure first differ, and what is there in each."""
    here = "", _describe(a), _describe(b)
    if type(a) is not type(b):
        return here
    below_a = jax.tree_util.tree_flatten_with_path(a, is_leaf=lambda x: x is not a)[0]
    below_b = jax.tree_util.tree_flatten_with_path(b, is_leaf=lambda x: x is not b)[0]
    paths_a, paths_b = [p for p, _ in below_a], [p for p, _ in below_b]
    if paths_a != paths_b:
        return here
    for (path, x), (_, y) in zip(below_a, below_b, strict=True):
        if jax.tree.structure(x) != jax.tree.structure(y):
            below, x_there, y_there = structure_difference(x, y)
            return jax.tree_util.keystr(path) + below, x_there, y_there
    fields = getattr(type(a), "__dataclass_fields__", {})
    for name in fields:
        x, y = getattr(a, name, None), getattr(b, name, None)
        if fields[name].metadata.get("static", False) and not same_static(x, y):
            return f".{name}", f"{x!r:.60}", f"{y!r:.60}, a static field"
    return here


def _describe(x) -> str:
    if x is None:
        return "None"
    if isinstance(x, _Varies):
        return "an array"
    if is_number(x):
        return type_of(x)
    if isinstance(x, tuple | list | dict):
        keys = f" with the keys {list(x)}" if isinstance(x, dict) else f" of {len(x)}"
        return f"a {type(x).__name__}{keys}"
    return f"a {type(x).__name__}"
