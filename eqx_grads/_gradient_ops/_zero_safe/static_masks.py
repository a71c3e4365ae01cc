"""What is known of masks (`liveness.py`) without running anything: `True`, `False`, `None`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from ..._jaxprs.primitives import ELEMENTWISE
from ..._jaxprs.structure import Call, Checkpoint, Cond, Scan
from .analysis import Analysis, AnalyzedEquation
from .ranges import CONSTANT, decided_case, inexact_indices


# A cotangent of ones is pulled back to a positive number wherever an element is taken.
PULLED_BACK = frozenset(
    """
    reshape broadcast_in_dim squeeze expand_dims transpose reduce_sum slice rev pad concatenate
    gather dynamic_slice dynamic_update_slice cumsum scatter scatter-add scatter-sub split sort
    reduce_max reduce_min cummax cummin reduce_window_sum reduce_window_max reduce_window_min
    conv_general_dilated tile stack unstack top_k approx_top_k scatter-max scatter-min
    """.split()  # noqa: SIM905
)
# A scatter drops what has an index out of bounds, by which ragged data are padded.
SELECTING = frozenset(
    """
    select_n max min clamp slice pad gather dynamic_slice dynamic_update_slice scatter split
    unstack reduce_max reduce_min cummax cummin reduce_window_sum reduce_window_max
    reduce_window_min conv_general_dilated top_k approx_top_k scatter-max scatter-min
    scatter-add scatter-sub
    """.split()  # noqa: SIM905
)
# What they select is multiplied by one, and the rest by zero.
SELECTS_BY_PRODUCT = frozenset(
    "max min reduce_max reduce_min cummax cummin scatter-max scatter-min".split()  # noqa: SIM905
)


def is_collective(eqn: Any) -> bool:
    """Whether an equation works across a named axis. What is not taken here may be there."""
    axes = eqn.params.get("axes", ())
    return "axis_name" in eqn.params or any(
        not isinstance(axis, int | np.integer) for axis in axes
    )


def join_static(a: bool | None, b: bool | None) -> bool | None:
    """`either` of masks that are known to be `True`, known to be `False`, or not known."""
    if a is True or b is True:
        return True
    return False if a is False and b is False else None


def static_transfer(e: AnalyzedEquation, outs: Sequence[bool | None]) -> list[bool | None]:
    """What is known of the masks of the operands without running anything."""
    n, eqn = len(e.eqn.invars), e.eqn
    alive = [outs[i] for i in inexact_indices(eqn.outvars)]
    if not alive or all(a is False for a in alive) or eqn.primitive.name in CONSTANT:
        return [False] * n
    match e.known:
        case Scan() if e.is_entered:
            return _static_scan(e, outs)
        case Cond() if e.is_entered:
            results = [static_inputs(a, outs) for a in e.inner]
            same = lambda xs: xs[0] if len(set(xs)) == 1 else None
            return [False, *map(same, zip(*results, strict=True))]
        case Call() | Checkpoint() if e.is_entered:
            return static_inputs(e.inner[0], outs)
    if e.has_rule and e.tangent_map is not None and not shows_nothing(e.tangent_map):
        given = [outs[i] for i in inexact_indices(eqn.outvars)]
        result = static_inputs(e.tangent_map, given)
        return at_moving(e, result[len(eqn.invars) :])
    if is_collective(eqn):
        return [True] * n
    case = decided_case(eqn, e.ins)
    if case is not None:
        return [alive[0] if i == case else False for i in range(n)]
    if eqn.primitive.name in SELECTING:
        return [None] * n
    if e.known is None and eqn.primitive.name in ELEMENTWISE | PULLED_BACK:
        return [True if all(a is True for a in alive) else None] * n
    return [True if any(a is True for a in alive) else None] * n


def static_inputs(analysis: Analysis, outs: Sequence[bool | None]) -> list[bool | None]:
    jaxpr = analysis.program.jaxpr
    known = static_masks(analysis, outs)
    return [known.get(v, False) for v in jaxpr.invars]


def static_masks(analysis: Analysis, outs: Sequence[bool | None]) -> dict[Any, bool | None]:
    """What is known of the mask of each variable."""
    known: dict[Any, bool | None] = {}

    def add(vs, masks):
        for v, mask in zip(vs, masks, strict=True):
            if not isinstance(v, Literal):
                known[v] = join_static(known.get(v, False), mask)

    add(analysis.program.jaxpr.outvars, outs)
    for e in reversed(analysis.eqns):
        add(e.eqn.invars, static_transfer(e, [known.get(v, False) for v in e.eqn.outvars]))
    return known


def static_carry(e: AnalyzedEquation, outs: Sequence[bool | None]) -> list[bool | None]:
    """What is known of the mask of a scan's carry, the same before and after every step."""
    scan = e.known
    assert isinstance(scan, Scan)
    n = scan.n_carry
    carry = list(outs[:n])
    while True:  # a mask that is known becomes one that is not, once
        ins = static_inputs(e.inner[0], [*carry, *outs[n:]])
        before = ins[scan.n_consts : scan.n_consts + n]
        joined = [a if a is b else None for a, b in zip(carry, before, strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _static_scan(e, outs):
    scan = e.known
    carry = static_carry(e, outs)
    return static_inputs(e.inner[0], [*carry, *outs[scan.n_carry :]])


def at_moving(e: AnalyzedEquation, masks: Sequence[Any]) -> list[Any]:
    """Masks of the moving operands, among those of all operands."""
    full: list[Any] = [False] * len(e.eqn.invars)
    for i, mask in zip(e.moving, masks, strict=True):
        full[i] = mask
    return full


def shows_nothing(analysis: Analysis) -> bool:
    """Whether the tangents of a rule are computed by a primitive that shows nothing: they come
    from a backward rule."""
    return any(e.eqn.primitive.name in ("custom_lin", "eqg_linear") for e in analysis.eqns)
