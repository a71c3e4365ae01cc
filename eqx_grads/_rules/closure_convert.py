"""Closure conversion: find the tracers that a function captures, and pass them as operands.

A function that closes over a tracer is only good inside the trace that made the tracer.
JAX keeps rules for later, so such a rule fails (or leaks) as soon as the order of two
transformations changes. Here `lift_tracers` finds a tracer in a closure cell, a default
argument, a `functools.partial`, a bound method, a nested function or a Module, and replaces it
by a `_Placeholder`. The caller passes it as an operand, and `ClosureTemplate.substitute` puts
it back when the function runs. Nothing is traced for it, so functions stay ordinary Python. An
object without tracers stays the very same object.
"""

import collections
import functools as ft
import gc
import inspect
import types
from collections.abc import Callable, Iterator, Sequence, Set
from copy import copy as shallow_copy
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from .._errors import code_of, name_of, rule_error, show_path


# ---------------------------------------------------------------- the parts of objects


class Rebuildable:
    """A plain object whose whole state is its `__dict__`. A copy with other contents may
    replace the original."""

    # The attributes that may hold a tracer.
    captures: tuple[str, ...] = ()


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
    new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells)
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


# ---------------------------------------------------------------- the search for tracers


class _Placeholder(NamedTuple):
    """Stands where a tracer was."""

    number: int


class Opaque:
    """An object that the search for tracers does not enter, and that copies share."""


_OF_PYTHON = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, type(None))
_OF_NUMPY = (np.ndarray, np.generic, np.dtype)
_CLOSED = (str, bytes, int, float, complex, *_OF_PYTHON, *_OF_NUMPY, Opaque)
_CONTAINERS = list | tuple | dict
# Objects of these modules hold no tracers of the user's, except in the types named here.
_FOREIGN = frozenset({"jax", "jaxlib", "numpy", "builtins", "threading", "logging"})
# A search ends here. Nobody means to capture so many objects, and it takes about a second.
_MOST_OBJECTS = 1_000_000
_ENTERED = {*KINDS, set, frozenset, types.CellType, types.MappingProxyType}


class ClosureTemplate(NamedTuple):
    """Objects without the tracers that they captured.

    - `items`, `holder`: as they were given to `lift_tracers`, with placeholders.
    - `names`: how the user would name each tracer.
    - `n_of_items`: how many tracers, the first ones, are reachable from the items. The others
        are reachable from `holder` only.
    - `owners`: the objects that lead to a placeholder, by their `id`.
    """

    items: list[Any]
    holder: Any
    names: Sequence[str] = ()
    n_of_items: int = 0
    owners: Set[int] = frozenset()

    def substitute(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """`items` and `holder` with `values` instead of the placeholders."""
        if not self.names:
            return self.items, self.holder
        swap = lambda x: values[x.number] if type(x) is _Placeholder else x
        copy = Copy(swap, self.owners)
        return list(map(copy, self.items)), copy(self.holder)


def lift_tracers(
    items: Sequence[Any], holder: Any = None, name: Callable[[int], str] | None = None
) -> tuple[ClosureTemplate, list[Tracer]]:
    """All tracers that are reachable from `items` and `holder`, each once, and the template
    that is left without them.

    - `name`: for errors, what the user calls the item with this number, if anything.
    """
    if not contains_tracer(*items, holder):
        return ClosureTemplate(list(items), holder), []
    search = _Search()
    # A path back to the holder (a function that names itself) is not followed there.
    search.seen[id(holder)] = holder
    for i, item in enumerate(items):
        root = name(i) if name is not None else ""
        search.visit(item, ((None, root),) if root else (), None)
    n_of_items = len(search.found)
    for step, part in parts_of(holder) or []:
        search.visit(part, ((holder, step),), holder)
    tracers, names = [tracer for tracer, _ in search.found], [name for _, name in search.found]
    index = {id(tracer): i for i, tracer in enumerate(tracers)}
    blank = lambda x: _Placeholder(index[id(x)]) if id(x) in index else x
    copy = Copy(blank, search.owners())
    items, holder = list(map(copy, items)), copy(holder)
    owners = {id(new) for new, _ in copy.made.values()}
    return ClosureTemplate(items, holder, names, n_of_items, owners), tracers


def captured_tracer(items: Sequence[Any]) -> tuple[int, str] | None:
    """The index of the first item that captures a tracer, and the name of the tracer."""
    for i, item in enumerate(items if contains_tracer(*items) else ()):
        search = _Search()
        search.visit(item, (), None)
        if search.found:
            return i, search.found[0][1]
    return None


def contains_tracer(*roots: Any) -> bool:
    """Whether a tracer is reachable from `roots`, also through objects that can't be rebuilt.

    Most functions capture none. This is the quick test, without names and paths: the garbage
    collector knows the references that an object holds.
    """
    seen: set[int] = set()
    front: Sequence[Any] = roots
    # The elements of a large container are looked at in C, by their types.
    while not PLAIN.issuperset(map(type, front)):
        reached: list[Any] = []
        for x in front:
            kind = type(x)
            if kind in PLAIN or id(x) in seen:
                continue
            if issubclass(kind, Tracer):
                return True
            seen.add(id(x))
            reached.extend(_references(x, kind))
        front = reached if len(seen) < _MOST_OBJECTS else ()
    return False


def _references(x, kind) -> Sequence[Any]:
    """The objects that `x` holds and that may hold tracers of the user's."""
    if kind is types.FunctionType:
        own = attributes(x).values() if x.__dict__ else ()
        return [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, *own]
    if issubclass(kind, Rebuildable):
        return [getattr(x, name) for name in x.captures]
    if issubclass(kind, type):
        return _class_attributes(x)
    if is_closed(x):
        return ()
    if issubclass(kind, (JITTED, *REBUILDABLE)):
        return [part for _, part in parts_of(x) or ()]
    if kind not in _ENTERED and not isinstance(x, ft.partial):
        package = kind.__module__.partition(".")[0]
        if package in _FOREIGN:
            children = children_of(x) if package == "jax" else None
            return [part for _, part in children or ()]
    return gc.get_referents(x)


def _class_attributes(cls) -> list[Any]:
    """A class that was made inside a function may have methods that close over its tracers;
    any class may have been given a tracer as an attribute."""
    if cls.__module__.partition(".")[0] in _FOREIGN:
        return []
    kinds: Any = Tracer
    if "<locals>" in cls.__qualname__:
        kinds = types.FunctionType | Tracer | _CONTAINERS
    return [v for v in vars(cls).values() if isinstance(v, kinds)]


class _Search:
    """A walk through all objects that a function can reach, which keeps the paths."""

    def __init__(self):
        self.found: list[tuple[Any, str]] = []  # the tracers and their names
        # Holds the objects too: an `id` is only good while its object lives.
        self.seen: dict[int, Any] = {}
        self._parents: dict[int, list[int]] = collections.defaultdict(list)

    def visit(self, x, trail, parent):
        if not isinstance(x, type) and is_closed(x):
            return
        if parent is not None:
            self._parents[id(x)].append(id(parent))
        if id(x) in self.seen:
            return
        self.seen[id(x)] = x
        if isinstance(x, Tracer):
            self.found.append((x, _format_path(trail)))
            return
        parts, is_function = parts_of(x), isinstance(x, types.FunctionType)
        if (parts is None or isinstance(x, _CONTAINERS)) and not contains_tracer(x):
            return
        if parts is None or (is_function and contains_tracer(*attributes(x).values())):
            raise _cannot_lift(x, trail)
        for step, part in parts:
            self.visit(part, (*trail, (x, step)), x)

    def owners(self) -> set[int]:
        """The objects from which a tracer is reachable."""
        owners: set[int] = set()
        front = [id(tracer) for tracer, _ in self.found]
        while front:
            x = front.pop()
            if x not in owners:
                owners.add(x)
                front.extend(self._parents[x])
        return owners


def is_closed(x: Any) -> bool:
    """Whether the search for tracers stops at `x`."""
    if isinstance(x, _CLOSED):
        return True
    if isinstance(x, type):
        return "<locals>" not in x.__qualname__
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _cannot_lift(x, trail):
    kind = (x if isinstance(x, type) else type(x)).__qualname__
    return rule_error(
        f"A function with a rule holds a traced value inside a `{kind}`, "
        "where it can't be replaced.",
        f"at {_format_path(trail)}",
        do="Pass the value as an argument, or hold it in an `eqx.Module`.",
    )


def _format_path(trail: Sequence[tuple[Any, Any]]) -> str:
    """The trail in the user's names: "`self.weight`, held by `f`"."""
    path, holder = "", None
    for owner, step in reversed(trail):
        if not isinstance(step, str):  # the place in a list, or the key in a dict
            step = f"[{step}]" if isinstance(step, int) else f"[{step[0]!r}]"
        step = "self" if step == "__self__" else step
        if isinstance(owner, types.FunctionType):
            path, holder = step + path, holder or name_of(owner)
            break
        if isinstance(owner, types.MethodType | ft.partial):
            path = {"func": "", "__func__": ""}.get(step, step) + path
            holder = holder or name_of(owner)
            if step not in ("func", "__func__"):
                break
        elif isinstance(owner, JITTED):
            continue
        elif step.startswith(("[", ".", "{")):
            path = step + path
        else:
            path = "." + step + path
    path = path.lstrip(".") or "a value"
    return f"`{path}`" + (f", held by `{holder}`" if holder else "")
