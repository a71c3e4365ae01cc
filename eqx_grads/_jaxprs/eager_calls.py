"""Compile eager calls of loops once: `jax.jit`, with arrays as operands and the rest static.

JAX compiles an eager loop again unless its step is the same Python object as before, and a step
that closes over arrays is a new object in each call. So an eager call runs in `jax.jit`, with
the arrays as operands, and JAX finds the compiled program by their types.

JAX knows the user's functions by their identity, as in `jax.lax.scan`, and so does this file.
It does not keep them alive. A function that finds another object under a name than before, or
another number in a NumPy array, is compiled again. A call is not compiled if a function reads
an object that may be changed in place. (`jax.lax.scan` computes with the old value.)
"""

import contextlib
import dataclasses
import dis
import functools as ft
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .current_trace import staging_trace
from .varying import is_in_shard_map


P = ParamSpec("P")
T = TypeVar("T")


def compile_eager_calls(fn: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the library that takes arrays and options."""

    @ft.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return call_compiled(fn, (), *args, **kwargs)

    return call


def call_compiled(
    run: Callable[..., T],
    functions: Sequence[Callable[..., Any] | None],
    *args: Any,
    has_loop: bool = True,
    **kwargs: Any,
) -> T:
    """`run(*functions, *args, **kwargs)`, where `run` is a function of the library.

    - A program that is being staged runs `run` itself: `jax.jit` would add nothing.
    - So does a call with objects that may differ in the next call, though they look the same.
    - `run` is given weak proxies, and so can't search the functions for captured tracers.
    - Without `has_loop`, the first call runs operation by operation. Of a function that is new
      in each call, nothing is compiled.
    """
    as_it_is = lambda: run(*functions, *args, **kwargs)
    disabled_jit: bool = jax.config.jax_disable_jit  # pyright: ignore
    if staging_trace() is not None or disabled_jit or is_in_shard_map():
        return as_it_is()
    pairs = [(f, callable(f) and not _is_operand(f)) for f in functions]
    operands = [None if is_key else f for f, is_key in pairs]
    leaves, treedef = jax.tree.flatten((operands, args, kwargs))
    try:
        keys = [f for f, is_key in pairs if is_key]
        if any(_may_change(x) for f in keys for x in _reads(f)):
            return as_it_is()
        methods = [getattr(f, "__func__", type(f).__call__) for f in operands if f is not None]
        inner = [f for f in (*methods, *leaves) if isinstance(f, types.FunctionType)]
        calls = _calls_of(run, [*keys, *inner])
        key = _Tree.without_arrays(leaves, treedef)
        hash(key)
    except TypeError:  # something has no key, no hash or no weak reference
        return as_it_is()
    is_new = key not in calls
    jitted = calls.get(key)
    if jitted is None:
        if len(calls) >= _MOST:
            calls.clear()
        proxies = [weakref.proxy(f) if is_key else None for f, is_key in pairs]
        jitted = calls[key] = _jit(run, proxies, key)
    if is_new and not has_loop:
        return as_it_is()
    with contextlib.suppress(_HasNoKey, *_LOOKS_AT_VALUES):
        arrays, static = jitted(list(filter(_is_array, leaves)))
        return static.tree.unflatten(arrays)
    return as_it_is()


# The number of programs that are kept for one `run` and the same functions.
_MOST = 64
_LOOKS_AT_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_FUNCTIONS = (
    types.FunctionType,
    ft.partial,
    type(jax.jit(lambda: None)),
    jax.custom_jvp,
    jax.custom_vjp,
    eqx.Module,
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.dtype, np.generic)
# What may not change without notice: the bits of NumPy arrays are compared.
_FIXED = (*_FUNCTIONS, *_PLAIN, jax.Array, np.ndarray, type, types.ModuleType)
_ARRAY = object()  # in the place of an array


def _is_array(x: Any) -> bool:
    if isinstance(x, jax.Array):
        return True
    return type(x) is np.ndarray and (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.number))


class _HasNoKey(TypeError):
    pass


def _key(x: Any) -> Hashable:
    """A leaf as part of a key: equal keys, the same program."""
    if _is_array(x):
        return None
    if isinstance(x, _PLAIN):
        return type(x), repr(x)  # `0.0 == -0.0`, and `1 == True`
    # The program keeps it alive, and so nothing that it closes over.
    is_small = isinstance(x, types.FunctionType) and x.__closure__ is None
    if is_small or lives_in_a_module(x):
        return type(x), id(x)
    raise _HasNoKey


def _is_operand(f: Any) -> bool:
    """Whether a callable is a Module, or the like, whose leaves are arrays and parts of a key.
    Any other function is a key."""
    if jax.tree_util.all_leaves([f]):
        return False
    try:
        list(map(_key, jax.tree.leaves(f)))
    except _HasNoKey:
        return False
    return True


def lives_in_a_module(x: Any) -> bool:
    """Whether `x` is a name in a module, and so outlives all that refers to it."""
    found = sys.modules.get(getattr(x, "__module__", None) or "")
    for name in str(getattr(x, "__qualname__", "")).split("."):
        found = getattr(found, name, None)
    return found is x


class _Calls:
    """The compiled calls of some functions. `of[f]`: those of these functions and `f`."""

    def __init__(self, reads: Sequence[Any] = ()):
        self.compiled: dict[Hashable, Callable[..., Any]] = {}
        self.of: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()
        self._reads = list(map(_is_same, reads))

    def are_of(self, reads: Sequence[Any]) -> bool:
        """Whether the last function read the same objects when it was compiled."""
        same = len(self._reads) == len(reads)
        return same and all(is_it(x) for is_it, x in zip(self._reads, reads, strict=True))


def _is_same(x: Any) -> Callable[[Any], bool]:
    """Whether a later object is `x`. A NumPy array may have changed since."""
    if type(x) is np.ndarray:
        bits = _bits(x)
        return lambda y: type(y) is np.ndarray and _bits(y) == bits
    # Not a reference to the function itself, which it would keep alive.
    try:
        reference = weakref.ref(x)
    except TypeError:
        return lambda y: y is x
    return lambda y: y is reference()


def _bits(x: np.ndarray) -> Hashable:
    return x.shape, x.dtype, hash(x.tobytes())


def _may_change(x: Any) -> bool:
    """Whether `x` may become another value and stay the same object."""
    if isinstance(x, tuple):
        return any(map(_may_change, x))
    return not (isinstance(x, _FIXED) or lives_in_a_module(x))


_ALL = _Calls()


def _calls_of(run: Callable[..., Any], functions: Sequence[Any]) -> dict[Hashable, Any]:
    calls = _ALL.of.setdefault(run, _Calls())
    for f in functions:
        if not isinstance(f, _FUNCTIONS):
            raise _HasNoKey  # an object of a class may change
        reads, known = _reads(f), calls.of.get(f)
        if known is None or not known.are_of(reads):
            known = calls.of[f] = _Calls(reads)
        calls = known
    return calls.compiled


def _reads(f: Any) -> list[Any]:
    """The objects that a Python function reads by name. And those that the functions among
    them read, which are of the same module."""
    reads: list[Any] = []
    functions, seen, module = [f], {id(f)}, None
    while functions:
        g = functions.pop()
        if isinstance(g, ft.partial):
            found = [g.func, *g.args, *g.keywords.values()]
        elif isinstance(g, types.FunctionType) and module in (None, g.__module__):
            found, module = _read_by(g), g.__module__
        else:
            continue
        reads += found
        functions += [x for x in found if id(x) not in seen]
        seen.update(map(id, found))
    return reads


def _read_by(f: types.FunctionType) -> list[Any]:
    """Global objects, default arguments, and those in the closure."""
    found = [f.__globals__[name] for name in _names(f.__code__) if name in f.__globals__]
    found += [*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]
    for cell in f.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            found.append(cell.cell_contents)
    return found


@ft.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code reads. `co_names` has those of attributes too."""
    loads = [i for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*(i.argval for i in loads), *(name for c in inner for name in _names(c)))


@dataclasses.dataclass(frozen=True)
class _Tree:
    """A tree without its arrays. Equal trees are one in the caches of JAX."""

    treedef: Any
    keys: tuple[Hashable, ...]
    leaves: tuple[Any, ...] = dataclasses.field(compare=False)

    @staticmethod
    def without_arrays(leaves: Sequence[Any], treedef: Any) -> "_Tree":
        static = tuple(_ARRAY if _is_array(x) else x for x in leaves)
        return _Tree(treedef, tuple(map(_key, leaves)), static)

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        array = iter(arrays)
        leaves = [next(array) if x is _ARRAY else x for x in self.leaves]
        return self.treedef.unflatten(leaves)


class _Static(eqx.Module):
    tree: _Tree = eqx.field(static=True)


def _jit(run: Callable[..., Any], proxies: Sequence[Any], tree: _Tree) -> Callable[..., Any]:
    """The call as a function of its arrays, which returns arrays and the rest."""

    def call(arrays):
        operands, args, kwargs = tree.unflatten(arrays)
        functions = [f if p is None else p for p, f in zip(proxies, operands, strict=True)]
        leaves, treedef = jax.tree.flatten(run(*functions, *args, **kwargs))
        out = _Tree.without_arrays(leaves, treedef)
        return list(filter(_is_array, leaves)), _Static(out)

    call.__name__ = call.__qualname__ = run.__name__
    return jax.jit(call)
