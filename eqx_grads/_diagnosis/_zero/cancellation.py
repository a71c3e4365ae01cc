"""Gradients that are rounding errors: sums whose terms cancel."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..._jaxprs.dependence import variables
from ..._jaxprs.evaluate import bind, evaluate


# Of these, the operands may be sums themselves, and their terms count.
_SUMS = frozenset(
    "add add_any broadcast_in_dim copy neg reduce_sum reshape squeeze transpose".split()  # noqa: SIM905
)
_PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
# Times the rounding error of one number. Such a gradient has about one correct digit, or none.
_MANY = 16


def gradients_and_terms(
    program: ClosedJaxpr, values: Sequence[Any]
) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """The outputs of the program of a gradient, and for each the same sum of the sizes of its
    terms; `None` where the last operation is no sum."""
    jaxpr = program.jaxpr
    last = _last_sums(program)
    sizes: dict[Any, Any] = {}

    def hook(eqn, values):
        outs = bind(eqn, values)
        if id(eqn) in last and all(_is_real(x) for x in values):
            known = [sizes.get(v) if variables([v]) else None for v in eqn.invars]
            pairs = zip(known, values, strict=True)
            operands = [jnp.abs(x) if size is None else size for size, x in pairs]
            if eqn.primitive.name == "neg":
                sizes[eqn.outvars[0]] = operands[0]
            else:
                sizes[eqn.outvars[0]] = bind(eqn, operands)[0]
        return outs

    gradients = evaluate(program, values, hook)
    found = [sizes.get(v) if variables([v]) else None for v in jaxpr.outvars]
    return list(map(np.asarray, gradients)), [
        None if x is None else np.asarray(x) for x in found
    ]


def is_rounding(gradient: np.ndarray, terms: np.ndarray | None) -> bool:
    """Whether each element of a gradient that is not zero is as small as the rounding error of
    the terms that are summed to it."""
    if terms is None or not np.any(gradient):
        return False
    eps = jnp.finfo(gradient.dtype).eps
    return bool(np.all(np.abs(gradient) <= _MANY * float(eps) * terms))


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _last_sums(program: ClosedJaxpr) -> set[int]:
    """The equations of the last sums, which make the outputs."""
    wanted, found = set(variables(program.jaxpr.outvars)), set()
    for eqn in reversed(program.eqns):
        if not wanted.intersection(eqn.outvars):
            continue
        if eqn.primitive.name in _SUMS | _PRODUCTS:
            found.add(id(eqn))
        if eqn.primitive.name in _SUMS:
            wanted.update(variables(eqn.invars))
    return found
