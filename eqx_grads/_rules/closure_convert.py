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
import types
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from .._errors import name_of, rule_error
from .object_parts import (
    attributes,
    children_of,
    Copy,
    JITTED,
    KINDS,
    parts_of,
    PLAIN,
    REBUILDABLE,
    Rebuildable,
)


class _Placeholder(NamedTuple):
    """Stands where a tracer was."""

    number: int


class Opaque:
    """An object that the search for tracers does not enter, and that copies share."""


_OF_PYTHON = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, type(None))
_OF_NUMPY = (np.ndarray, np.generic, np.dtype)
_CLOSED = (str, bytes, int, float, complex, *_OF_PYTHON, *_OF_NUMPY, Opaque)
_CONTAINERS = (list, tuple, dict)
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
        parts = x.__defaults__, x.__kwdefaults__
        return (*(x.__closure__ or ()), *filter(None, parts), *own)
    if issubclass(kind, Rebuildable):
        return x.captured()
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
    kinds = (Tracer,)
    if "<locals>" in cls.__qualname__:
        kinds = (types.FunctionType, Tracer, *_CONTAINERS)
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
