"""What is known of masks (`masks.py`) without running anything: `True`, `False`, `None`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from .._jaxprs.interpret import fixed_point
from .._jaxprs.primitives import kind_of
from .._jaxprs.structure import Call, Checkpoint, Cond, Scan
from .analysis import Analysis, AnalyzedEquation
from .ranges import decided_case


def is_collective(eqn: Any) -> bool:
    """Whether an equation works across a named axis. What is not taken here may be there."""
    axes = eqn.params.get("axes", ())
    return "axis_name" in eqn.params or any(
        not isinstance(axis, int | np.integer) for axis in axes
    )


def join_static(a: bool | None, b: bool | None) -> bool | None:
    """`either` of masks that are known to be `True`, known to be `False`, or not known."""
    return a is True or b is True or (None if None in (a, b) else False)


def fill(n: int, indices: Sequence[int], masks: Sequence[Any]) -> list[Any]:
    """The masks of `n` values, given those of some. No other has a tangent."""
    found = dict(zip(indices, masks, strict=True))
    return [found.get(i, False) for i in range(n)]


def static_transfer(e: AnalyzedEquation, outs: Sequence[bool | None]) -> list[bool | None]:
    """What is known of the masks of the operands without running anything."""
    n, kind = len(e.eqn.invars), kind_of(e.eqn)
    alive = [outs[i] for i in e.inexact_outs]
    if not alive or all(a is False for a in alive) or kind.derivative == "zero":
        return [False] * n
    match e.known:
        case Scan() if e.is_entered:
            return static_inputs(e.inner[0], [*static_carry(e, outs), *outs[e.known.n_carry :]])
        case Cond() if e.is_entered:
            results = [static_inputs(a, outs) for a in e.inner]
            same = lambda xs: xs[0] if len(set(xs)) == 1 else None
            return [False, *map(same, zip(*results, strict=True))]
        case Call() | Checkpoint() if e.is_entered:
            return static_inputs(e.inner[0], outs)
    if e.has_rule and e.tangent_map is not None:
        return fill(n, e.moving, static_inputs(e.tangent_map, alive)[n:])
    if is_collective(e.eqn):
        return [True] * n
    case = decided_case(e.eqn, e.ins)
    if case is not None:
        return [alive[0] if i == case else False for i in range(n)]
    if kind.selects:
        return [None] * n
    is_local = kind.elementwise or kind.sums
    is_used = all if is_local else any
    return [True if is_used(a is True for a in alive) else None] * n


def static_inputs(analysis: Analysis, outs: Sequence[bool | None]) -> list[bool | None]:
    jaxpr = analysis.program.jaxpr
    known = static_masks(analysis, outs)
    return [known.get(v, False) for v in jaxpr.invars]


def static_masks(analysis: Analysis, outs: Sequence[bool | None]) -> dict[Any, bool | None]:
    """What is known of the mask of each variable."""
    return pulled_back(analysis, analysis.eqns, outs, join_static, static_transfer)


def pulled_back(
    analysis: Analysis,
    eqns: Sequence[AnalyzedEquation],
    outs: Sequence[Any],
    join: Callable[[Any, Any], Any],
    transfer: Callable[[AnalyzedEquation, list[Any]], Sequence[Any]],
) -> dict[Any, Any]:
    """The masks of the variables that these equations use, from those of the outputs.
    `transfer(e, outs)` are the masks of the operands of an equation."""
    masks: dict[Any, Any] = {}

    def add(vs, found):
        for v, mask in zip(vs, found, strict=True):
            if not isinstance(v, Literal):
                masks[v] = join(masks.get(v, False), mask)

    add(analysis.program.jaxpr.outvars, outs)
    for e in reversed(eqns):
        add(e.eqn.invars, transfer(e, [masks.get(v, False) for v in e.eqn.outvars]))
    return masks


def static_carry(e: AnalyzedEquation, outs: Sequence[bool | None]) -> list[bool | None]:
    """What is known of the mask of a scan's carry, the same before and after every step."""
    scan = e.known
    assert isinstance(scan, Scan)
    n = scan.n_carry

    def before_a_step(carry):  # a mask that is known becomes one that is not, once
        ins = static_inputs(e.inner[0], [*carry, *outs[n:]])
        before = ins[scan.n_consts : scan.n_consts + n]
        return [a if a is b else None for a, b in zip(carry, before, strict=True)]

    return fixed_point(before_a_step, list(outs[:n]))
