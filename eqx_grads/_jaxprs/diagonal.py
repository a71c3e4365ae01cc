"""Decide from its jaxpr whether a function acts on each element by itself: whether its Jacobian
is diagonal."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from .interpret import Domain, interpret
from .primitives import kind_of
from .structure import Scan, ShardMap


# What a value depends on: nothing; the elements with the same index of one input, which is
# given by its number; or anything.
_NOTHING, _ANYTHING = -1, -2


def has_diagonal_jacobian(program: ClosedJaxpr) -> bool:
    """Whether each element of output `i` is seen to depend on no more than the same element of
    input `i`."""
    n = len(program.in_avals)
    outs = interpret(program, range(n), _DOMAIN).outs
    return len(outs) == n and all(out in (_NOTHING, i) for i, out in enumerate(outs))


def is_elementwise(program: ClosedJaxpr, shape: tuple[int, ...]) -> bool:
    """Whether each element of the outputs, of this shape, is seen to depend on no more than the
    elements of the inputs at the same place, or on inputs without axes."""
    aligned = lambda v: _SAME if v.aval.shape == shape else _ANYTHING
    ins = [_NOTHING if not v.aval.shape else aligned(v) for v in program.jaxpr.invars]
    return all(out in (_NOTHING, _SAME) for out in interpret(program, ins, _DOMAIN).outs)


_SAME = 0


def _apply(eqn: Any, ins: Sequence[int], _) -> list[int]:
    dependent = [
        (source, v.aval.shape)
        for source, v in zip(ins, eqn.invars, strict=True)
        if source != _NOTHING
    ]
    if not dependent:
        return [_NOTHING] * len(eqn.outvars)
    source = dependent[0][0]
    is_local = kind_of(eqn).elementwise
    if is_local and all((source, v.aval.shape) == d for v in eqn.outvars for d in dependent):
        return [source] * len(eqn.outvars)
    return [_ANYTHING] * len(eqn.outvars)


def _join(a: int, b: int) -> int:
    return b if a == _NOTHING else a if b in (_NOTHING, a) else _ANYTHING


def _decide(eqn: Any, index: int, out: int) -> int:
    return out if index == _NOTHING else _ANYTHING


_DOMAIN = Domain(
    constant=lambda x: _NOTHING,
    join=_join,
    apply=_apply,
    # A step of a scan has a slice of its operands, and so other elements with the same index.
    enters=lambda known: not isinstance(known, Scan | ShardMap),
    decide=_decide,
)
