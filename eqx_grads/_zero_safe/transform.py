"""Evaluate a program so that dead elements have no derivative.

An equation with a derivative that may not be finite gets its operands, and returns its outputs,
through a guard: `where(mask, x, stop_gradient(x))`. That is `x`, bit by bit, and XLA knows it.
But nothing of a derivative crosses it where the mask is false: no tangent, no cotangent, no
NaN, to any order. All else is as it was. A mask is a function of values, not of cotangents, so
it is computed before; the derivative of the result is one that JAX knows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from .._jaxprs.dependence import variables
from .._jaxprs.evaluate import bind, enter, equation_context, values_of_inputs
from .._jaxprs.primitives import kind_of
from .._jaxprs.structure import Cond, Scan
from .._jaxprs.varying import cast_to
from .._rules.replace_gradient import replace_gradient
from .analysis import Analysis, AnalyzedEquation
from .masks import (
    backward,
    both,
    dense,
    forward,
    Mask,
    masks_of_scan,
    raw_outputs,
    read,
    transfer,
)


def _guarded(analysis: Analysis, outs: Sequence[bool | None]) -> set[int]:
    """The equations that get guards, or whose inner programs do, given the known masks of the
    outputs."""
    known = backward(analysis, None, outs, analysis.eqns)

    def is_guarded(e: AnalyzedEquation) -> bool:
        alive = [known.get(v, False) for v in e.eqn.outvars]
        if not e.is_entered:
            is_dead = any(alive[i] is not True for i in e.inexact_outs)
            is_mixed = any(e.ins[i].mixed for i in e.moving)
            return e.is_guarded and e.is_risky and (is_mixed or is_dead)
        n = 0
        if isinstance(e.known, Scan):  # the step after uses the carry
            n = e.known.n_carry
        elif isinstance(e.known, Cond):  # `vmap` may make a selection of it
            n = len(alive)
        return any(
            _guarded(a, [None] * n + alive[n:]) or any(map(_selects_by_product, a.program.eqns))
            for a in e.inner
        )

    return {id(e.eqn) for e in analysis.eqns if is_guarded(e)}


def _touched(eqns: Sequence[AnalyzedEquation], guarded: set[int]) -> set[int]:
    """The equations that are guarded or depend on one that is."""
    touched: set[int] = set()
    found: set[Any] = set()
    for e in eqns:
        if id(e.eqn) in guarded or any(v in found for v in variables(e.eqn.invars)):
            touched.add(id(e.eqn))
            found.update(e.eqn.outvars)
    return touched


def _selects_by_product(eqn: Any) -> bool:
    """Whether JAX multiplies the cotangent of what is not selected by zero, as for `max`."""
    kind = kind_of(eqn)
    return kind.selects and kind.derivative == "smooth" and kind.linear != "each"


def evaluate_zero_safe(
    analysis: Analysis, values: Sequence[Any], moved: Sequence[Mask], outs: Sequence[Mask]
) -> list[Any]:
    """The outputs of a program, or of a part of one, which may have a derivative that is not
    finite.

    - `moved`: which elements of the inputs depend on what is being differentiated.
    - `outs`: from which elements of the outputs a taken path leads to the result.
    """
    guarded = _guarded(analysis, [m if isinstance(m, bool) else None for m in outs])
    touched = _touched(analysis.eqns, guarded)
    program = analysis.program
    env = values_of_inputs(program, values)
    raw = dict(env)
    for e in analysis.eqns:
        if id(e.eqn) not in touched:
            out = _run(e, read(env, e.eqn.invars))
            env.update(zip(e.eqn.outvars, out, strict=True))
        elif e.eqn.effects and not e.eqn.outvars:  # happens once, below
            continue
        else:
            out = raw_outputs(e.eqn, read(raw, e.eqn.invars))
        raw.update(zip(e.eqn.outvars, out, strict=True))
    if not touched:
        return read(env, program.jaxpr.outvars)
    from_inputs = forward(analysis, raw, moved)
    masks: dict[int, _Masks] = {}

    def visit(e, ins, given):
        if id(e.eqn) in guarded:
            ends = [read(from_inputs, vs, False) for vs in (e.eqn.invars, e.eqn.outvars)]
            masks[id(e.eqn)] = _Masks(ins, given, *ends)

    affected = [e for e in analysis.eqns if id(e.eqn) in touched]
    backward(analysis, raw, outs, affected, visit)
    for e in affected:
        out = _run(e, read(env, e.eqn.invars), masks.get(id(e.eqn)))
        env.update(zip(e.eqn.outvars, out, strict=True))
    return read(env, program.jaxpr.outvars)


class _Masks(NamedTuple):
    """From which elements of operands and outputs a taken path leads to the result, and which
    depend on the inputs."""

    alive_ins: Sequence[Mask]
    alive_outs: Sequence[Mask]
    moved_ins: Sequence[Mask]
    moved_outs: Sequence[Mask]


def _run(e: AnalyzedEquation, values, masks: _Masks | None = None) -> list[Any]:
    """An equation, with guards if it has masks."""
    eqn, kind = e.eqn, kind_of(e.eqn)
    with equation_context(eqn):
        if masks is not None:
            if e.is_entered:
                return _enter(e, values, masks)
            values, masks = _broadcast(e, values, masks)
            values = _guard(values, masks.alive_ins, masks.moved_ins)
            out = bind(eqn, values)
            if kind.linear == "each" and not kind.elementwise:
                out = [_without_dead_factors(eqn, values, out[0], masks.alive_ins)]
            return _guard(out, masks.alive_outs, masks.moved_outs)
        if _selects_by_product(eqn):
            out = bind(eqn, values)
            taken = transfer(e, values, out, [True] * len(out), is_forward=False)
            values = _guard(values, taken, [True] * len(values))
        return bind(eqn, values)


def _broadcast(e: AnalyzedEquation, values, masks: _Masks) -> tuple[list[Any], _Masks]:
    """The operands of an elementwise operation with the shape of the result. One that it
    broadcasts itself, such as a scalar, gets a cotangent that is a sum over elements of the
    result, of which some may be dead."""
    out = e.eqn.outvars[0].aval
    if not kind_of(e.eqn).elementwise or all(jnp.shape(x) == out.shape for x in values):
        return list(values), masks
    values = [cast_to(jnp.broadcast_to(x, out.shape), out) for x in values]
    alive = transfer(e, values, (), masks.alive_outs, is_forward=False)
    return values, masks._replace(alive_ins=alive)


def _without_dead_factors(eqn, values, out, alive) -> Any:
    """A product where each element of the result has several terms, with the derivative that it
    has if dead factors are zero. A factor may be dead in one of the terms only."""
    finite = [
        x if mask is True else jnp.where(dense(mask, jnp.shape(x)), x, jnp.zeros_like(x))
        for x, mask in zip(values, alive, strict=True)
    ]
    return replace_gradient(out, bind(eqn, finite)[0])


def _guard(values: Sequence[Any], alive: Sequence[Mask], moved: Sequence[Mask]) -> list[Any]:
    return [_guard_one(x, both(a, m)) for x, a, m in zip(values, alive, moved, strict=True)]


def _guard_one(x: Any, mask: Mask) -> Any:
    if mask is True or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return x
    constant = jax.lax.stop_gradient(x)
    if mask is False:
        return constant
    return jax.lax.select(dense(mask, jnp.shape(x)), jnp.asarray(x), jnp.asarray(constant))


def _enter(e: AnalyzedEquation, values, masks: _Masks) -> list[Any]:
    """An equation with transformed inner programs, where a step or a branch has its own
    masks."""
    moved, outs = list(masks.moved_ins), list(masks.alive_outs)
    fixed: Sequence[Mask] = ()
    of_programs = [(moved, outs)]
    match e.known:
        case Scan() as scan:
            n, m = scan.n_consts, scan.n_consts + scan.n_carry
            moved[n:m] = masks_of_scan(e, values, moved, is_forward=True)[1]
            outs[: scan.n_carry] = masks_of_scan(e, values, outs, is_forward=False)[1]
            # Constants have no axis of time. Each step would get a slice.
            fixed, moved[:n] = moved[:n], [False] * n
        case Cond():
            # Under `vmap`, JAX gives a branch that is not taken constants as its operands.
            of_programs = [(moved[1:], outs)] * len(e.inner)
    # Booleans stay what they are, and arrays pass through the equation.
    arrays, known = zip(*(eqx.partition(x, eqx.is_array) for x in of_programs), strict=True)
    inner = {id(a.program.jaxpr): (a, k) for a, k in zip(e.inner, known, strict=True)}

    def run(program, values, arrays):
        analysis, known = inner[id(program.jaxpr)]
        moved, outs = eqx.combine(arrays, known)
        moved[: len(fixed)] = fixed
        return evaluate_zero_safe(analysis, values, moved, outs)

    return list(enter(e.eqn, values, run, arrays))
