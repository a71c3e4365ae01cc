"""Decide from its jaxpr whether a function acts on each element by itself: whether its Jacobian
is diagonal."""

from typing import Any

from jax.extend.core import ClosedJaxpr

from .elementwise import ELEMENTWISE
from .evaluate import evaluate
from .structure import Call, CallWithRule, Checkpoint, structure


# What a value depends on: nothing; the elements with the same index of one input, which is
# given by its number; or anything.
_NOTHING, _ANYTHING = -1, -2


def has_diagonal_jacobian(program: ClosedJaxpr) -> bool:
    """Whether each element of output `i` is seen to depend on no more than the same element of
    input `i`."""
    n = len(program.in_avals)
    outs = _evaluate(program, list(range(n)))
    return len(outs) == n and all(out in (_NOTHING, i) for i, out in enumerate(outs))


def _evaluate(program: ClosedJaxpr, args: list[int]) -> list[int]:
    return evaluate(program, args, _evaluate_equation, constant=lambda _: _NOTHING)


def _evaluate_equation(eqn: Any, ins: list[int]) -> list[int]:
    dependent = [
        (source, v.aval.shape)
        for source, v in zip(ins, eqn.invars, strict=True)
        if source != _NOTHING
    ]
    if not dependent:
        return [_NOTHING] * len(eqn.outvars)
    known = structure(eqn)
    if isinstance(known, Call | CallWithRule | Checkpoint):
        return _evaluate(*known.programs, ins)
    source = dependent[0][0]
    if eqn.primitive.name in ELEMENTWISE and all(
        (source, v.aval.shape) == other for v in eqn.outvars for other in dependent
    ):
        return [source] * len(eqn.outvars)
    return [_ANYTHING] * len(eqn.outvars)
