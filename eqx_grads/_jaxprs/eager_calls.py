"""Compile eager calls of loops once: `jax.jit`, with arrays as operands and the rest static.

JAX compiles an eager loop again unless its step is the same Python object as before, and a step
that closes over arrays is a new object in each call. So an eager call runs in `jax.jit`, with
the arrays as operands, and JAX finds the compiled program by their types.

As in `jax.lax.scan` and `jax.jit`, a function is known by its identity: whatever it reads from
its closure or from global variables has the values of the first call. Nothing here keeps a
function alive.
"""

import functools as ft
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import numpy as np

from .current_trace import staging_trace


P = ParamSpec("P")
T = TypeVar("T")


def compile_eager_calls(run: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the library. Any leaf of its arguments may be a function of the
    user."""
    programs: dict[Hashable, Callable[..., Any]] = {}

    def compiled(leaves: Sequence[Any], treedef: Any) -> Callable[..., Any]:
        key = treedef, tuple(map(_key, leaves))
        if key not in programs:
            if len(programs) >= _MOST:
                programs.pop(next(iter(programs)))
            programs[key] = _jit(run, treedef)
            for x in filter(_is_function, leaves):
                weakref.finalize(x, programs.pop, key, None)
        return programs[key]

    @ft.wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if staging_trace() is not None:
            return run(*args, **kwargs)
        leaves, treedef = jax.tree.flatten((args, kwargs))
        _CALL.leaves = leaves
        try:
            arrays, static = compiled(leaves, treedef)(list(filter(_is_array, leaves)))
            return static.unflatten(arrays, leaves)
        except (_IsNew, TypeError):
            # It looks at values, returns a function, or was given something static that can't
            # be hashed and may be changed in place. Or it is wrong, and raises that below.
            pass
        finally:
            _CALL.leaves = None
        return run(*args, **kwargs)

    return call


_CALL = threading.local()  # the `leaves` of the call that is being traced
_MOST = 1024  # programs of a function of the library


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or type(x) is np.ndarray


def _is_function(x: Any) -> bool:
    """Whether a leaf has an identity, as functions have, that a weak reference can follow."""
    return not _is_array(x) and bool(type(x).__weakrefoffset__)


def _key(x: Any) -> Hashable:
    if _is_function(x):
        return id(x), hash(x)  # what has no hash may change in place
    return None if _is_array(x) else (type(x), repr(x), x)  # `0.0 == -0.0`, and `1 == True`


def _jit(run: Callable[..., Any], treedef: Any) -> Callable[..., Any]:
    """The call as a function of its arrays, which returns arrays and the rest."""

    def call(arrays):
        # Not from the closure: the program outlives this call, and the functions need not.
        arrays, leaves = iter(arrays), _CALL.leaves
        args, kwargs = treedef.unflatten(next(arrays) if _is_array(x) else x for x in leaves)
        # A rule in the program may hold the function that is the key of the program.
        is_function = lambda f: isinstance(f, types.FunctionType)
        args = [weakref.proxy(f) if is_function(f) else f for f in args]
        out, out_treedef = jax.tree.flatten(run(*args, **kwargs))
        return list(filter(_is_array, out)), _Static.of(out, out_treedef, leaves)

    call.__name__ = call.__qualname__ = run.__name__
    return jax.jit(call)


class _Static(eqx.Module):
    """The output of a call without its arrays: `None` for an array, the index of an argument
    that is returned unchanged, or a plain value in a tuple."""

    treedef: Any = eqx.field(static=True)
    leaves: tuple[Any, ...] = eqx.field(static=True)

    @staticmethod
    def of(leaves: Sequence[Any], treedef: Any, given: Sequence[Any]) -> "_Static":
        def kept(x):
            if _is_array(x):
                return None
            if not _is_function(x):
                return (x,)
            index = next((i for i, y in enumerate(given) if y is x), None)
            if index is None:
                raise _IsNew
            return index

        return _Static(treedef, tuple(map(kept, leaves)))

    def unflatten(self, arrays: Sequence[Any], given: Sequence[Any]) -> Any:
        array = iter(arrays)
        pick = lambda x: x[0] if isinstance(x, tuple) else given[x]
        return self.treedef.unflatten(
            next(array) if x is None else pick(x) for x in self.leaves
        )


class _IsNew(Exception):
    """A call returns a function that it made, and that may hold tracers."""
