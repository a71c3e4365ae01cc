"""Split a tree into its arrays and the rest, and put it together again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._errors.trees import leaf_paths, mirror_of
from .._tangent_spaces import as_array_list, is_dynamic
from .closure_convert import contains_tracer


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
        if all(isinstance(x, jax.Array) for x in (tree if type(tree) is tuple else (tree,))):
            leaves, treedef = jax.tree.flatten(tree)
            n = len(leaves)
            return TreeSplit(treedef, range(n), [None] * n), leaves
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_has_traced_rules)
        indices = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
        arrays = as_array_list(leaves[i] for i in indices)
        for i in indices:
            leaves[i] = None
        return TreeSplit(treedef, indices, leaves), arrays

    def without_static(self) -> "TreeSplit":
        return TreeSplit(self.treedef, self.indices, [None] * len(self.static))

    def tree(self, arrays: Sequence[Any], static: Sequence[Any] | None = None) -> Any:
        """The tree with these arrays."""
        return jax.tree.unflatten(self.treedef, self.leaves(arrays, static))

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

    def dynamic_tree(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays, and `None` for all static leaves."""
        return self.without_static().tree(arrays)


def _has_traced_rules(x) -> bool:
    """A decorated function whose rules capture a tracer is a leaf. The rules are static, and
    closure conversion looks for tracers in leaves only."""
    return getattr(type(x), "_has_rules", False) and contains_tracer(x._rules)


def as_arrays(tree: Any) -> Any:
    """The tree that a caller sees: floats are arrays, integers and the rest as they are."""
    if all(isinstance(x, jax.Array) or not is_dynamic(x) for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: jnp.asarray(x) if is_dynamic(x) else x, tree)
