"""Which elements of a value depend on the inputs by a taken path: the dual of `liveness.py`.

In forward mode the tangent of an element that does not depend on them is zero, times a factor
that may be infinite: `sqrt(where(x > 0, x, 0))`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from ..._jaxprs.evaluate import bind, evaluate
from ..._jaxprs.plain_scan import lax_scan
from ..._jaxprs.primitives import ELEMENTWISE, MULTILINEAR
from ..._jaxprs.structure import Call, Checkpoint, Cond, Scan
from ..._jaxprs.versions import equation_context
from .analysis import Analysis, AnalyzedEquation
from .liveness import (
    dense,
    either,
    Mask,
    matrices_in_batch,
    raw_values,
    read,
    stopped,
    taken_by,
)
from .ranges import CONSTANT, inexact_indices, is_inexact_type, Range
from .static_masks import is_collective, PULLED_BACK, shows_nothing


def moved_outputs(
    analysis: Analysis, values: Sequence[Any], moved: Sequence[Mask]
) -> list[Mask]:
    """The masks of the outputs of a program, from those of its inputs."""
    env = raw_values(analysis.program, values)
    masks = moved_inputs(analysis.program, moved)
    for e in analysis.eqns:
        ins = [masks.get(v, False) for v in _keys(e.eqn.invars)]
        outs = transfer_moved(e, read(env, e.eqn.invars), ins)
        masks.update(zip(e.eqn.outvars, outs, strict=True))
    return [masks.get(v, False) for v in _keys(analysis.program.jaxpr.outvars)]


def moved_inputs(program: ClosedJaxpr, moved: Sequence[Mask]) -> dict[Any, Mask]:
    """The masks of the inputs and constants. What a function closes over may be
    differentiated."""
    masks: dict[Any, Mask] = dict(zip(program.jaxpr.invars, moved, strict=True))
    for v, x in zip(program.jaxpr.constvars, program.consts, strict=True):
        masks[v] = isinstance(x, Tracer) and is_inexact_type(v.aval)
    return masks


def _keys(atoms: Sequence[Any]) -> list[Any]:
    """Literals can't be hashed."""
    return [None if hasattr(v, "val") else v for v in atoms]


def static_moved(r: Range) -> bool | None:
    """What is known of a mask without running anything."""
    return False if not r.active else (None if r.mixed else True)


def transfer_moved(
    e: AnalyzedEquation, values: Sequence[Any], ins: Sequence[Mask]
) -> list[Mask]:
    """The masks of the outputs of an equation, from those of its operands."""
    eqn, name = e.eqn, e.eqn.primitive.name
    n_outs = len(eqn.outvars)
    inexact_outs = inexact_indices(eqn.outvars)
    moving = [i for i in inexact_indices(eqn.invars) if ins[i] is not False]
    if not inexact_outs or not moving or name in CONSTANT:
        return [False] * n_outs
    with equation_context(eqn):
        if e.is_entered:
            return _transfer_inner(e, values, ins)
        if e.has_rule:
            return _transfer_rule(e, values, ins)
        if e.known is None and name in ELEMENTWISE:
            shape = eqn.outvars[0].aval.shape
            return [_elementwise(name, values, ins, moving, shape)]
        all_moved = all(ins[i] is True for i in inexact_indices(eqn.invars))
        if (
            all_moved
            or is_collective(eqn)
            or (name in MULTILINEAR and any(ins[i] is True for i in moving))
        ):
            return [i in inexact_outs for i in range(n_outs)]
        if e.known is None and name in PULLED_BACK | {"dot_general"}:
            return _push_forward(e, values, ins)
        return _transfer_opaque(e, values, ins)


def _elementwise(name, values, ins, moving, shape) -> Mask:
    result: Mask = False
    for i in moving:
        taken = taken_by(name, values, i)
        if taken is True:
            part = ins[i]
        else:
            part = taken if ins[i] is True else taken & ins[i]
        result = either(result, part)
    return result if isinstance(result, bool) else dense(result, shape)


def _push_forward(e, values, ins) -> list[Mask]:
    """Operations of which each derivative is positive, or zero where nothing is taken; and
    products, of which each term moves where one factor does."""
    eqn = e.eqn
    moving, inexact_outs = inexact_indices(eqn.invars), inexact_indices(eqn.outvars)
    is_product = eqn.primitive.name in MULTILINEAR
    result: list[Mask] = [False] * len(eqn.outvars)
    for part in [[i] for i in moving] if is_product else [moving]:
        full = [jnp.ones_like(x) for x in values] if is_product else list(values)

        def of_part(*xs, full=full, part=part):
            operands = list(full)
            for i, x in zip(part, xs, strict=True):
                operands[i] = x
            out = bind(eqn, operands)
            return [out[i] for i in inexact_outs]

        primals = [jnp.asarray(full[i]) for i in part]
        tangents = [
            dense(ins[i], x.shape).astype(x.dtype) for i, x in zip(part, primals, strict=True)
        ]
        _, ts = jax.jvp(of_part, primals, tangents)
        for i, t in zip(inexact_outs, ts, strict=True):
            result[i] = either(result[i], t != 0)
    return result


def _transfer_opaque(e, values, ins) -> list[Mask]:
    eqn = e.eqn
    n_batch = matrices_in_batch(eqn)
    some: Mask = False
    for i in inexact_indices(eqn.invars):
        mask = ins[i]
        if not isinstance(mask, bool):
            mask = jnp.any(mask, tuple(range(n_batch, mask.ndim)))
        some = either(some, mask)
    if isinstance(some, bool):
        return [some and i in inexact_indices(eqn.outvars) for i in range(len(eqn.outvars))]
    return [
        jax.lax.broadcast_in_dim(some, v.aval.shape, range(some.ndim))
        if i in inexact_indices(eqn.outvars)
        else False
        for i, v in enumerate(eqn.outvars)
    ]


def _transfer_rule(e, values, ins) -> list[Mask]:
    moving, tangents = e.moving, e.tangent_map
    if tangents is None or shows_nothing(tangents):
        return _transfer_opaque(e, values, ins)
    zeros = [jnp.zeros_like(values[i]) for i in moving]
    masks = [*[False] * len(values), *(ins[i] for i in moving)]
    out: list[Mask] = [False] * len(e.eqn.outvars)
    results = moved_outputs(tangents, [*values, *zeros], masks)
    for i, mask in zip(inexact_indices(e.eqn.outvars), results, strict=True):
        out[i] = mask
    return out


def _transfer_inner(e, values, ins) -> list[Mask]:
    match e.known:
        case Call() | Checkpoint():
            return moved_outputs(e.inner[0], values, ins)
        case Scan():
            return moved_scan(e, values, ins)[0]
        case Cond():
            pass
    outs = inexact_indices(e.eqn.outvars)

    def branch(analysis):
        def run(values):
            masks = moved_outputs(analysis, values, ins[1:])
            return [dense(masks[i], e.eqn.outvars[i].aval.shape) for i in outs]

        return run

    branches = [branch(analysis) for analysis in e.inner]
    masks = jax.lax.switch(values[0], branches, [stopped(x) for x in values[1:]])
    result: list[Mask] = [False] * len(e.eqn.outvars)
    for i, mask in zip(outs, masks, strict=True):
        result[i] = mask
    return result


def moved_scan(
    e: AnalyzedEquation, values: Sequence[Any], ins: Sequence[Mask]
) -> tuple[list[Mask], list[Mask]]:
    """The masks of the outputs of a scan; and of its carry before each step, with a leading
    axis of time where a mask is an array."""
    scan, body = e.known, e.inner[0]
    assert isinstance(scan, Scan)
    n, m = scan.n_consts, scan.n_consts + scan.n_carry
    values = [stopped(x) for x in values]
    types = [v.aval for v in body.program.jaxpr.invars]
    moving = set(inexact_indices(body.program.jaxpr.invars))
    outs = inexact_indices(e.eqn.outvars)
    # `ins` may say more than the ranges do, of the first step only.
    known = [static_moved(r) for r in body.ins]
    tracked = [i for i in range(n, m) if i in moving and known[i] is None]
    sliced = {i: ins[i] for i in moving if i >= m and not isinstance(ins[i], bool)}
    shapes = [v.aval.shape for v in body.program.jaxpr.outvars]

    def step(state, inputs):
        carry, of_carry = state
        x, of_xs = inputs
        given = [
            *ins[:n],
            *(of_carry.get(i, bool(known[i]) and i in moving) for i in range(n, m)),
            *(of_xs.get(i, ins[i]) for i in range(m, len(types))),
        ]
        here = [*values[:n], *carry, *x]
        out = evaluate(body.program, here)
        masks = moved_outputs(body, here, given)
        after = {i: dense(masks[i - n], types[i].shape) for i in of_carry}
        of_ys = {i: dense(masks[i], shapes[i]) for i in outs if i >= scan.n_carry}
        return (out[: scan.n_carry], after), (of_carry, of_ys)

    first = {i: dense(ins[i], types[i].shape) for i in tracked}
    (_, last), (before, of_ys) = lax_scan(
        step,
        (values[n:m], first),
        (values[m:], sliced),
        length=scan.length,
        reverse=scan.reverse,
    )
    result: list[Mask] = [False] * len(e.eqn.outvars)
    for i in outs:
        if i < scan.n_carry:
            result[i] = last.get(n + i, bool(known[n + i]))
        else:
            result[i] = of_ys[i]
    carry = [before.get(i, bool(known[i]) and i in moving) for i in range(n, m)]
    return result, carry
