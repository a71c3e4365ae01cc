"""Compute one operation: by NumPy where it gives the same numbers, otherwise by JAX.

To compile each operation takes most of the time of a diagnosis. NumPy needs no compilation, and
rounds arithmetic as XLA does. A sum has another order, and agrees up to the last digit.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.structure import Call, CallWithRule, inner_programs, LinearCall, structure


# For the short compilation of a program that runs only a few times, on every platform: as the
# flag `JAX_DISABLE_MOST_OPTIMIZATIONS` does.
SHORT_COMPILATION: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# Fusion emitters take most of the time on a CPU. Later versions have no option for them.
if jax.__version_info__ < (0, 11):
    SHORT_COMPILATION["xla_cpu_use_fusion_emitters"] = False


def compute(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of an equation, as `bind`."""
    name = eqn.primitive.name
    if name in _NUMPY and all(map(_is_plain, (*eqn.invars, *eqn.outvars))):
        xs = _as_arrays(eqn.invars, values)
        with np.errstate(all="ignore"):
            outs = _NUMPY[name](*xs, **eqn.params)
        if outs is not None:
            several = eqn.primitive.multiple_results
            return _as_arrays(eqn.outvars, outs if several else [outs])
    if inner_programs(eqn):  # JAX would keep a program that is a parameter
        return bind(eqn, values)
    operation = _Operation(eqn.primitive, tuple(eqn.params.items()))
    return _run(name in ("tanh", "logistic", "erf"))(operation, list(values))


def compute_all(program: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of a program, operation by operation. Functions lose their rules."""

    def hook(eqn, values):
        match structure(eqn):
            case Call() | CallWithRule() as call:
                return compute_all(*call.programs, values)
            case LinearCall() as call:
                return compute_all(call.trace(), values)
        return compute(eqn, values)

    return evaluate(program, values, hook)


# ---------------------------------------------------------------- by NumPy


def _is_plain(v: Any) -> bool:
    """Whether NumPy computes with such arrays as XLA does."""
    dtype = v.aval.dtype
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf" and dtype != np.float16


def _as_arrays(variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    pairs = zip(values, variables, strict=True)
    return [_flushed(np.asarray(x, v.aval.dtype)) for x, v in pairs]


def _flushed(x: Any) -> Any:
    """XLA computes with zeros instead of denormal numbers on a CPU."""
    if x.dtype.kind != "f":
        return x
    is_small = np.abs(x) < np.finfo(x.dtype).tiny
    return np.where(is_small, np.copysign(np.zeros_like(x), x), x) if is_small.any() else x


def _broadcast(x, *sizes, shape, broadcast_dimensions, **_):
    if sizes:
        return None
    ones = [1] * len(shape)
    for i, n in zip(broadcast_dimensions, x.shape, strict=True):
        ones[i] = n
    return np.broadcast_to(x.reshape(ones), shape)


def _reshape(x, *sizes, new_sizes, dimensions, **_):
    return None if sizes or dimensions else x.reshape(new_sizes)


def _convert(x, *, new_dtype, **_):
    # `compute` converts it. A number that is too large for an integer is undefined in NumPy.
    return x if new_dtype.kind == "f" or x.dtype.kind in "biu" else None


def _pad(x, value, *, padding_config, **_):
    if any(low < 0 or high < 0 for low, high, _ in padding_config):
        return None
    sizes = zip(x.shape, padding_config, strict=True)
    shape = [low + high + n + max(n - 1, 0) * inner for n, (low, high, inner) in sizes]
    out = np.full(shape, value, x.dtype)
    ends = (s - high for s, (_, high, _) in zip(shape, padding_config, strict=True))
    starts = ((low, inner + 1) for low, _, inner in padding_config)
    out[tuple(slice(a, b, step) for (a, step), b in zip(starts, ends, strict=True))] = x
    return out


def _slice(x, *, start_indices, limit_indices, strides, **_):
    bounds = zip(start_indices, limit_indices, strides or [1] * x.ndim, strict=True)
    return x[tuple(slice(*each) for each in bounds)]


def _select(which, *cases, **_):
    return np.where(which, cases[-1], cases[0]) if which.dtype == bool else None


def _elementwise(names: str) -> dict[str, Callable[..., Any]]:
    """By the name of JAX, the function of NumPy, whose name follows if it is another one."""
    pairs = ((name, fn or name) for name, _, fn in (x.partition(":") for x in names.split()))
    function = lambda fn: lambda *xs, **_: fn(*xs)
    return {name: function(getattr(np, fn)) for name, fn in pairs}


def _reduced(fn: Any) -> Callable[..., Any]:
    return lambda x, *, axes, **_: fn.reduce(x, axes) if x.size else None


def _sum(x, *, axes, **_):
    out = np.add.reduce(x, axes)
    # In another order, a sum may overflow.
    return out if np.isfinite(x).all() <= np.isfinite(out).all() else None


_NUMPY: dict[str, Callable[..., Any]] = {
    **_elementwise("add add_any:add sub:subtract mul:multiply neg:negative abs sqrt square"),
    **_elementwise("max:maximum min:minimum is_finite:isfinite"),
    **_elementwise("eq:equal ne:not_equal lt:less le:less_equal gt:greater ge:greater_equal"),
    **_elementwise("and:bitwise_and or:bitwise_or not:bitwise_not"),
    "div": lambda x, y, **_: x / y if x.dtype.kind == "f" else None,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": lambda x, *, permutation, **_: x.transpose(permutation),
    "squeeze": lambda x, *, dimensions, **_: x.squeeze(dimensions),
    "concatenate": lambda *xs, dimension, **_: np.concatenate(xs, dimension),
    "split": lambda x, *, sizes, axis, **_: np.split(x, np.cumsum(sizes)[:-1], axis),
    "slice": _slice,
    "pad": _pad,
    "select_n": _select,
    "convert_element_type": _convert,
    "reduce_sum": _sum,
    "reduce_max": _reduced(np.maximum),
    "reduce_min": _reduced(np.minimum),
    "reduce_and": _reduced(np.bitwise_and),
    "reduce_or": _reduced(np.bitwise_or),
}


# ---------------------------------------------------------------- by JAX


class _Operation(NamedTuple):
    """An equation without its place: equal for equations that compute the same."""

    primitive: Any
    items: tuple[tuple[str, Any], ...]

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.items)


@ft.cache
def _run(saturates: bool) -> Callable[..., list[Any]]:
    # By the short compilation, another `tanh` is not exactly one where it saturates.
    options = {} if saturates else SHORT_COMPILATION
    return jax.jit(bind, static_argnums=0, compiler_options=options)
