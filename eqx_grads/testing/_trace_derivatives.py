"""The programs of a function and its derivatives, and the NumPy arrays that they capture.

Of a NumPy array of 64 bits that a function captures, JAX has one constant for both precisions,
in that of the first program that is alive (JAX 0.10 to 0.12). This has to be the user's own
precision, or the function can't be called in it any more: a checker traces all derivatives in
it first, and holds the programs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import inner_programs


def trace_derivatives(
    fn: Callable[..., list[Any]], leaves: Sequence[Any], order: int
) -> list[ClosedJaxpr]:
    """The programs of a function of arrays and of its derivatives, of order one or two, in all
    modes that it has."""
    tangents, cotangents = _tangents(fn), _cotangents(fn)
    derivatives = [tangents, cotangents]
    if order > 1:
        derivatives += [_cotangents(tangents), _tangents(cotangents), _cotangents(cotangents)]
    return trace_all([fn, *derivatives], leaves)


def trace_all(
    functions: Sequence[Callable[..., Any]], leaves: Sequence[Any]
) -> list[ClosedJaxpr]:
    programs = []
    for fn in functions:
        try:
            programs.append(jax.make_jaxpr(fn)(*leaves))
        except Exception:  # it looks at values, or lacks a mode; a check says so
            continue
    return programs


def captures_numpy(program: ClosedJaxpr) -> bool:
    return any(isinstance(x, np.ndarray) for x in program.consts) or any(
        captures_numpy(inner) for eqn in program.eqns for inner in inner_programs(eqn)
    )


def _tangents(fn):
    return lambda *xs: jax.jvp(fn, xs, xs)[1]


def _cotangents(fn):
    def cotangents(*xs):
        out, pull = jax.vjp(fn, *xs)
        return pull(out)

    return cotangents
