"""Functions as PyTrees: find the traced values that a function holds, and hand them over.

A function that closes over a tracer is only good inside the trace that made the tracer.
JAX keeps rules for later, so such a rule fails (or leaks) as soon as the order of two
transformations changes. Here a traced value in a closure cell, a default argument, a
`functools.partial`, a bound method, a nested function or a Module is found and replaced by a
`_Hole` (`hoist`), passed as an operand by the caller, and put back when the function runs
(`Hollow.fill`). Nothing is traced for it, so functions stay ordinary Python. What holds no
traced value stays the very same object.
"""

import collections
import copy
import functools as ft
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from .._errors import name_of, place_of, rule_error


class _Hole(NamedTuple):
    """Stands where a traced value was."""

    number: int


class Copyable:
    """A plain object whose whole state is its `__dict__`, and which has no identity: a copy
    with other contents is as good as the original."""


class Token:
    """An object that the walk does not enter, and copies share."""


_Jitted = type(jax.jit(lambda: None))
_COPYABLE = (
    Copyable,
    eqx.Module,
    eqx.filter_custom_jvp,
    eqx.filter_custom_vjp,
    jax.custom_jvp,
    jax.custom_vjp,
)
_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    types.ModuleType,
    types.BuiltinFunctionType,
    np.ndarray,
    np.generic,
    np.dtype,
    Token,
)
# Not part of what a function is: `__wrapped__` leads to the original, and so to what was
# to be taken out; the other is made anew when it is missing.
_NOT_COPIED = ("__wrapped__", "signature")
_CONTAINERS = (list, tuple, dict, collections.OrderedDict, collections.defaultdict)
_PLAIN = {type(None), str, bytes, bool, int, float, complex, np.ndarray}
_FOREIGN = frozenset({"jax", "jaxlib", "numpy", "builtins", "threading", "logging"})
_OPAQUE_DEPTH = 3


def without_traced_defaults(fn: Any) -> Any:
    """`fn` without its default values, if there are traced ones among them. For one that is
    called with all of its arguments."""
    if not isinstance(fn, types.FunctionType):
        return fn
    defaults = jax.tree.leaves((fn.__defaults__, fn.__kwdefaults__))
    if not any(isinstance(x, Tracer) for x in defaults):
        return fn
    return types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, fn.__closure__)


def holds_nothing(fn: Any) -> bool:
    """Whether `fn` is a plain function without closure or defaults."""
    return isinstance(fn, types.FunctionType) and not (
        fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__
    )


class Hollow:
    """Objects without their traced values.

    - `items`, `holder`: as they were given to `hoist`, free of tracers.
    - `names`: how the user would name each value. The first `n_of_items` of them can be
        reached from `items`, the others from `holder` only.
    """

    def __init__(self, items: list[Any], holder: Any, names: list[str], n_of_items: int):
        self.items = items
        self.holder = holder
        self.names = names
        self.n_of_items = n_of_items
        self._dirty: set[int] = set()

    def empty(self, values: Sequence[Any], dirty: set[int]) -> None:
        """Replace `values` by holes. `dirty` are the objects through which they are held."""
        index = {id(value): i for i, value in enumerate(values)}
        swap = lambda x: _Hole(index[id(x)]) if id(x) in index else x
        memo: dict[int, Any] = {}
        self.items = [_rebuild(item, swap, dirty, memo) for item in self.items]
        self.holder = _rebuild(self.holder, swap, dirty, memo)
        self._dirty = {id(new) for new, _ in memo.values()}

    def fill(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """`items` and `holder` with `values` in their holes."""
        if not self.names:
            return self.items, self.holder
        swap = lambda x: values[x.number] if type(x) is _Hole else x
        memo: dict[int, Any] = {}
        items = [_rebuild(item, swap, self._dirty, memo) for item in self.items]
        return items, _rebuild(self.holder, swap, self._dirty, memo)


def hoist(items: Sequence[Any], holder: Any = None) -> tuple[Hollow, list[Any]]:
    """All traced values that can be reached from `items` and `holder`, each once, and what
    is left without them."""
    search = _Search()
    # What leads back to the holder (a function that names itself) is not followed there.
    search.seen[id(holder)] = holder
    for item in items:
        search.visit(item, (), None, 0)
    n_of_items = len(search.found)
    for step, part in _parts(holder) or []:
        search.visit(part, ((holder, step),), holder, 0)
    values = [captured.value for captured in search.found]
    names = [captured.name for captured in search.found]
    hollow = Hollow(list(items), holder, names, n_of_items)
    if values:
        hollow.empty(values, search.dirty())
    return hollow, values


def check_holds_nothing(items: Sequence[Any], fail: Callable[[int, str], Exception]) -> None:
    """Raise `fail(i, name)` if item number `i` holds a traced value of that name."""
    for i, item in enumerate(items):
        search = _Search()
        search.visit(item, (), None, 0)
        if search.found:
            raise fail(i, search.found[0].name)


class _Captured(NamedTuple):
    value: Any
    name: str


class _Search:
    """A walk through everything that a function can reach."""

    def __init__(self):
        self.found: list[_Captured] = []
        # Holds the objects too: an `id` is only good while its object lives.
        self.seen: dict[int, Any] = {}
        self._parents: dict[int, list[int]] = collections.defaultdict(list)

    def visit(self, x, trail, parent, opaque_depth):
        if is_atom(x):
            return
        if parent is not None:
            self._parents[id(x)].append(id(parent))
        if id(x) in self.seen:
            return
        self.seen[id(x)] = x
        if isinstance(x, Tracer):
            if opaque_depth:
                raise _cannot_hoist(trail)
            self.found.append(_Captured(x, _say(trail)))
            return
        if isinstance(x, types.FunctionType):
            _check_globals(x)
            for name, value in _attributes(x):
                self.visit(value, (*trail, (x, name)), x, opaque_depth + 1)
        parts = _parts(x)
        if parts is None:
            if opaque_depth == _OPAQUE_DEPTH:
                return
            opaque_depth += 1
            parts = _opaque_parts(x)
        for step, part in parts:
            self.visit(part, (*trail, (x, step)), x, opaque_depth)

    def dirty(self) -> set[int]:
        """The objects from which a traced value can be reached."""
        dirty: set[int] = set()
        front = [id(captured.value) for captured in self.found]
        while front:
            x = front.pop()
            if x not in dirty:
                dirty.add(x)
                front.extend(self._parents[x])
        return dirty


def is_atom(x: Any) -> bool:
    """Whether `x` can't hold anything, or is not to be entered."""
    if isinstance(x, type):
        # One made inside a function may have methods that close over what is traced there.
        return "<locals>" not in x.__qualname__
    if x is None or isinstance(x, _ATOMS):
        return True
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _parts(x) -> list[tuple[Any, Any]] | None:
    """What `x` is made of, as (step, part); `None` if it can't be put together again."""
    if isinstance(x, types.FunctionType):
        return [] if holds_nothing(x) else _function_parts(x)
    if isinstance(x, types.MethodType):
        return [("__func__", x.__func__), ("__self__", x.__self__)]
    if isinstance(x, ft.partial):
        return [("func", x.func), ("args", x.args), ("keywords", x.keywords)]
    if isinstance(x, _Jitted):
        return [("__wrapped__", _unjitted(x))]
    if isinstance(x, _COPYABLE):
        parts = [(k, v) for k, v in vars(x).items() if k not in _NOT_COPIED]
        return [*parts, ("__class__", type(x))]
    # By hand, as JAX sorts the keys of a dict, which need not be possible.
    if type(x) in (list, tuple):
        return [] if set(map(type, x)) <= _PLAIN else list(enumerate(x))
    if type(x) in _CONTAINERS:
        return [] if set(map(type, x.values())) <= _PLAIN else [((k,), v) for k, v in x.items()]
    children = _children(x)
    return None if children is None else [(jax.tree_util.keystr(p), v) for p, v in children]


def _unjitted(fn):
    return inspect.unwrap(fn, stop=lambda f: not isinstance(f, _Jitted))


def _attributes(fn):
    return [(k, v) for k, v in vars(fn).items() if k not in _NOT_COPIED]


def _function_parts(fn):
    parts = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            parts.append((name, cell.cell_contents))
        except ValueError:  # a cell that is not filled yet: a name defined further down
            continue
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


def _opaque_parts(x):
    if isinstance(x, set | frozenset | collections.deque):
        return [("{...}", part) for part in x]
    if isinstance(x, type):
        kinds = (types.FunctionType, Tracer, *_CONTAINERS)
        return [(k, v) for k, v in vars(x).items() if isinstance(v, kinds)]
    if type(x).__module__.partition(".")[0] in _FOREIGN:
        return []
    parts = [*getattr(x, "__dict__", {}).items(), ("__class__", type(x))]
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(x, slot):
                parts.append((slot, getattr(x, slot)))
    return parts


def _check_globals(fn):
    for name in fn.__code__.co_names:
        if isinstance(fn.__globals__.get(name), Tracer):
            raise rule_error(
                f"`{name_of(fn)}` reads a traced value from the global variable `{name}`.",
                place_of(fn),
                do="A global outlives the trace that made its value. "
                f"Pass `{name}` as an argument instead.",
            )


def _cannot_hoist(trail):
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
        f"at {_say(trail)}",
        do=f"Pass the value as an argument, or {way_out}.",
    )


def _say(trail: Sequence[tuple[Any, Any]]) -> str:
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


def _rebuild(x, swap: Callable[[Any], Any], dirty: set[int], memo: dict[int, Any]):
    """A copy of `x` with other values in it; `x` itself where there are none to replace."""
    swapped = swap(x)
    if swapped is not x:
        return swapped
    if id(x) not in dirty:
        return x
    if id(x) in memo:
        return memo[id(x)][0]
    again = ft.partial(_rebuild, swap=swap, dirty=dirty, memo=memo)

    def remember(new):
        memo[id(x)] = (new, x)
        return new

    # Cycles are usual (a rule names the function that it belongs to), so functions and
    # Modules are remembered before their parts are made.
    if isinstance(x, types.FunctionType):
        return _rebuild_function(x, again, remember)
    if isinstance(x, types.MethodType):
        return remember(types.MethodType(again(x.__func__), again(x.__self__)))
    if isinstance(x, ft.partial):
        args = [again(arg) for arg in x.args]
        keywords = {k: again(v) for k, v in x.keywords.items()}
        return remember(type(x)(again(x.func), *args, **keywords))
    if isinstance(x, _Jitted):
        # We are inside a trace, where `jit` changes nothing but the program's layout.
        return remember(again(_unjitted(x)))
    if isinstance(x, _COPYABLE):
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
    parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    return remember(jax.tree.unflatten(treedef, [again(part) for part in parts]))


def _rebuild_function(fn, again, remember):
    cells = tuple(types.CellType() for _ in fn.__closure__ or ())
    new = remember(
        types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells or None)
    )
    # Not `functools.update_wrapper`: `__wrapped__` leads to the original.
    vars(new).update(_attributes(fn))
    new.__qualname__, new.__doc__, new.__module__ = (
        fn.__qualname__,
        fn.__doc__,
        fn.__module__,
    )
    for cell, old in zip(cells, fn.__closure__ or (), strict=True):
        try:
            cell.cell_contents = again(old.cell_contents)
        except ValueError:  # a cell that is not filled yet
            continue
    if fn.__defaults__:
        new.__defaults__ = tuple(again(value) for value in fn.__defaults__)
    if fn.__kwdefaults__:
        new.__kwdefaults__ = {k: again(v) for k, v in fn.__kwdefaults__.items()}
    return new
