"""The lowest precision on the way from the inputs of a program to each of its outputs.

A constant in low precision does not count, nor does what no output is computed from: only what
is rounded there and depends on an input.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._diagnosis.in_float64 import is_opaque
from .._diagnosis.pairs import is_inexact
from .._jaxprs.interpret import Domain, interpret
from .._jaxprs.structure import CallWithRule, primal_program


def lowest_precisions(program: ClosedJaxpr, *, opaque: bool = False) -> list[np.dtype | None]:
    """For each output, the real dtype of lowest precision that it was computed in from the
    inputs; `None` if that is float64, or if it depends on no input.

    - `opaque`: count those equations only that `evaluate_in_float64` runs in the precision
        that they were traced with, such as a call of a host function.
    """
    domain = _rounding(is_opaque if opaque else _any_equation)
    starts = [_PRECISE | (0 if opaque else _bit(v)) for v in program.jaxpr.invars]
    return list(map(_lowest, interpret(program, starts, domain).outs))


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


def _rounding(counts: Callable[[Any], bool]) -> Domain[int]:
    """A fact is the set of precisions on the way to a value, with bit 0 for any."""

    def apply(eqn, ins, path):
        program = primal_program(eqn)
        if program is not None:
            return interpret(program, ins, domain, (*path, eqn)).outs
        bits = ft.reduce(int.__or__, ins, 0)
        is_counted = bits and any(map(counts, (*path, eqn)))
        if is_counted:
            pairs = zip(eqn.invars, ins, strict=True)
            bits = ft.reduce(int.__or__, (_bit(v) for v, x in pairs if x), bits)
        # An integer has no rounding errors: it is piecewise constant.
        own = lambda v: _bit(v) if is_counted else 0
        return [bits | own(v) if is_inexact(v) else 0 for v in eqn.outvars]

    domain = Domain[int](
        constant=lambda x: 0,
        join=int.__or__,
        apply=apply,
        enters=lambda known: not isinstance(known, CallWithRule),
    )
    return domain


def _any_equation(eqn) -> bool:
    return True
