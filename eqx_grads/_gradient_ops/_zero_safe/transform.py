"""Evaluate a program so that dead elements have no derivative.

An equation with a derivative that may not be finite gets its operands, and returns its outputs,
through a guard: `where(mask, x, stop_gradient(x))`. That is `x`, bit by bit, and XLA knows it.
But nothing of a derivative crosses it where the mask is false: no tangent, no cotangent, no
NaN, to any order. All else is as it was. A mask is a function of values, not of cotangents, so
it is computed before; the derivative of the result is one that JAX knows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._jaxprs.dependence import variables
from ..._jaxprs.evaluate import bind, enter, evaluate
from ..._jaxprs.structure import Cond, Scan
from ..._jaxprs.versions import equation_context
from .liveness import (
    dense,
    Mask,
    masks_of_variables,
    raw_outputs,
    read,
    scan_masks,
    SELECTS_BY_PRODUCT,
    static_masks,
    transfer,
)
from .ranges import Analysis, AnalyzedEquation, inexact_indices


class Plan:
    """What is to be done with each equation, given what is known of the masks of the outputs.

    - `guarded`: gets guards, or its inner programs are transformed.
    - `local`: a selection that multiplies by zero what may be infinite.
    """

    def __init__(self, analysis: Analysis, outs: Sequence[bool | None], steep: Sequence[bool]):
        self.analysis = analysis
        known = static_masks(analysis, outs)
        outvars = zip(analysis.program.jaxpr.outvars, steep, strict=True)
        is_steep = set(variables(v for v, s in outvars if s))
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
        elif e.is_risky and any(alive[i] is not True for i in inexact_indices(eqn.outvars)):
            self.guarded.add(id(eqn))
        elif any(steep) and eqn.primitive.name in SELECTS_BY_PRODUCT:
            self.local.add(id(eqn))

    def touched(self) -> set[Any]:
        """The variables that depend on a guarded equation."""
        found: set[Any] = set()
        for e in self.analysis.eqns:
            if id(e.eqn) in self.guarded or any(v in found for v in variables(e.eqn.invars)):
                found.update(e.eqn.outvars)
        return found


def _inner_plans(e, alive, steep) -> list[Plan]:
    match e.known:
        case Scan():
            # A carry that is not used after the last step is used by the step after.
            alive = [None] * e.known.n_carry + list(alive[e.known.n_carry :])
            return [Plan(e.inner[0], alive, steep)]
        case Cond():  # `vmap` may make a selection of it
            return [Plan(a, [None] * len(alive), steep) for a in e.inner]
    return [Plan(e.inner[0], alive, steep)]


def evaluate_zero_safe(
    analysis: Analysis, values: Sequence[Any], outs: Sequence[Mask], steep: Sequence[bool]
) -> list[Any]:
    """The outputs of a program.

    - `outs`: the masks of the outputs.
    - `steep`: for each output, whether its cotangent may not be finite.
    """
    plan = Plan(analysis, [m if isinstance(m, bool) else None for m in outs], steep)
    program = analysis.program
    if not plan.acts:
        return evaluate(program, values)
    touched = plan.touched()
    env: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    env.update(zip(program.jaxpr.invars, values, strict=True))
    raw = dict(env)
    for e in analysis.eqns:
        if not any(v in touched for v in e.eqn.outvars):
            out = _run(plan, e, read(env, e.eqn.invars), None)
            env.update(zip(e.eqn.outvars, out, strict=True))
        else:
            out = raw_outputs(e.eqn, read(raw, e.eqn.invars))
        raw.update(zip(e.eqn.outvars, out, strict=True))
    found: dict[int, tuple[list[Mask], list[Mask]]] = {}

    def visit(e, ins, given):
        found[id(e.eqn)] = ins, given

    masks_of_variables(analysis, raw, outs, touched, visit)
    for e in analysis.eqns:
        if any(v in touched for v in e.eqn.outvars):
            out = _run(plan, e, read(env, e.eqn.invars), found[id(e.eqn)])
            env.update(zip(e.eqn.outvars, out, strict=True))
    return read(env, program.jaxpr.outvars)


def _run(plan: Plan, e: AnalyzedEquation, values, masks) -> list[Any]:
    """An equation, with its guards. `masks` are those of its operands and of its outputs."""
    eqn = e.eqn
    with equation_context(eqn):
        if id(eqn) in plan.guarded:
            ins, outs = masks
            if e.is_entered:
                return _enter(e, values, outs, plan.steep_outs[id(eqn)])
            with jax.named_scope(SCOPE):
                values = _guard(values, ins)
            out = bind(eqn, values)
            with jax.named_scope(SCOPE):
                return _guard(out, outs)
        if id(eqn) in plan.local:
            with jax.named_scope(SCOPE):
                out = bind(eqn, values)
                taken = transfer(e, values, out, [True] * len(out))
                values = _guard(values, taken)
        return bind(eqn, values)


# The name of the guards, in the name stacks of their equations.
SCOPE = "eqg_zero_safe"


def _guard(values: Sequence[Any], masks: Sequence[Mask]) -> list[Any]:
    return [_guard_one(x, mask) for x, mask in zip(values, masks, strict=True)]


def _guard_one(x: Any, mask: Mask) -> Any:
    if mask is True or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return x
    constant = jax.lax.stop_gradient(x)
    if mask is False:
        return constant
    return jax.lax.select(dense(mask, jnp.shape(x)), jnp.asarray(x), jnp.asarray(constant))


def _enter(e: AnalyzedEquation, values, outs, steep) -> list[Any]:
    match e.known:
        case Scan():
            return _enter_scan(e, values, outs, steep)
        case Cond():
            return _enter_cond(e, values, outs, steep)
    arrays = {i: mask for i, mask in enumerate(outs) if not isinstance(mask, bool)}

    def run(program, values, arrays):
        masks = [arrays.get(i, mask) for i, mask in enumerate(outs)]
        return evaluate_zero_safe(e.inner[0], values, masks, steep)

    return list(enter(e.eqn, values, run, [arrays]))


def _enter_scan(e, values, outs, steep):
    scan = e.known
    _, after = scan_masks(e, values, outs)
    given = [*after, *outs[scan.n_carry :]]
    arrays = {i: mask for i, mask in enumerate(given) if not isinstance(mask, bool)}

    def run(program, values, arrays):
        masks = [arrays.get(i, False if m is None else m) for i, m in enumerate(given)]
        return evaluate_zero_safe(e.inner[0], values, masks, steep)

    return list(enter(e.eqn, values, run, [arrays]))


def _enter_cond(e, values, outs, steep):
    index = values[0]
    types = [v.aval for v in e.eqn.outvars]
    extras = [
        [(index == i) & dense(mask, t.shape) for mask, t in zip(outs, types, strict=True)]
        for i in range(len(e.inner))
    ]
    analyses = {id(a.program.jaxpr): a for a in e.inner}

    def run(program, values, masks):
        return evaluate_zero_safe(analyses[id(program.jaxpr)], values, masks, steep)

    return list(enter(e.eqn, values, run, extras))
