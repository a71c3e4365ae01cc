"""Functions as PyTrees: find the traced values that a function holds, and hand them over.

A function that closes over a tracer is only good inside the trace that made the tracer.
JAX keeps rules for later, so such a rule fails (or leaks) as soon as the order of two
transformations changes. Here a traced value in a closure cell, a default argument, a
`functools.partial`, a bound method, a nested function or a Module is found
(`find_tracers`), replaced by a `_Hole` (`hollow`), passed as an operand by the caller, and
put back when the function runs (`fill`). Nothing is traced for it, so functions stay
ordinary Python.
"""

import functools as ft
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ._errors import name_of, place_of, rule_error


class Captured(NamedTuple):
    """A traced value that some function holds, and how the user would name it."""

    value: Any
    name: str


class _Hole(NamedTuple):
    """Stands where the traced value number `index` was."""

    index: int


class Copyable:
    """A plain object whose whole state is its `__dict__`, and which has no identity: a copy
    with other contents is as good as the original."""


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
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    np.ndarray,
    np.generic,
    np.dtype,
)
# Not part of what a function is: `__wrapped__` leads to the original, and so to what was
# to be taken out; the other is made anew when it is missing.
_NOT_COPIED = ("__wrapped__", "signature")
_FOREIGN = frozenset({"jax", "jaxlib", "numpy", "builtins", "threading", "logging"})
_OPAQUE_DEPTH = 3


def holds_nothing(fn: Any) -> bool:
    """Whether `fn` is a plain function without closure or defaults."""
    return isinstance(fn, types.FunctionType) and not (
        fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__
    )


def find_tracers(roots: Sequence[Any]) -> list[Captured]:
    """All traced values that can be reached from `roots`, each once."""
    found: list[Captured] = []
    # The memo holds the objects too: an `id` is only good while its object lives.
    memo: dict[int, Any] = {}
    for root in roots:
        _walk(root, (), memo, found, 0)
    return found


def _is_atom(x) -> bool:
    if x is None or isinstance(x, _ATOMS):
        return True
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _walk(x, trail, memo, found, opaque_depth):
    if _is_atom(x) or id(x) in memo:
        return
    memo[id(x)] = x
    if isinstance(x, jax.core.Tracer):
        if opaque_depth:
            raise _cannot_hoist(trail)
        found.append(Captured(x, _say(trail)))
        return
    if isinstance(x, types.FunctionType):
        _check_globals(x)
    parts = _parts(x)
    if parts is None:
        if opaque_depth == _OPAQUE_DEPTH:
            return
        opaque_depth += 1
        parts = _opaque_parts(x)
    for step, part in parts:
        if not _is_atom(part):
            _walk(part, (*trail, (x, step)), memo, found, opaque_depth)


def _parts(x) -> list[tuple[str, Any]] | None:
    """What `x` is made of, as (step, part); `None` if it can't be put together again."""
    if isinstance(x, types.FunctionType):
        return _function_parts(x)
    if isinstance(x, types.MethodType):
        return [("__func__", x.__func__), ("__self__", x.__self__)]
    if isinstance(x, ft.partial):
        return [("func", x.func), ("args", x.args), ("keywords", x.keywords)]
    if isinstance(x, _Jitted):
        return [("__wrapped__", x.__wrapped__)]
    if isinstance(x, _COPYABLE):
        return [(k, v) for k, v in vars(x).items() if k not in _NOT_COPIED]
    children = _children(x)
    return None if children is None else [(jax.tree_util.keystr(p), v) for p, v in children]


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
    children, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if len(children) == 1 and children[0][1] is x:
        return None
    return children


def _opaque_parts(x):
    if isinstance(x, set | frozenset):
        return [("{...}", part) for part in x]
    if type(x).__module__.partition(".")[0] in _FOREIGN:
        return []
    parts = list(getattr(x, "__dict__", {}).items())
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(x, slot):
                parts.append((slot, getattr(x, slot)))
    return parts


def _check_globals(fn):
    for name in fn.__code__.co_names:
        if isinstance(fn.__globals__.get(name), jax.core.Tracer):
            raise rule_error(
                f"`{name_of(fn)}` reads a traced value from the global variable `{name}`.",
                place_of(fn),
                do="A global outlives the trace that made its value. "
                f"Pass `{name}` as an argument instead.",
            )


def _cannot_hoist(trail):
    owner, _ = next(step for step in reversed(trail) if _parts(step[0]) is None)
    kind = type(owner).__qualname__
    return rule_error(
        f"A function with a rule holds a traced value inside a `{kind}`, "
        "where it can't be replaced.",
        f"at {_say(trail)}",
        do=f"Pass the value as an argument, or make `{kind}` an `eqx.Module`.",
    )


def _say(trail) -> str:
    """The trail in the user's names: "`self.weight`, held by `f`"."""
    path, holder = "", None
    for owner, step in reversed(trail):
        if isinstance(owner, types.FunctionType):
            path, holder = step + path, holder or name_of(owner)
            break
        if isinstance(owner, types.MethodType | ft.partial):
            path = {"func": "", "__func__": "", "__self__": "self"}.get(step, step) + path
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


def hollow(x: Any, captured: Sequence[Captured]) -> Any:
    """A copy of `x` with holes in place of the captured values, free of tracers."""
    index = {id(c.value): i for i, c in enumerate(captured)}
    return _rebuild(x, lambda y: _Hole(index[id(y)]) if id(y) in index else y, {})


def fill(x: Any, values: Sequence[Any]) -> Any:
    """A copy of a hollow `x` with `values` in its holes."""
    return _rebuild(x, lambda y: values[y.index] if type(y) is _Hole else y, {})


def _rebuild(x, swap: Callable[[Any], Any], memo):
    if _is_atom(x):
        return x
    swapped = swap(x)
    if swapped is not x:
        return swapped
    if id(x) in memo:
        return memo[id(x)][0]
    again = ft.partial(_rebuild, swap=swap, memo=memo)

    def remember(new):
        memo[id(x)] = (new, x)
        return new

    # Cycles are usual (a rule names the function that it belongs to), so functions and
    # Modules are remembered before their parts are made.
    if isinstance(x, types.FunctionType):
        return x if holds_nothing(x) else _rebuild_function(x, again, remember)
    if isinstance(x, types.MethodType):
        return remember(types.MethodType(again(x.__func__), again(x.__self__)))
    if isinstance(x, ft.partial):
        args = [again(arg) for arg in x.args]
        keywords = {k: again(v) for k, v in x.keywords.items()}
        return remember(type(x)(again(x.func), *args, **keywords))
    if isinstance(x, _Jitted):
        # We are inside a trace, where `jit` changes nothing but the program's layout.
        return remember(again(x.__wrapped__))
    if isinstance(x, _COPYABLE):
        new = remember(object.__new__(type(x)))
        for name, value in vars(x).items():
            if name not in _NOT_COPIED:
                object.__setattr__(new, name, again(value))
        return new
    if _children(x) is None:
        return remember(x)
    parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    return remember(jax.tree.unflatten(treedef, [again(part) for part in parts]))


def _rebuild_function(fn, again, remember):
    cells = tuple(types.CellType() for _ in fn.__closure__ or ())
    new = remember(
        types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, cells or None)
    )
    # Not `functools.update_wrapper`: `__dict__` and `__wrapped__` lead to the original.
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
