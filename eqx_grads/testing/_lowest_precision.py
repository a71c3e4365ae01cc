"""The lowest precision on the way from the inputs of a program to each of its outputs.

A constant in low precision does not count, nor does what no output is computed from: only what
is rounded there and depends on an input.
"""

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

    def apply(eqn, ins, path):
        program = primal_program(eqn)
        if program is not None:
            return interpret(program, ins, domain, (*path, eqn)).outs
        eps = max(ins, default=0.0)
        is_counted = eps > 0 and (not opaque or any(map(is_opaque, (*path, eqn))))
        if is_counted:
            eps = max(eps, *(_eps(v) for v, x in zip(eqn.invars, ins, strict=True) if x))
        # An integer has no rounding errors: it is piecewise constant.
        own = lambda v: max(eps, _eps(v)) if is_counted else eps
        return [own(v) if is_inexact(v) else 0.0 for v in eqn.outvars]

    # A fact is the unit of rounding of the lowest precision on the way to a value; 0 without an
    # input on the way.
    domain = Domain[float](
        constant=lambda x: 0.0,
        join=max,
        apply=apply,
        enters=lambda known: not isinstance(known, CallWithRule),
    )
    starts = [_EXACT if opaque else max(_EXACT, _eps(v)) for v in program.jaxpr.invars]
    outs = interpret(program, starts, domain).outs
    return [
        next((d for d in _DTYPES if float(jnp.finfo(d).eps) >= min(eps, _COARSEST)), None)
        if eps > _EXACT
        else None
        for eps in outs
    ]


_DTYPES = tuple(jnp.dtype(name) for name in ("float32", "float16", "bfloat16"))
_EXACT, _COARSEST = float(np.finfo(np.float64).eps), float(jnp.finfo(jnp.bfloat16).eps)


def _eps(variable: Any) -> float:
    return float(jnp.finfo(variable.aval.dtype).eps) if is_inexact(variable) else 0.0
