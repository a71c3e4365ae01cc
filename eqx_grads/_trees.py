"""Trees of what is not an array, in the shape of a user's tree.

JAX promises the classes that users register that it unflattens them with arrays, tracers, `None`
and `object()` only, so their constructors may compute. A tree of types, bools or texts is a
mirror of the user's tree instead: containers of Python and Modules are what they were, and any
other class is a `Mirror` of itself.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax


# JAX, or Equinox, rebuilds these without a constructor of the user's.
_REBUILT = (
    dict,
    list,
    tuple,
    collections.OrderedDict,
    collections.defaultdict,
    type(None),
)
_LEAF = jax.tree.structure(0)


def one_level(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The keys and the children of a node, and its structure; a leaf has no key."""
    flatten = jax.tree_util.tree_flatten_with_path
    below, treedef = flatten(tree, is_leaf=lambda x: x is not tree)
    return [(path[0] if path else None, child) for path, child in below], treedef


def name_of_key(key: Any) -> Any:
    """A key of a path as users write it: the name of the attribute, the key or the index."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


@jax.tree_util.register_pytree_with_keys_class
class Mirror:
    """What a tree has instead of a user's class: `mirror.weight` and `mirror[0]` are what is
    there instead of the child of that name, or of that number."""

    def __init__(
        self, name: str, keys: Sequence[Any], children: Iterable[Any], static: Any = None
    ):
        self._name = name
        self._keys = tuple(keys)
        self._children = tuple(children)
        self._static = static or {}  # for errors

    def tree_flatten_with_keys(self):
        children = zip(self._keys, self._children, strict=True)
        return tuple(children), (self._name, self._keys)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*aux, children)

    def _named(self) -> dict[Any, Any]:
        return dict(zip(map(name_of_key, self._keys), self._children, strict=True))

    def __getitem__(self, key):
        return self._named()[key]

    def __getattr__(self, name):
        # Also asked for what every class may have, such as `__deepcopy__`.
        if not name.startswith("_") and name in self._named():
            return self[name]
        raise AttributeError(f"`{self.__dict__.get('_name')}` has no child `{name}`")

    def __eq__(self, other):
        return (
            isinstance(other, Mirror)
            and (self._name, self._keys) == (other._name, other._keys)
            and self._children == other._children
        )

    __hash__ = None  # as a list

    def __repr__(self):
        shown = {**self._named(), **self._static}.items()
        return f"{self._name}({', '.join(f'{name}={x!r}' for name, x in shown)})"


def _mirror_node(tree, keys, children, treedef):
    kind = type(tree)
    if kind in _REBUILT or isinstance(tree, eqx.Module | Mirror):
        return jax.tree.unflatten(treedef, children)
    if isinstance(tree, tuple):  # a named tuple, without its `__new__`
        return tuple.__new__(kind, children)
    names = set(map(name_of_key, keys))
    fields = dataclasses.fields(tree) if dataclasses.is_dataclass(tree) else ()
    static = {f.name: getattr(tree, f.name, None) for f in fields if f.name not in names}
    return Mirror(kind.__qualname__, keys, children, static)


def mirror(
    fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> Any:
    """`jax.tree.map` of a function that may return anything."""
    below, treedef = one_level(tree)
    if treedef == _LEAF or is_leaf(tree):
        return fn(tree)
    keys = [key for key, _ in below]
    children = [mirror(fn, child, is_leaf) for _, child in below]
    return _mirror_node(tree, keys, children, treedef)


def mirror_of(treedef: Any, leaves: Iterable[Any], like: Sequence[Any] | None = None) -> Any:
    """`jax.tree.unflatten` for leaves of any kind. The user's classes are unflattened with the
    leaves `like`, if these are given."""
    remaining = iter(leaves)
    tree = _without_leaves(treedef) if like is None else jax.tree.unflatten(treedef, like)
    return mirror(lambda _: next(remaining), tree)


def leaf_paths(treedef: Any) -> list[Any]:
    """Where each leaf is in a tree of this structure."""
    leaves = jax.tree_util.tree_leaves_with_path(_without_leaves(treedef))
    return [path for path, _ in leaves]


def _without_leaves(treedef):
    return jax.tree.unflatten(treedef, [object()] * treedef.num_leaves)
