"""Evaluate a program in float64, whatever dtypes it was traced with.

Differences of a program that computes in float16, or that rounds one intermediate result to it,
say nothing about its derivative. The same program in float64 has differences that do.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.structure import (
    Cond,
    inner_programs,
    LinearCall,
    primal_call,
    ShardMap,
    structure,
)
from .pairs import is_inexact


# The parameters that hold the dtype of a result.
_DTYPES = ("new_dtype", "preferred_element_type", "dtype", "accum_dtype")
# They look at the bits of a number.
_OF_BITS = ("bitcast_convert_type", "nextafter")
# The parameters that hold the types of results.
_TYPES = {"result_shape_dtypes", "result_avals", "out_avals", "avals_out"}


def evaluate_in_float64(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program, computed in float64. To be called under `jax.enable_x64`.

    The rules of functions in it are dropped. An equation that JAX can't run in float64 because
    its programs are opaque runs in the precision that it was traced with.
    """
    return evaluate(program, list(map(_widen, args)), _hook, constant=_widen)


def _run(program, values, _):
    return evaluate_in_float64(program, values)


def _hook(eqn, values):
    known = structure(eqn)
    if isinstance(known, Cond) and known.by_platform:
        return _run(known.programs[_branch_of_platform(eqn)], values[1:], None)
    if isinstance(known, LinearCall):
        return _run(known.trace(), values, None)
    if known is not None and not isinstance(known, ShardMap):
        return enter(eqn, values, _run)
    call = primal_call(eqn) if known is None else None
    if call is not None:
        program, indices = call
        return _run(program, [values[i] for i in indices], None)
    if is_opaque(eqn):
        return list(map(_widen, bind(eqn, _as_traced(eqn, values))))
    if eqn.primitive.name == "reduce_precision":
        return values
    params = dict(eqn.primitive.get_bind_params(eqn.params))
    for key in _DTYPES:
        if key in params and params[key] is not None and is_inexact(params[key]):
            params[key] = _wide(params[key])
    if "precision" in params:  # such as an algorithm that rounds to bfloat16
        params["precision"] = None
    if _is_scatter(eqn):
        params |= _wide_update(eqn)
    out = eqn.primitive.bind(*map(_widen, values), **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def is_opaque(eqn: Any) -> bool:
    """Whether an equation runs in the precision that it was traced with."""
    known = structure(eqn)
    if known is not None:
        return isinstance(known, ShardMap)
    if primal_call(eqn) is not None or _is_scatter(eqn):
        return False
    return bool(inner_programs(eqn)) or _looks_at_types(eqn)


def _is_scatter(eqn) -> bool:
    """Whether an equation combines numbers that meet, as the gradient of `weight[i]` does."""
    return eqn.params.get("update_jaxpr") is not None


def _wide_update(eqn) -> dict[str, Any]:
    """The program of two numbers with which a scatter combines them."""
    update, consts = eqn.params["update_jaxpr"], eqn.params["update_consts"]
    run = lambda *xs: evaluate_in_float64(ClosedJaxpr(update, consts), xs)
    wide = jax.make_jaxpr(run)(*(_widen(jnp.zeros((), v.aval.dtype)) for v in update.invars))
    return {"update_jaxpr": wide.jaxpr, "update_consts": tuple(wide.consts)}


def _branch_of_platform(eqn) -> int:
    """The branch of a `jax.lax.platform_dependent` that runs on the default backend."""
    platforms = eqn.params["branches_platforms"]
    names = {jax.default_backend(), jax.devices()[0].platform}
    names |= {"cuda", "rocm"} if "gpu" in names else set()
    fits = (i for i, of_branch in enumerate(platforms) if names.intersection(of_branch or ()))
    return next(fits, len(platforms) - 1)


def _looks_at_types(eqn) -> bool:
    """Whether a primitive says the types of its results, or looks at the bits of numbers."""
    return eqn.primitive.name in _OF_BITS or not _TYPES.isdisjoint(eqn.params)


def _as_traced(eqn, values):
    return [
        jax.lax.convert_element_type(x, v.aval.dtype) if is_inexact(v.aval) else x
        for x, v in zip(values, eqn.invars, strict=True)
    ]


def _wide(dtype):
    return np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64


def _widen(x):
    if not is_inexact(x):
        return x
    dtype = jnp.result_type(x)
    return jax.lax.convert_element_type(x, _wide(dtype))
