"""The lowest precision on the way from the inputs of a program to each of its outputs.

A constant in low precision does not count, nor does what no output is computed from: only what
is rounded there and depends on an input.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..._jaxprs.structure import primal_program
from .in_float64 import is_opaque
from .propagate import AbstractPropagation, is_inexact, NOTHING, propagate, Sources


def lowest_precisions(program: ClosedJaxpr, *, opaque: bool = False) -> list[np.dtype | None]:
    """For each output, the real dtype of lowest precision that it was computed in from the
    inputs; `None` if that is float64, or if it depends on no input.

    - `opaque`: count those equations only that `evaluate_in_float64` runs in the precision
        that they were traced with, such as a call of a host function.
    """
    rounding = _Rounding(is_opaque if opaque else _any_equation)
    starts = [Sources(_PRECISE)] * len(program.in_avals)
    if not opaque:
        starts = [Sources(_PRECISE | _bit(v)) for v in program.jaxpr.invars]
    found = propagate(program, starts, rounding)
    return [_lowest(sources.live) for sources in found]


# From the highest precision to the lowest. Bit 0 says that a value depends on an input.
_PRECISE = 1
_DTYPES = tuple(jnp.dtype(name) for name in ("float32", "float16", "bfloat16"))


def _bit(variable: Any) -> int:
    """The bit of the precision of a variable, in which it is stored."""
    if not is_inexact(variable):
        return 0
    dtype = jnp.finfo(variable.aval.dtype).dtype
    if dtype == np.float64:
        return 0
    number = _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES) - 1
    return 2 << number


def _lowest(bits: int) -> np.dtype | None:
    return next((d for i, d in reversed(list(enumerate(_DTYPES))) if bits & (2 << i)), None)


class _Rounding(AbstractPropagation):
    """`live` is the set of precisions on the way to a value, with bit 0 for any."""

    def __init__(self, counts: Callable[[Any], bool]):
        self._counts = counts

    def apply(self, eqn, ins, path):
        program = primal_program(eqn)
        if program is not None:
            return propagate(program, ins, self, (*path, eqn))
        bits = 0
        for sources in ins:
            bits |= sources.live
        if not bits:
            return [NOTHING] * len(eqn.outvars)
        counts = any(map(self._counts, (*path, eqn)))
        if counts:
            for variable, sources in zip(eqn.invars, ins, strict=True):
                bits |= _bit(variable) if sources.live else 0
        return [
            # An integer has no rounding errors: it is piecewise constant.
            Sources(bits | (_bit(v) if counts else 0)) if is_inexact(v) else NOTHING
            for v in eqn.outvars
        ]

    def decide(self, eqn, value):
        return NOTHING


def _any_equation(eqn) -> bool:
    return True
