"""Whether a Python function would compute the same as in an earlier call.

It would if everything it can reach is the same: what it closes over, its default values, its
attributes, the global variables that it reads, and all that can be reached from these. What can
be changed in place is not followed: then the answer is that it is not known.
"""

import dis
import functools as ft
import sys
import types
import weakref
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from .._rules.closure_convert import Rebuildable


class Reached:
    """All objects that can be reached, in the order of a search, without keeping them alive."""

    def __init__(self, objects: Sequence[Any]):
        self._objects = [_Weak(x) for x in objects]

    @staticmethod
    def find(roots: Sequence[Any]) -> "Reached | None":
        """`None` if something may be changed in place."""
        objects: list[Any] = []
        front, entered = list(roots), set()
        while front:
            x = front.pop()
            # Also if it was reached before: another name for it is another use of it.
            objects.append(x)
            if id(x) in entered or _is_value(x) or _is_of_library(x):
                continue
            entered.add(id(x))
            parts = _parts(x)
            if parts is None:
                return None
            front.extend(parts)
        try:
            return Reached(objects)
        except TypeError:  # an object without weak references
            return None

    def is_same(self, other: "Reached") -> bool:
        a, b = self._objects, other._objects
        return len(a) == len(b) and all(x.is_same(y) for x, y in zip(a, b, strict=True))


class _Weak:
    """An object, to be compared by identity, or a value."""

    def __init__(self, x: Any):
        # `0.0 == -0.0`, and `1 == True`.
        self._value = (type(x), repr(x)) if _is_value(x) else None
        is_held = self._value is not None or isinstance(x, tuple)
        self._ref = None if is_held else weakref.ref(x)

    def is_same(self, other: "_Weak") -> bool:
        if self._ref is None or other._ref is None:
            # The elements of a tuple are compared themselves.
            return self._ref is other._ref and self._value == other._value
        x = self._ref()
        return x is not None and x is other._ref()


# The `repr` of an `object()` has its address.
_VALUES = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), object)
_LIBRARIES = frozenset(
    """
    jax jaxlib numpy equinox eqx_grads math functools builtins typing abc collections
    dataclasses
    """.split()  # noqa: SIM905
)
_Jitted = type(jax.jit(lambda: None))
# What a decorator copies from the function that it wraps, and what a class says about itself.
_METADATA = frozenset(
    (*ft.WRAPPER_ASSIGNMENTS, "__repr__", "__annotate__", "__annotate_func__")
)
_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    type(vars(namedtuple("_Pair", "x"))["x"]),
)


def _is_value(x: Any) -> bool:
    return type(x) in _VALUES or isinstance(x, np.number | np.bool | np.dtype)


def _is_of_library(x: Any) -> bool:
    """Whether `x` is a module, a class or a function that only another library assigns."""
    if isinstance(x, types.ModuleType):
        return _is_library(x.__name__)
    return _is_library(getattr(x, "__module__", None)) and lives_in_a_module(x)


def _is_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def lives_in_a_module(x: Any) -> bool:
    """Whether `x` is a name in a module, and so outlives all that refers to it."""
    found = sys.modules.get(getattr(x, "__module__", None) or "")
    for name in str(getattr(x, "__qualname__", "")).split("."):
        found = getattr(found, name, None)
    return found is x


def _parts(x: Any) -> list[Any] | None:
    """What an object consists of, or `None` if it may be changed in place."""
    if isinstance(x, types.FunctionType):
        return _parts_of_function(x)
    if isinstance(x, type):
        return _parts_of_class(x)
    if isinstance(x, tuple):
        return [type(x), *x]
    if isinstance(x, types.BuiltinFunctionType):  # `x.append` is a method of `x`
        return [x.__self__]
    if isinstance(x, _Jitted):
        return [vars(x)["__wrapped__"]]
    if isinstance(x, Rebuildable):
        return [getattr(x, name) for name in x.captures]
    if isinstance(x, eqx.Module | jax.custom_jvp | jax.custom_vjp):
        attributes = vars(x).items()
        return [type(x), *(part for name, part in attributes if name not in _METADATA)]
    is_immutable = isinstance(x, jax.Array | types.CodeType) and not isinstance(x, Tracer)
    return [] if is_immutable else None


def _parts_of_function(fn: types.FunctionType) -> list[Any] | None:
    """`None` if it reads what can't be found before it is called."""
    # Of a function that is marked as a wrapper of another one, `__module__` is the other's.
    is_library = _is_library(fn.__globals__.get("__name__"))
    names, is_known = _names_in(fn.__code__)
    if not is_library and not is_known:
        return None
    parts = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    parts += [x for name, x in vars(fn).items() if name not in _METADATA]
    for cell in fn.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    if not is_library:
        parts += [fn.__globals__[name] for name in names if name in fn.__globals__]
    return [fn.__code__, *parts]


@ft.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], bool]:
    """The names in a function and in the functions that are defined inside of it, and whether
    it reads modules and global variables by these names only."""
    imported = [i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"]
    is_known = all(map(_is_library, imported)) and _BY_STRING.isdisjoint(code.co_names)
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    names = [*code.co_names, *(name for names, _ in inner for name in names)]
    return tuple(names), is_known and all(known for _, known in inner)


_BY_STRING = frozenset(("globals", "eval", "exec", "__import__"))


def _parts_of_class(cls: type) -> list[Any]:
    """Its bases, its methods, and its attributes, but for those that Python, `dataclasses` and
    `abc` add."""
    parts: list[Any] = [type(cls), *cls.__bases__]
    for name, x in vars(cls).items():
        is_special = name.startswith("__") and name.endswith("__")
        if isinstance(x, property):
            parts += [x.fget, x.fset]
        elif isinstance(x, classmethod | staticmethod):
            parts.append(x.__func__)
        elif name in _METADATA or isinstance(x, _DESCRIPTORS):
            continue
        elif callable(x) or not (is_special or name in ("_abc_impl", "_field_defaults")):
            parts.append(x)
    return parts
