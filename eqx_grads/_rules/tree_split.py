"""Split a tree into its arrays and the rest, and put it together again.

The rest holds no array. A `ClosedTree` holds no tracer that a function captured, either.
"""

import abc
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._errors import show_path
from .._errors.trees import leaf_paths, mirror_of
from .._tangent_spaces import as_array_list, is_array, is_dynamic
from .closure_convert import ClosureTemplate, contains_tracer, lift_tracers


_LEAF = jax.tree.structure(0)


@ft.lru_cache
def _tuple_of(n: int) -> Any:
    return jax.tree.structure((0,) * n)


class TreeSplit:
    """A tree without its arrays: its structure, static leaves and the indices of the arrays."""

    def __init__(self, treedef: Any, indices: Sequence[int], static: Sequence[Any]):
        self.treedef = treedef
        self.indices = indices
        self.static = static
        self.has_static = len(indices) < len(static)

    @staticmethod
    def split(
        tree: Any, is_dynamic: Callable[[Any], bool]
    ) -> tuple["TreeSplit", list[jax.Array]]:
        """The tree without its dynamic leaves, and these as arrays."""
        # Most trees are an array or a tuple of arrays.
        if isinstance(tree, jax.Array):
            return TreeSplit(_LEAF, range(1), [None]), [tree]
        if type(tree) is tuple and all(isinstance(x, jax.Array) for x in tree):
            n = len(tree)
            return TreeSplit(_tuple_of(n), range(n), [None] * n), list(tree)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_has_traced_rules)
        indices = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
        arrays = as_array_list(leaves[i] for i in indices)
        for i in indices:
            leaves[i] = None
        return TreeSplit(treedef, indices, leaves), arrays

    def dynamic_tree(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays, and `None` for all static leaves."""
        return self.without_static().tree(arrays)

    def without_static(self) -> "TreeSplit":
        return TreeSplit(self.treedef, self.indices, [None] * len(self.static))

    def tree(self, arrays: Sequence[Any], static: Sequence[Any] | None = None) -> Any:
        """The tree with these arrays."""
        leaves = self.leaves(arrays, static)
        return leaves[0] if self.treedef is _LEAF else jax.tree.unflatten(self.treedef, leaves)

    def leaves(self, arrays: Sequence[Any], static: Sequence[Any] | None = None) -> list[Any]:
        """The leaves of the tree with these arrays."""
        if not self.has_static:
            return list(arrays)
        leaves = list(self.static if static is None else static)
        for i, x in zip(self.indices, arrays, strict=True):
            leaves[i] = x
        return leaves

    def path(self, i: int) -> Any:
        """Where the leaf number `i` is in the tree."""
        return leaf_paths(self.treedef)[i]

    def mirror(
        self,
        values: Sequence[Any],
        static: Sequence[Any] | None = None,
        arrays: Sequence[Any] | None = None,
    ) -> Any:
        """`tree` for values that are not arrays. The classes of the tree are unflattened with
        the `arrays`, if these are given."""
        objects = [object()] * len(self.static)
        like = None if arrays is None else self.leaves(arrays, objects)
        return mirror_of(self.treedef, self.leaves(values, static), like)


class ClosedTree:
    """A tree without its arrays, and without the tracers that its functions capture: these are
    the last operands."""

    def __init__(self, split: TreeSplit, closures: ClosureTemplate | None):
        self._split = split
        self._closures = closures

    @staticmethod
    def split(
        tree: Any, is_dynamic: Callable[[Any], bool]
    ) -> tuple["ClosedTree", list[jax.Array]]:
        """The tree without its operands, and these."""
        split, arrays = TreeSplit.split(tree, is_dynamic)
        if not split.has_static:
            return ClosedTree(split, None), arrays
        closures, captured = lift_tracers(split.static)
        split.static = closures.items
        return ClosedTree(split, closures), [*arrays, *captured]

    def tree(self, operands: Sequence[Any]) -> Any:
        """The tree with these operands."""
        n, static = len(self._split.indices), None
        if self._closures is not None:
            static, _ = self._closures.substitute(operands[n:])
        return self._split.tree(operands[:n], static)

    def places(self, name: str) -> list[str]:
        """Where each operand is, for messages: in the tree of this name, or captured."""
        captured = [] if self._closures is None else self._closures.names
        paths = map(self._split.path, self._split.indices)
        return [*(name + show_path(path) for path in paths), *captured]


def _has_traced_rules(x) -> bool:
    """A decorated function whose rules capture a tracer is a leaf. The rules are static, and
    closure conversion looks for tracers in leaves only."""
    return getattr(type(x), "_has_rules", False) and contains_tracer(x._rules)


def as_arrays(tree: Any) -> Any:
    """The tree that a caller sees: floats are arrays, integers and the rest as they are."""
    if all(isinstance(x, jax.Array) or not is_dynamic(x) for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: jnp.asarray(x) if is_dynamic(x) else x, tree)


class AbstractTransformed(eqx.Module):
    """What `filter_checkpoint` and the like return: a PyTree with the leaves of a function."""

    _eqg_fn: eqx.AbstractVar[Callable[..., Any]]

    @property
    def __wrapped__(self):
        return self._eqg_fn

    @abc.abstractmethod
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""

    def __get__(self, instance, owner=None):
        return self if instance is None else eqx.Partial(self, instance)


def call_on_arrays(
    transform: Callable[[Callable[..., Any], list[Any]], Sequence[Any]],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_operand: Callable[[Any], bool] = is_array,
) -> Any:
    """`fn(*args, **kwargs)`, by way of `transform(run, arrays)`. There, `run(arrays)` computes
    the arrays that the function returns from those among its leaves and its arguments."""
    call, arrays = TreeSplit.split((fn, args, kwargs), is_operand)
    returned: list[TreeSplit] = []

    # A new function for each call, so that JAX keeps nothing for the next call.
    def run(arrays):
        fn, args, kwargs = call.tree(arrays)
        out, ys = TreeSplit.split(fn(*args, **kwargs), is_operand)
        returned[:] = [out]
        return ys

    ys = transform(run, arrays)
    return returned[0].tree(ys)
