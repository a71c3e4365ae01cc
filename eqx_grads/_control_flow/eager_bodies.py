"""Scan bodies that are used again in later eager calls, so that JAX compiles them once.

JAX finds a loop that it has compiled by the identity of the function that it was given, for as
long as that function lives. So the scan body lives as long as the user's step, and refers to
the step weakly.

`jax.lax.scan` relies on that identity alone: it computes with the old value of a global
variable that was assigned since. Here the step is then traced again: a body is used again only
if all that the step can reach is the same as it was, and is nothing that can be changed in
place.
"""

import sys
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._jaxprs.current_trace import is_eager
from .carry import is_number
from .scan_body import ScanBody


_KEPT: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[ScanBody, list[Any]]]] = (
    weakref.WeakKeyDictionary()
)
_MOST = 64  # bodies of one step: for other types of arguments, and other options
_LIBRARIES = ("jax", "jaxlib", "numpy", "equinox", "eqx_grads", "math", "functools", "builtins")
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_FIXED = (
    jax.Array,
    eqx.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    type(jax.jit(lambda: None)),
    jax.custom_jvp,
    jax.custom_vjp,
)


def eager_key(f: Callable[..., Any], args: Any, options: tuple[Any, ...]) -> Hashable | None:
    """Equal for two eager calls of the step `f` with arguments of the same types.

    `None` if JAX transforms the call, or if the body would keep an object of the user alive.
    """
    if not isinstance(f, types.FunctionType) or not is_eager():
        return None
    leaves, treedef = jax.tree.flatten(args)
    keys = [*map(_leaf_key, leaves), *map(_static_key, options)]
    if None in keys:
        return None
    key = (treedef, *keys)
    try:
        hash(key)
    except TypeError:  # a static field without a hash
        return None
    return key


def _leaf_key(x: Any) -> Hashable | None:
    if isinstance(x, Tracer):
        return None
    # A Python integer may be static.
    is_array = is_number(x) and not isinstance(x, bool | int)
    return jax.typeof(jnp.asarray(x)) if is_array else _static_key(x)


def _static_key(x: Any) -> Hashable | None:
    if isinstance(x, bool | int | np.integer | str | bytes | None):
        return type(x), x
    return (type(x), id(x)) if _lives_in_a_module(x) else None


def _lives_in_a_module(x: Any) -> bool:
    """Whether `x` is a name in a module, and so outlives all that refers to it."""
    found = sys.modules.get(getattr(x, "__module__", None) or "")
    for name in str(getattr(x, "__qualname__", "")).split("."):
        found = getattr(found, name, None)
    return found is x


def kept_body(f: Callable[..., Any], key: Hashable) -> ScanBody | None:
    """The body of an earlier call, if there is one that computes the same."""
    body, reached_before = _KEPT.get(f, {}).get(key, (None, []))
    if body is None:
        return None
    reached = _reached_by(f)
    if reached is None or len(reached) != len(reached_before):
        return None
    same = all(_strong(a) is b for a, b in zip(reached_before, reached, strict=True))
    return body if same else None


def keep_body(f: Callable[..., Any], key: Hashable, body: ScanBody) -> None:
    """Keep the body of a step, if its static outputs and what it can reach allow for that."""
    reached = _reached_by(f)
    if reached is None or any(_static_key(x) is None for x in body.static_outputs()):
        return
    bodies = _KEPT.setdefault(f, {})
    if len(bodies) >= _MOST:
        bodies.clear()
    bodies[key] = body, [_weak(x) for x in reached]


def _weak(x: Any) -> Any:
    return x if isinstance(x, _ATOMS) else weakref.ref(x)


def _strong(x: Any) -> Any:
    return x() if isinstance(x, weakref.ref) else x


def _reached_by(fn: Callable[..., Any]) -> list[Any] | None:
    """What a function reads from its closure, its default values and its global variables, and
    so for all functions among these. `None` if some of it may be changed in place."""
    reached: list[Any] = []
    front: list[Any] = [fn]
    seen = {id(fn)}
    while front:
        for x in _read_by(front.pop()):
            if id(x) in seen:
                continue
            seen.add(id(x))
            if type(x) is tuple:
                front.append(x)
                continue
            if _is_of_library(x):
                continue
            if not isinstance(x, (*_ATOMS, *_FIXED)) or isinstance(x, Tracer):
                return None
            reached.append(x)
            if isinstance(x, types.FunctionType):
                front.append(x)
    return reached


def _is_of_library(x: Any) -> bool:
    """Whether `x` is a module, a class or a function that only another library assigns."""
    if isinstance(x, types.ModuleType):
        name = x.__name__
    else:
        name = getattr(x, "__module__", None) if hasattr(x, "__qualname__") else None
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def _read_by(x: Any) -> list[Any]:
    if isinstance(x, tuple):
        return list(x)
    read = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    for cell in x.__closure__ or ():
        try:
            read.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    return [*read, *(x.__globals__[n] for n in _names_in(x.__code__) if n in x.__globals__)]


def _names_in(code: types.CodeType) -> list[str]:
    """The names in a function and in the functions that are defined inside of it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return [*code.co_names, *(name for c in inner for name in _names_in(c))]
