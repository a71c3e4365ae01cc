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
from .._jaxprs.evaluate import bind, enter, equation_context, evaluate, values_of_inputs
from .._jaxprs.operands import at, flagged
from .._jaxprs.primitives import kind_of
from .._jaxprs.structure import Cond, Scan
from .._jaxprs.varying import cast_to
from .._rules.replace_gradient import replace_gradient
from .analysis import Analysis, AnalyzedEquation
from .mask import both, dense, Mask
from .masks import backward, forward, masks_of_scan, raw_outputs, read, transfer


class Plan:
    """The treatment of each equation, given the known masks of the outputs.

    - `guarded`: gets guards, or its inner programs are transformed.
    - `local`: a selection that multiplies by zero what may be infinite.
    """

    def __init__(self, analysis: Analysis, outs: Sequence[bool | None], steep: Sequence[bool]):
        self.analysis = analysis
        known = backward(analysis, None, outs, analysis.eqns)
        is_steep = set(variables(at(analysis.program.jaxpr.outvars, flagged(steep))))
        self.guarded: set[int] = set()
        self.local: set[int] = set()
        self.steep_outs: dict[int, list[bool]] = {}
        for e in reversed(analysis.eqns):
            self._decide(e, known, is_steep)
        jaxpr = analysis.program.jaxpr
        self.steep_inputs = [v in is_steep for v in jaxpr.invars]

    @property
    def acts(self) -> bool:
        return bool(self.guarded or self.local)

    def _decide(self, e: AnalyzedEquation, known, is_steep) -> None:
        eqn = e.eqn
        steep = [v in is_steep for v in eqn.outvars]
        alive = [known.get(v, False) for v in eqn.outvars]
        if any(steep) or e.has_risk:
            is_steep.update(variables(eqn.invars))
        if e.is_entered:
            steep = [any(steep) or e.has_risk] * len(steep)
            if any(plan.acts for plan in _inner_plans(e, alive, steep)):
                self.guarded.add(id(eqn))
                self.steep_outs[id(eqn)] = steep
        elif e.is_risky and (e.is_mixed or any(alive[i] is not True for i in e.inexact_outs)):
            self.guarded.add(id(eqn))
        elif any(steep) and _selects_by_product(eqn):
            self.local.add(id(eqn))

    def touched(self) -> set[int]:
        """The equations that are guarded or depend on one that is."""
        eqns: set[int] = set()
        found: set[Any] = set()
        for e in self.analysis.eqns:
            if id(e.eqn) in self.guarded or any(v in found for v in variables(e.eqn.invars)):
                eqns.add(id(e.eqn))
                found.update(e.eqn.outvars)
        return eqns


def _selects_by_product(eqn: Any) -> bool:
    """Whether JAX multiplies the cotangent of what is not selected by zero, as for `max`."""
    kind = kind_of(eqn)
    return kind.selects and kind.derivative == "smooth" and kind.linear != "each"


def _inner_plans(e, alive, steep) -> list[Plan]:
    n = 0
    if isinstance(e.known, Scan):  # the step after uses the carry
        n = e.known.n_carry
    elif isinstance(e.known, Cond):  # `vmap` may make a selection of it
        n = len(alive)
    return [Plan(a, [None] * n + list(alive[n:]), steep) for a in e.inner]


def evaluate_zero_safe(
    analysis: Analysis,
    values: Sequence[Any],
    moved: Sequence[Mask],
    outs: Sequence[Mask],
    steep: Sequence[bool],
) -> list[Any]:
    """The outputs of a program.

    - `moved`: which elements of the inputs depend on what is being differentiated.
    - `outs`: from which elements of the outputs a taken path leads to the result.
    - `steep`: for each output, whether its cotangent may not be finite.
    """
    plan = Plan(analysis, [m if isinstance(m, bool) else None for m in outs], steep)
    program = analysis.program
    if not plan.acts:
        return evaluate(program, values)
    touched = plan.touched()
    env = values_of_inputs(program, values)
    raw = dict(env)
    for e in analysis.eqns:
        if id(e.eqn) not in touched:
            out = _run(plan, e, read(env, e.eqn.invars))
            env.update(zip(e.eqn.outvars, out, strict=True))
        elif e.eqn.effects and not e.eqn.outvars:  # happens once, below
            continue
        else:
            out = raw_outputs(e.eqn, read(raw, e.eqn.invars))
        raw.update(zip(e.eqn.outvars, out, strict=True))
    from_inputs = forward(analysis, raw, moved)
    alive: dict[int, tuple[list[Mask], list[Mask]]] = {}

    def visit(e, ins, given):
        alive[id(e.eqn)] = ins, given

    affected = [e for e in analysis.eqns if id(e.eqn) in touched]
    backward(analysis, raw, outs, affected, visit)
    for e in affected:
        masks = None
        if id(e.eqn) in plan.guarded:
            ends = [read(from_inputs, vs, False) for vs in (e.eqn.invars, e.eqn.outvars)]
            masks = _Masks(*alive[id(e.eqn)], *ends)
        out = _run(plan, e, read(env, e.eqn.invars), masks)
        env.update(zip(e.eqn.outvars, out, strict=True))
    return read(env, program.jaxpr.outvars)


class _Masks(NamedTuple):
    """From which elements of operands and outputs a taken path leads to the result, and which
    depend on the inputs."""

    alive_ins: Sequence[Mask]
    alive_outs: Sequence[Mask]
    moved_ins: Sequence[Mask]
    moved_outs: Sequence[Mask]


def _run(plan: Plan, e: AnalyzedEquation, values, masks: _Masks | None = None) -> list[Any]:
    """An equation, with its guards."""
    eqn = e.eqn
    with equation_context(eqn):
        if id(eqn) in plan.guarded:
            assert masks is not None
            if e.is_entered:
                return _enter(e, values, masks, plan.steep_outs[id(eqn)])
            values, masks = _broadcast(e, values, masks)
            values = _guard(values, masks.alive_ins, masks.moved_ins)
            out = bind(eqn, values)
            kind = kind_of(eqn)
            if kind.linear == "each" and not kind.elementwise:
                out = [_without_dead_factors(eqn, values, out[0], masks.alive_ins)]
            return _guard(out, masks.alive_outs, masks.moved_outs)
        if id(eqn) in plan.local:
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


def _enter(e: AnalyzedEquation, values, masks: _Masks, steep) -> list[Any]:
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
            shapes = [v.aval.shape for v in e.eqn.outvars]
            full = list(map(dense, outs, shapes))
            of_branch = lambda i: [(values[0] == i) & mask for mask in full]
            of_programs = [(moved[1:], of_branch(i)) for i in range(len(e.inner))]
    # Booleans stay what they are, and arrays pass through the equation.
    arrays, known = zip(*(eqx.partition(x, eqx.is_array) for x in of_programs), strict=True)
    inner = {id(a.program.jaxpr): (a, k) for a, k in zip(e.inner, known, strict=True)}

    def run(program, values, arrays):
        analysis, known = inner[id(program.jaxpr)]
        moved, outs = eqx.combine(arrays, known)
        moved[: len(fixed)] = fixed
        return evaluate_zero_safe(analysis, values, moved, outs, steep)

    return list(enter(e.eqn, values, run, arrays))
