"""The equations of a program with the ranges of their operands, and those of inner programs."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..._jaxprs.dependence import without_unused
from ..._jaxprs.evaluate import bind, evaluate
from ..._jaxprs.primitives import linear_operands
from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    inner_programs,
    Scan,
    structure,
    While,
)
from ..._jaxprs.versions import assigns_shardings
from .ranges import (
    dependence,
    has_risk,
    inexact_indices,
    Range,
    range_of_constant,
    ranges_of_outputs,
)


class AnalyzedEquation:
    """An equation, the ranges of its operands, and its analyzed inner programs."""

    def __init__(self, eqn: Any, ins: Sequence[Range], inner: "Sequence[Analysis]", depth: int):
        self.eqn = eqn
        self.known = structure(eqn)
        self.ins = ins
        self.inner = inner
        self._depth = depth

    @ft.cached_property
    def tangent_map(self) -> "Analysis | None":
        """The tangents of a call with a rule, as a program of its operands and the tangents of
        those that are `moving`. `None` for a rule that is in its own rule, and for
        a function without a forward mode."""
        if self._depth >= _MAX_DEPTH:
            return None
        types = [v.aval for v in self.eqn.invars]
        moving = self.moving
        try:
            program = without_unused(_trace_tangents(self.eqn, types, moving))
        except Exception:
            # There may be no forward mode, or none with respect to these operands. The rule has
            # not been asked for: what it raises is for the one who differentiates.
            return None
        still = [dataclasses.replace(r, active=False) for r in self.ins]
        return analyze(program, [*still, *(Range() for _ in moving)], self._depth + 1)

    @property
    def has_rule(self) -> bool:
        """Whether it calls a function with a derivative of its own. Of it, the flags
        `jax_custom_jvp3` and `jax_custom_vjp3` make an opaque equation with a program."""
        if self.eqn.primitive.name.startswith("scatter"):  # the program combines two numbers
            return False
        if self.known is None:
            return bool(inner_programs(self.eqn)) and not linear_operands(self.eqn)
        return isinstance(self.known, CallWithRule)

    @property
    def is_entered(self) -> bool:
        """Whether the inner programs are transformed, and not the equation as a whole."""
        match self.known:
            case Call():
                return not assigns_shardings(self.eqn.params)
            case Cond():
                return not self.known.by_platform
        return isinstance(self.known, Checkpoint | Scan)

    @property
    def moving(self) -> list[int]:
        """The operands that depend on what is being differentiated."""
        return [i for i in inexact_indices(self.eqn.invars) if self.ins[i].active]

    @property
    def is_active(self) -> bool:
        return bool(self.moving)

    @property
    def is_mixed(self) -> bool:
        """Whether an element of an operand may not depend on it, while others do."""
        return any(self.ins[i].mixed for i in self.moving)

    @ft.cached_property
    def is_risky(self) -> bool:
        """Whether a factor of its derivative, of any order, may be infinite or NaN."""
        if self.is_entered or not self.is_active:
            return False
        if isinstance(self.known, While):  # has no reverse mode
            return False
        if self.has_rule:
            return self.tangent_map is None or self.tangent_map.has_risk
        if self.known is not None:
            return True
        return has_risk(self.eqn, self.ins)

    @property
    def has_risk(self) -> bool:
        return self.is_risky or (self.is_entered and any(a.has_risk for a in self.inner))


class Analysis:
    """A program with the ranges of all its values."""

    def __init__(
        self,
        program: ClosedJaxpr,
        ins: Sequence[Range],
        eqns: list[AnalyzedEquation],
        outs: list[Range],
    ):
        self.program = program
        self.ins = ins
        self.eqns = eqns
        self.outs = outs

    @ft.cached_property
    def has_risk(self) -> bool:
        return any(e.has_risk for e in self.eqns)


# A rule may be made of functions with rules. One that calls its own function with a tangent
# would go on forever.
_MAX_DEPTH = 2


def analyze(program: ClosedJaxpr, ins: Sequence[Range], depth: int = 0) -> Analysis:
    """Find the ranges of all values of a program from those of its inputs."""
    eqns: list[AnalyzedEquation] = []

    def hook(eqn, ranges):
        analyzed, outs = _analyze_equation(eqn, ranges, depth)
        eqns.append(analyzed)
        return (
            outs if analyzed.is_active else [dataclasses.replace(r, active=False) for r in outs]
        )

    outs = evaluate(program, ins, hook, constant=range_of_constant)
    return Analysis(program, ins, eqns, outs)


def _trace_tangents(eqn, types, moving) -> ClosedJaxpr:
    outs = inexact_indices(eqn.outvars)

    def tangents(*values):
        primals, ts = list(values[: len(types)]), values[len(types) :]

        def of_moving(*xs):
            full = list(primals)
            for i, x in zip(moving, xs, strict=True):
                full[i] = x
            out = bind(eqn, full)
            return [out[i] for i in outs]

        return jax.jvp(of_moving, [primals[i] for i in moving], list(ts))[1]

    return jax.make_jaxpr(tangents)(*types, *(types[i] for i in moving))


def _analyze_equation(eqn, ins, depth) -> tuple[AnalyzedEquation, list[Range]]:
    known = structure(eqn)
    match known:
        case None:
            active, mixed = dependence(eqn, ins)
            outs = ranges_of_outputs(eqn, ins)
            outs = [dataclasses.replace(r, active=active, mixed=mixed) for r in outs]
            return AnalyzedEquation(eqn, ins, (), depth), outs
        case Scan():
            inner, outs = _analyze_scan(known, ins, depth)
        case While():
            inner, outs = [], [Range(finite=False, mixed=True)] * len(eqn.outvars)
        case Cond():
            inner = [analyze(p, ins[1:], depth) for p in known.programs]
            outs = [
                ft.reduce(Range.join, rs) for rs in zip(*(a.outs for a in inner), strict=True)
            ]
        case _:
            inner = [analyze(known.programs[0], ins, depth)]
            outs = inner[0].outs
            if isinstance(known, CallWithRule):  # which may multiply a tangent by zero
                outs = [dataclasses.replace(r, active=True, mixed=True) for r in outs]
    return AnalyzedEquation(eqn, ins, inner, depth), list(outs)


def _analyze_scan(scan: Scan, ins, depth) -> tuple[list[Analysis], list[Range]]:
    n = scan.n_consts + scan.n_carry
    consts, carry, xs = ins[: scan.n_consts], list(ins[scan.n_consts : n]), ins[n:]
    while True:  # ranges only widen, so this ends
        body = analyze(scan.programs[0], [*consts, *carry, *xs], depth)
        pairs = zip(carry, body.outs[: scan.n_carry], strict=True)
        widened = [before.widened_to(after) for before, after in pairs]
        if widened == carry:
            return [body], [*carry, *body.outs[scan.n_carry :]]
        carry = widened
