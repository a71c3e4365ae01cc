"""Take Python objects apart, and put them together with other parts: one table, by kind."""

import collections
import functools as ft
import inspect
import types
from collections.abc import Callable, Iterator, Sequence, Set
from copy import copy as shallow_copy
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._errors import code_of, show_path


class Rebuildable:
    """A plain object whose whole state is its `__dict__`. A copy with other contents may
    replace the original."""

    # The attributes that may hold a tracer.
    captures: tuple[str, ...] = ()

    def captured(self) -> list[Any]:
        return [getattr(self, name) for name in self.captures]


class _Node:
    """Stands where an object of a user's class was that led to a tracer."""

    def __init__(self, treedef: Any, parts: Sequence[Any]):
        self.treedef = treedef
        self.parts = parts


JITTED = type(jax.jit(lambda: None))
_WITH_RULES = (eqx.filter_custom_jvp, eqx.filter_custom_vjp, jax.custom_jvp, jax.custom_vjp)
REBUILDABLE = (Rebuildable, eqx.Module, *_WITH_RULES)
# It leads to the original, and so to the tracers that were taken out.
_NOT_COPIED = ("__wrapped__",)
# Without an array at hand: to make one starts JAX, after which there is no
# `jax.distributed.initialize`. Tracers are not subclasses of `jax.Array`.
_ARRAYS = (np.ndarray, *jax.Array.__subclasses__())
PLAIN = {type(None), str, bytes, bool, int, float, complex, *_ARRAYS}


class Copy:
    """Copies objects with other values in them. An object without any stays what it is."""

    def __init__(self, swap: Callable[[Any], Any], owners: Set[int]):
        self.swap = swap
        self.owners = owners  # the objects that lead to a value to swap
        # The copies, and the objects, as an `id` is only good while its object lives. Cycles
        # are usual (a rule names the function that it belongs to), so functions, objects and
        # dicts are put here before their parts are copied.
        self.made: dict[int, tuple[Any, Any]] = {}

    def changes(self, x: Any) -> bool:
        return self.swap(x) is not x or id(x) in self.owners

    def __call__(self, x: Any) -> Any:
        new = self.swap(x)
        if new is not x or id(x) not in self.owners:
            return new
        if id(x) not in self.made:
            self.made[id(x)] = _kind_of(x)[1](x, self), x
        return self.made[id(x)][0]


def _function_parts(fn):
    parts = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        parts.append((name, _content(cell)))
    defaults = fn.__defaults__ or ()
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    parts.extend(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    parts.extend((fn.__kwdefaults__ or {}).items())
    return parts


def _copy_function(fn, copy):
    # A cell whose content stays is shared with the original, and with it what is assigned to
    # a `nonlocal` variable.
    old_cells = fn.__closure__ or ()
    cells = tuple(types.CellType() if copy.changes(_content(c)) else c for c in old_cells)
    new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells or None)
    copy.made[id(fn)] = new, fn
    # Not `functools.update_wrapper`: `__wrapped__` leads to the original.
    vars(new).update(attributes(fn))
    vars(new)["_eqg_code"] = code_of(fn)  # for errors: of the function that users know
    for name in ("__qualname__", "__doc__", "__module__"):
        setattr(new, name, getattr(fn, name))
    for cell, old in zip(cells, old_cells, strict=True):
        if cell is not old:
            cell.cell_contents = copy(old.cell_contents)
    if fn.__defaults__:
        new.__defaults__ = tuple(map(copy, fn.__defaults__))
    if fn.__kwdefaults__:
        new.__kwdefaults__ = {k: copy(v) for k, v in fn.__kwdefaults__.items()}
    return new


def holds_nothing(fn: Any) -> bool:
    """Whether `fn` is a function without values of its own, as most rules are."""
    holds = lambda fn: fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__ or fn.__dict__
    return type(fn) is types.FunctionType and not holds(fn)


def attributes(fn):
    return {k: v for k, v in vars(fn).items() if k not in _NOT_COPIED}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet: a name defined further down
        return None


def _copy_partial(x, copy):
    keywords = {k: copy(v) for k, v in x.keywords.items()}
    return type(x)(copy(x.func), *map(copy, x.args), **keywords)


def unjitted(fn):
    return inspect.unwrap(fn, stop=lambda f: not isinstance(f, JITTED))


def _copy_object(x, copy):
    new = object.__new__(type(x))
    copy.made[id(x)] = new, x
    for name, value in attributes(x).items():
        object.__setattr__(new, name, copy(value))
    return new


# Lists and dicts by hand, as JAX sorts the keys of a dict, which need not be possible.


def _copy_dict(x, copy):
    new = shallow_copy(x)
    copy.made[id(x)] = new, x
    for key, part in x.items():
        new[key] = copy(part)
    return new


def children_of(x):
    """One level of a PyTree, with paths; `None` if `x` is a leaf."""
    if isinstance(x, Iterator):  # which JAX warns of, and nobody may consume
        return None
    children, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if len(children) == 1 and children[0][1] is x:
        return None
    return children


def _copy_tree(x, copy):
    """A user's class is unflattened with arrays and tracers only: a `_Node` replaces it while
    it has placeholders."""
    parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    return _Node(treedef, list(map(copy, parts)))


# For each kind of object: its parts as (step, part), and its copy with other parts.
_LIST = (lambda x: list(enumerate(x)), lambda x, copy: type(x)(list(map(copy, x))))
_DICT = (lambda x: [((k,), v) for k, v in x.items()], _copy_dict)
_TREE = (lambda x: [(show_path(path), y) for path, y in children_of(x) or ()], _copy_tree)
KINDS: dict[type, tuple[Callable[[Any], list[tuple[Any, Any]]], Callable[..., Any]]] = {
    types.FunctionType: (_function_parts, _copy_function),
    types.MethodType: (
        lambda x: [("__func__", x.__func__), ("__self__", x.__self__)],
        lambda x, copy: types.MethodType(copy(x.__func__), copy(x.__self__)),
    ),
    list: _LIST,
    tuple: _LIST,
    dict: _DICT,
    collections.OrderedDict: _DICT,
    collections.defaultdict: _DICT,
    _Node: (
        lambda x: list(enumerate(x.parts)),
        lambda x, copy: jax.tree.unflatten(x.treedef, list(map(copy, x.parts))),
    ),
}
_KINDS_WITH_SUBCLASSES = {
    ft.partial: (
        lambda x: [("func", x.func), ("args", x.args), ("keywords", x.keywords)],
        _copy_partial,
    ),
    # We are inside a trace, where `jit` changes nothing but the program's layout.
    JITTED: (lambda x: [("__wrapped__", unjitted(x))], lambda x, copy: copy(unjitted(x))),
    REBUILDABLE: (lambda x: [*attributes(x).items(), ("__class__", type(x))], _copy_object),
}


def _kind_of(x: Any) -> Any:
    """`None` if `x` can't be put together again."""
    if type(x) in KINDS:
        return KINDS[type(x)]
    for cls, kind in _KINDS_WITH_SUBCLASSES.items():
        if isinstance(x, cls):
            return kind
    return None if children_of(x) is None else _TREE


def parts_of(x: Any) -> list[tuple[Any, Any]] | None:
    """The parts of `x`, as (step, part); `None` if it can't be put together again."""
    kind = _kind_of(x)
    return None if kind is None else kind[0](x)
