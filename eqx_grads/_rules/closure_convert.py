"""Closure conversion: find the tracers that a function captures, and pass them as operands.

A function that closes over a tracer is only good inside the trace that made the tracer.
JAX keeps rules for later, so such a rule fails (or leaks) as soon as the order of two
transformations changes. Here a tracer in a closure cell, a default argument, a
`functools.partial`, a bound method, a nested function or a Module is found and replaced by a
`_Placeholder` (`lift_tracers`), passed as an operand by the caller, and put back when the
function runs (`ClosureTemplate.substitute`). Nothing is traced for it, so functions stay
ordinary Python. An object without tracers stays the very same object.
"""

import collections
import copy
import functools as ft
import gc
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from .._errors import code_of, name_of, place_of, rule_error, show_path


class _Placeholder(NamedTuple):
    """Stands where a tracer was."""

    number: int


class _Node:
    """Stands where an object of a user's class was that led to a tracer."""

    def __init__(self, treedef: Any, parts: Sequence[Any]):
        self.treedef = treedef
        self.parts = parts


class Rebuildable:
    """A plain object whose whole state is its `__dict__`. A copy with other contents may stand
    for the original."""

    # The attributes that may hold a tracer.
    captures: tuple[str, ...] = ()


class Opaque:
    """An object that the search for tracers does not enter, and that copies share."""


_Jitted = type(jax.jit(lambda: None))
_REBUILDABLE = (
    Rebuildable,
    eqx.Module,
    eqx.filter_custom_jvp,
    eqx.filter_custom_vjp,
    jax.custom_jvp,
    jax.custom_vjp,
)
_CLOSED = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    np.ndarray,
    np.generic,
    np.dtype,
    Opaque,
)
# It leads to the original, and so to the tracers that were taken out.
_NOT_COPIED = ("__wrapped__",)
_CONTAINERS = (list, tuple, dict, collections.OrderedDict, collections.defaultdict)
# Without an array at hand: to make one starts JAX, after which there is no
# `jax.distributed.initialize`. Tracers are no subclasses of `jax.Array`.
_ARRAYS = (np.ndarray, *jax.Array.__subclasses__())
_PLAIN = {type(None), str, bytes, bool, int, float, complex, *_ARRAYS}
# Objects of these modules hold no tracers of the user's, except in the types named here.
_FOREIGN = frozenset({"jax", "jaxlib", "numpy", "builtins", "threading", "logging"})
# A search ends here. Nobody means to capture so many objects, and it takes about a second.
_MOST_OBJECTS = 1_000_000
_ENTERED = (
    *_CONTAINERS,
    set,
    frozenset,
    types.CellType,
    types.MethodType,
    types.MappingProxyType,
)


def _captures_nothing(fn: types.FunctionType) -> bool:
    return not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)


class ClosureTemplate:
    """Objects without the tracers that they captured.

    - `items`, `holder`: as they were given to `lift_tracers`, free of tracers.
    - `names`: how the user would name each tracer.
    - `item_of`: the index in `items` of the item that captured it, for the first tracers. The
        others are reachable from `holder` only.
    """

    def __init__(self, items: list[Any], holder: Any, names: list[str], item_of: list[int]):
        self.items = items
        self.holder = holder
        self.names = names
        self.item_of = item_of
        self._owners: set[int] = set()

    def blank(self, tracers: Sequence[Any], owners: set[int]) -> None:
        """Replace `tracers` by placeholders. `owners` are the objects that lead to them."""
        index = {id(tracer): i for i, tracer in enumerate(tracers)}
        swap = lambda x: _Placeholder(index[id(x)]) if id(x) in index else x
        memo: dict[int, Any] = {}
        self.items = [_rebuild(item, swap, owners, memo) for item in self.items]
        self.holder = _rebuild(self.holder, swap, owners, memo)
        self._owners = {id(new) for new, _ in memo.values()}

    def substitute(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """`items` and `holder` with `values` in place of the placeholders."""
        if not self.names:
            return self.items, self.holder
        swap = lambda x: values[x.number] if type(x) is _Placeholder else x
        memo: dict[int, Any] = {}
        items = [_rebuild(item, swap, self._owners, memo) for item in self.items]
        return items, _rebuild(self.holder, swap, self._owners, memo)


def lift_tracers(
    items: Sequence[Any], holder: Any = None
) -> tuple[ClosureTemplate, list[Tracer]]:
    """All tracers that are reachable from `items` and `holder`, each once, and the template
    that is left without them."""
    if not contains_tracer(*items, holder):
        return ClosureTemplate(list(items), holder, [], []), []
    search = _Search()
    # A path back to the holder (a function that names itself) is not followed there.
    search.seen[id(holder)] = holder
    item_of: list[int] = []
    for i, item in enumerate(items):
        search.visit(item, (), None, False)
        item_of += [i] * (len(search.found) - len(item_of))
    for step, part in _parts(holder) or []:
        search.visit(part, ((holder, step),), holder, False)
    tracers = [captured.value for captured in search.found]
    names = [captured.name for captured in search.found]
    template = ClosureTemplate(list(items), holder, names, item_of)
    if tracers:
        template.blank(tracers, search.owners())
    return template, tracers


def check_no_tracers(items: Sequence[Any], fail: Callable[[int, str], Exception]) -> None:
    """Raise `fail(i, name)` if item number `i` captures a tracer of that name."""
    if not contains_tracer(*items):
        return
    for i, item in enumerate(items):
        search = _Search()
        search.visit(item, (), None, False)
        if search.found:
            raise fail(i, search.found[0].name)


def contains_tracer(*roots: Any) -> bool:
    """Whether a tracer is reachable from `roots`, also through objects that can't be rebuilt.

    Most functions capture none. This is the quick test, without names and paths: the garbage
    collector knows the references that an object holds.
    """
    seen: set[int] = set()
    front: Sequence[Any] = roots
    # The elements of a large container are looked at in C, by their types.
    while not _PLAIN.issuperset(map(type, front)):
        reached: list[Any] = []
        for x in front:
            kind = type(x)
            if kind in _PLAIN or id(x) in seen:
                continue
            if kind is types.FunctionType:
                if _reads_traced_global(x):
                    return True
            elif issubclass(kind, Tracer):
                return True
            seen.add(id(x))
            reached.extend(_references(x, kind))
        front = reached if len(seen) < _MOST_OBJECTS else ()
    return False


def _references(x, kind) -> Sequence[Any]:
    """The objects that `x` holds and that may hold tracers of the user's."""
    if kind is types.FunctionType:
        return (x.__closure__, x.__defaults__, x.__kwdefaults__, *_attributes(x).values())
    if issubclass(kind, Rebuildable):
        return [getattr(x, name) for name in x.captures]
    if issubclass(kind, type):
        return _class_attributes(x)
    if kind is _Jitted:
        return (_unjitted(x),)
    if is_closed(x):
        return ()
    if isinstance(x, _REBUILDABLE):
        return [*(v for k, v in vars(x).items() if k not in _NOT_COPIED), kind]
    if kind not in _ENTERED and not isinstance(x, ft.partial):
        package = kind.__module__.partition(".")[0]
        if package in _FOREIGN:
            children = _children(x) if package == "jax" else None
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


class _Captured(NamedTuple):
    value: Any
    name: str


class _Search:
    """A walk through all objects that a function can reach, which keeps the paths."""

    def __init__(self):
        self.found: list[_Captured] = []
        # Holds the objects too: an `id` is only good while its object lives.
        self.seen: dict[int, Any] = {}
        self._parents: dict[int, list[int]] = collections.defaultdict(list)

    def visit(self, x, trail, parent, inside_opaque):
        if not isinstance(x, type) and is_closed(x):
            return
        if parent is not None:
            self._parents[id(x)].append(id(parent))
        if id(x) in self.seen:
            return
        self.seen[id(x)] = x
        if isinstance(x, Tracer):
            if inside_opaque:
                raise _cannot_lift(trail)
            self.found.append(_Captured(x, _format_path(trail)))
            return
        if isinstance(x, types.FunctionType):
            _check_globals(x)
            for name, value in _attributes(x).items():
                self.visit(value, (*trail, (x, name)), x, True)
        parts = _parts(x)
        if parts is None or isinstance(x, _CONTAINERS):
            if not contains_tracer(x):
                return
        if parts is None:
            inside_opaque = True
            parts = _opaque_parts(x)
        for step, part in parts:
            self.visit(part, (*trail, (x, step)), x, inside_opaque)

    def owners(self) -> set[int]:
        """The objects from which a tracer is reachable."""
        owners: set[int] = set()
        front = [id(captured.value) for captured in self.found]
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


def _parts(x) -> list[tuple[Any, Any]] | None:
    """What `x` is made of, as (step, part); `None` if it can't be put together again."""
    if isinstance(x, types.FunctionType):
        return [] if _captures_nothing(x) else _function_parts(x)
    if isinstance(x, types.MethodType):
        return [("__func__", x.__func__), ("__self__", x.__self__)]
    if isinstance(x, ft.partial):
        return [("func", x.func), ("args", x.args), ("keywords", x.keywords)]
    if isinstance(x, _Jitted):
        return [("__wrapped__", _unjitted(x))]
    if isinstance(x, _REBUILDABLE):
        parts = [(k, v) for k, v in vars(x).items() if k not in _NOT_COPIED]
        return [*parts, ("__class__", type(x))]
    # By hand, as JAX sorts the keys of a dict, which need not be possible.
    if type(x) in (list, tuple):
        return [] if set(map(type, x)) <= _PLAIN else list(enumerate(x))
    if type(x) in _CONTAINERS:
        return [] if set(map(type, x.values())) <= _PLAIN else [((k,), v) for k, v in x.items()]
    children = _children(x)
    return None if children is None else [(show_path(p), v) for p, v in children]


def _unjitted(fn):
    return inspect.unwrap(fn, stop=lambda f: not isinstance(f, _Jitted))


def _attributes(fn):
    return {k: v for k, v in vars(fn).items() if k not in _NOT_COPIED}


def _function_parts(fn):
    parts = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        parts.append((name, _content(cell)))
    defaults = fn.__defaults__ or ()
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    parts.extend(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    parts.extend((fn.__kwdefaults__ or {}).items())
    return parts


def _children(x):
    """One level of a PyTree, with paths; `None` if `x` is a leaf."""
    if isinstance(x, Iterator):  # which JAX warns of, and nobody may consume
        return None
    children, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if len(children) == 1 and children[0][1] is x:
        return None
    return children


def _opaque_parts(x) -> list[tuple[Any, Any]]:
    """What an object holds that can't be put together again, as (step, part)."""
    if isinstance(x, type):
        attributes = _class_attributes(x)
        return [(k, v) for k, v in vars(x).items() if any(v is a for a in attributes)]
    if isinstance(x, Mapping):
        return [((k,), v) for k, v in x.items()]
    parts = [*getattr(x, "__dict__", {}).items(), ("__class__", type(x))]
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(x, slot):
                parts.append((slot, getattr(x, slot)))
    # Sets, deques and other objects that are written in C have no names for their parts.
    named = {id(part) for _, part in parts}
    unnamed = [part for part in _references(x, type(x)) if id(part) not in named]
    return [*parts, *(("{...}", part) for part in unnamed)]


def _reads_traced_global(x) -> bool:
    values = x.__globals__
    return any(isinstance(values.get(name), Tracer) for name in x.__code__.co_names)


def _check_globals(fn):
    for name in fn.__code__.co_names:
        if isinstance(fn.__globals__.get(name), Tracer):
            raise rule_error(
                f"`{name_of(fn)}` reads a traced value from the global variable `{name}`.",
                place_of(fn),
                do="A global outlives the trace that made its value. "
                f"Pass `{name}` as an argument instead.",
            )


def _cannot_lift(trail):
    opaque = [owner for owner, _ in trail if _parts(owner) is None]
    owner = opaque[-1] if opaque else trail[-1][0]  # an attribute of a function
    is_class = isinstance(owner, type)
    kind = (owner if is_class else type(owner)).__qualname__
    way_out = (
        "define the class outside the function"
        if is_class
        else f"make `{kind}` an `eqx.Module`"
    )
    return rule_error(
        f"A function with a rule holds a traced value inside a `{kind}`, "
        "where it can't be replaced.",
        f"at {_format_path(trail)}",
        do=f"Pass the value as an argument, or {way_out}.",
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
        elif isinstance(owner, _Jitted):
            continue
        elif step.startswith(("[", ".", "{")):
            path = step + path
        else:
            path = "." + step + path
    path = path.lstrip(".") or "a value"
    return f"`{path}`" + (f", held by `{holder}`" if holder else "")


def _rebuild(x, swap: Callable[[Any], Any], owners: set[int], memo: dict[int, Any]):
    """A copy of `x` with other values in it; `x` itself where there are none to replace."""
    swapped = swap(x)
    if swapped is not x:
        return swapped
    if id(x) not in owners:
        return x
    if id(x) in memo:
        return memo[id(x)][0]
    again = ft.partial(_rebuild, swap=swap, owners=owners, memo=memo)

    def remember(new):
        memo[id(x)] = (new, x)
        return new

    # Cycles are usual (a rule names the function that it belongs to), so functions and
    # Modules are remembered before their parts are made.
    if isinstance(x, types.FunctionType):
        changes = lambda part: swap(part) is not part or id(part) in owners
        return _rebuild_function(x, changes, again, remember)
    if isinstance(x, types.MethodType):
        return remember(types.MethodType(again(x.__func__), again(x.__self__)))
    if isinstance(x, ft.partial):
        args = [again(arg) for arg in x.args]
        keywords = {k: again(v) for k, v in x.keywords.items()}
        return remember(type(x)(again(x.func), *args, **keywords))
    if isinstance(x, _Jitted):
        # We are inside a trace, where `jit` changes nothing but the program's layout.
        return remember(again(_unjitted(x)))
    if isinstance(x, _REBUILDABLE):
        new = remember(object.__new__(type(x)))
        for name, value in vars(x).items():
            if name not in _NOT_COPIED:
                object.__setattr__(new, name, again(value))
        return new
    if type(x) in (list, tuple):
        return remember(type(x)([again(part) for part in x]))
    if type(x) in _CONTAINERS:
        new = remember(copy.copy(x))
        for key, part in x.items():
            new[key] = again(part)
        return new
    if isinstance(x, _Node):
        return remember(jax.tree.unflatten(x.treedef, [again(part) for part in x.parts]))
    parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    return remember(_Node(treedef, [again(part) for part in parts]))


def _rebuild_function(fn, changes, again, remember):
    # A cell whose content stays is shared with the original, and with it what is assigned to
    # a `nonlocal` variable.
    old_cells = fn.__closure__ or ()
    cells = tuple(types.CellType() if changes(_content(c)) else c for c in old_cells)
    new = remember(
        types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells or None)
    )
    # Not `functools.update_wrapper`: `__wrapped__` leads to the original.
    vars(new).update(_attributes(fn))
    new._eqg_code = code_of(fn)  # for errors: of the function that users know
    for name in ("__qualname__", "__doc__", "__module__"):
        setattr(new, name, getattr(fn, name))
    for cell, old in zip(cells, old_cells, strict=True):
        if cell is not old:
            cell.cell_contents = again(old.cell_contents)
    if fn.__defaults__:
        new.__defaults__ = tuple(again(value) for value in fn.__defaults__)
    if fn.__kwdefaults__:
        new.__kwdefaults__ = {k: again(v) for k, v in fn.__kwdefaults__.items()}
    return new


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet: a name defined further down
        return None
