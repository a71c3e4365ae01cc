"""Trees of what is not an array, in the shape of a user's tree.

JAX promises that it unflattens a registered class with arrays, tracers, `None` and `object()`
only, so the constructor of a user's class may compute. A tree of types, bools or texts is
therefore a mirror of the user's tree: containers of Python and Modules are what they were, and
an object of any other class is a `Mirror`.
"""

import dataclasses
from collections import defaultdict, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax


def one_level(tree: Any) -> tuple[list[Any], list[Any], Any]:
    """The keys and the children of a node, and its structure."""
    flatten = jax.tree_util.tree_flatten_with_path
    below, treedef = flatten(tree, is_leaf=lambda x: x is not tree)
    return [path[0] for path, _ in below if path], [child for _, child in below], treedef


def name_of_key(key: Any) -> Any:
    """A key of a path as users write it: the name of the attribute, the key or the index."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


@jax.tree_util.register_pytree_with_keys_class
class Mirror:
    """Stands for an object of a user's class: `mirror.weight` and `mirror[0]` are what is there
    instead of the child of that name, or of that number."""

    def __init__(
        self, keys: Sequence[Any], treedef: Any, children: Iterable[Any], static: Any = None
    ):
        self._keys = tuple(keys)
        self._treedef = treedef  # of the object, with its children for leaves
        self._children = tuple(children)
        self._static = static or {}  # for errors

    def tree_flatten_with_keys(self):
        return tuple(zip(self._keys, self._children, strict=True)), (self._keys, self._treedef)

    @classmethod
    def tree_unflatten(cls, aux, children):
        keys, treedef = aux
        return cls(keys, treedef, children)

    def _named(self) -> dict[Any, Any]:
        return dict(zip(map(name_of_key, self._keys), self._children, strict=True))

    def __getitem__(self, key):
        return self._named()[key]

    def __getattr__(self, name):
        # Python asks for what any class may have, such as `__deepcopy__`.
        if name.startswith("__") or name not in self._named():
            raise AttributeError(f"There is no child `{name}`.")
        return self[name]

    def __eq__(self, other):
        # The structures first: the leaves of another tree may be arrays.
        return jax.tree.flatten(self)[::-1] == jax.tree.flatten(other)[::-1]

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self):
        shown = {**self._named(), **self._static}.items()
        name = self._treedef.node_data()[0].__qualname__
        return f"{name}({', '.join(f'{k}={x!r}' for k, x in shown)})"


# Nothing of the user's runs when these are unflattened.
_REBUILT = (dict, list, tuple, OrderedDict, defaultdict, type(None), Mirror)
_LEAF = jax.tree.structure(0)


def is_leaf_structure(treedef: Any) -> bool:
    """Whether it is the structure of a leaf. An empty container is not a leaf."""
    return treedef == _LEAF


def mirror(
    fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> Any:
    """`jax.tree.map` of a function that may return anything."""
    keys, children, treedef = one_level(tree)
    if is_leaf_structure(treedef) or is_leaf(tree):
        return fn(tree)
    children = [mirror(fn, child, is_leaf) for child in children]
    if type(tree) in _REBUILT or isinstance(tree, eqx.Module):
        return jax.tree.unflatten(treedef, children)
    if isinstance(tree, tuple):  # a named tuple, without its `__new__`
        return tuple.__new__(type(tree), children)
    children_names = set(map(name_of_key, keys))
    fields = dataclasses.fields(tree) if dataclasses.is_dataclass(tree) else ()
    names = [f.name for f in fields if f.name not in children_names]
    return Mirror(keys, treedef, children, {k: getattr(tree, k, None) for k in names})


def mirrored(tree: Any) -> Any:
    """The mirror with the leaves of the tree, for code that maps anything over it."""
    return mirror(lambda x: x, tree)


def unmirror(tree: Any) -> Any:
    """The user's tree of a mirror of arrays."""
    is_mirror = lambda x: isinstance(x, Mirror)
    restore = lambda x: (
        jax.tree.unflatten(x._treedef, map(unmirror, x._children)) if is_mirror(x) else x
    )
    return jax.tree.map(restore, tree, is_leaf=is_mirror)


def mirror_of(treedef: Any, leaves: Iterable[Any], like: Sequence[Any] | None = None) -> Any:
    """`jax.tree.unflatten` for leaves of any kind. The user's classes are unflattened with the
    leaves `like`, if these are given."""
    remaining = iter(leaves)
    tree = _without_leaves(treedef) if like is None else jax.tree.unflatten(treedef, like)
    return mirror(lambda _: next(remaining), tree)


def on_leaves(fn: Callable[..., list[Any]], *trees: Any) -> Any:
    """The tree whose leaves are `fn` of the lists of leaves of the trees, which are alike."""
    leaves, treedefs = zip(*map(jax.tree.flatten, trees), strict=True)
    return jax.tree.unflatten(treedefs[0], fn(*leaves))


def filter_jvp(fn: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`eqx.filter_jvp`, which unflattens bools, of a function of leaves."""
    leaves, treedef = jax.tree.flatten(primals, is_leaf=lambda x: x is None)
    ts = jax.tree.leaves(tangents, is_leaf=lambda x: x is None)
    returned: list[Any] = []

    def of_leaves(*leaves):
        out, out_treedef = jax.tree.flatten(fn(*jax.tree.unflatten(treedef, leaves)))
        returned[:] = [out_treedef]
        return out

    out, t_out = eqx.filter_jvp(of_leaves, leaves, ts)
    return jax.tree.unflatten(returned[0], out), jax.tree.unflatten(returned[0], t_out)


def floating_only(tree: Any) -> Any:
    """The tree with `None` for all but its inexact arrays."""
    return jax.tree.map(lambda x: x if eqx.is_inexact_array(x) else None, tree)


def prefix_leaves(prefix: Any, tree: Any, is_leaf: Any = None) -> list[Any]:
    """For each leaf of a tree, the leaf of a prefix of the tree that covers it."""
    filled: list[Any] = []
    fill = lambda x, branch: filled.extend([x] * len(jax.tree.leaves(branch)))
    jax.tree.map(fill, mirrored(prefix), mirrored(tree), is_leaf=is_leaf)
    return filled


def leaf_paths(treedef: Any) -> list[Any]:
    """Where each leaf is in a tree of this structure."""
    leaves = jax.tree_util.tree_leaves_with_path(_without_leaves(treedef))
    return [path for path, _ in leaves]


def _without_leaves(treedef):
    return jax.tree.unflatten(treedef, [object()] * treedef.num_leaves)
