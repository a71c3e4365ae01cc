"""The equations of a program and of its inner programs, with the ranges of their operands."""

import contextvars
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._jaxprs.dependence import without_unused
from .._jaxprs.evaluate import function_of
from .._jaxprs.interpret import interpret, Interpretation, Step
from .._jaxprs.primitives import linear_operands
from .._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    inner_programs,
    LinearCall,
    Scan,
    structure,
    While,
)
from .._jaxprs.versions import assigns_shardings
from .._rules.rule import try_to_trace
from .ranges import has_risk, inexact_indices, Range, RANGES


# Whether an equation may get guards, and whether a zero may win in its derivative. To try
# `zero_safe`, it is enough to treat the equations where something is not finite.
TREATMENT = contextvars.ContextVar[Any]("eqx_grads_treatment", default=lambda eqn: (True, True))


class AnalyzedEquation:
    """An equation, the ranges of its operands, and its analyzed inner programs."""

    def __init__(self, step: Step[Range], depth: int):
        self.eqn = step.eqn
        self.name = step.eqn.primitive.name
        self.known = structure(step.eqn)
        self.ins = step.ins
        self.is_guarded, self.zero_wins = TREATMENT.get()(step.eqn)
        self.inner = [Analysis(inner, depth) for inner in step.inner]
        self.inexact_ins = inexact_indices(step.eqn.invars)
        self.inexact_outs = inexact_indices(step.eqn.outvars)
        # The operands that depend on the differentiated arguments.
        self.moving = [i for i in self.inexact_ins if self.ins[i].active]
        self._depth = depth

    @ft.cached_property
    def tangent_map(self) -> "Analysis | None":
        """The tangents of a call with a rule, as a program of its operands and the tangents of
        the `moving` operands. `None` for a rule that is in its own rule, for a function without
        a forward mode, and for tangents that come from a backward rule."""
        if self._depth >= _MAX_DEPTH:
            return None
        types = [v.aval for v in self.eqn.invars]

        def tangents(primals, ts):
            function = function_of(self.eqn, primals, self.moving, self.inexact_outs)
            return jax.jvp(function, [primals[i] for i in self.moving], ts)[1]

        program = self.traced(tangents, types, [types[i] for i in self.moving])
        if program is None or any(map(_is_opaque_tangent, program.eqns)):
            return None
        still = [r._replace(active=False) for r in self.ins]
        return analyze(program, [*still, *(Range() for _ in self.moving)], self._depth + 1)

    def traced(self, derivative: Any, *types: Any) -> ClosedJaxpr | None:
        """A derivative of the equation, or `None` if it can't be traced."""
        # There may be no such mode, or none with respect to these operands. Nobody has
        # differentiated yet, so an error in the rule must not surface here.
        return try_to_trace(
            lambda *types: without_unused(jax.make_jaxpr(derivative)(*types)), *types
        )

    @property
    def has_rule(self) -> bool:
        """Whether it calls a function with a derivative of its own. Of it, the flags
        `jax_custom_jvp3` and `jax_custom_vjp3` make an opaque equation with a program."""
        if self.name.startswith("scatter"):  # the program combines two numbers
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

    @ft.cached_property
    def is_risky(self) -> bool:
        """Whether a factor of its derivative, of any order, may be infinite or NaN."""
        # A `while_loop` has no reverse mode.
        if self.is_entered or not self.moving or isinstance(self.known, While):
            return False
        if self.has_rule:
            return self.tangent_map is None or self.tangent_map.has_risk
        return self.known is not None or has_risk(self.eqn, self.ins)

    @property
    def has_risk(self) -> bool:
        return self.is_risky or (self.is_entered and any(a.has_risk for a in self.inner))


class Analysis:
    """A program with the ranges of all its values."""

    def __init__(self, interpretation: Interpretation[Range], depth: int):
        self.program = interpretation.program
        self.ins = interpretation.ins
        self.eqns = [AnalyzedEquation(step, depth) for step in interpretation.steps]

    @ft.cached_property
    def has_risk(self) -> bool:
        return any(e.has_risk for e in self.eqns)


def _is_opaque_tangent(eqn: Any) -> bool:
    """Whether an equation holds the tangents of a backward rule."""
    return eqn.primitive.name == "custom_lin" or isinstance(structure(eqn), LinearCall)


# A rule may be made of functions with rules. One that calls its own function with a tangent
# would go on forever.
_MAX_DEPTH = 2


def analyze(program: ClosedJaxpr, ins: Sequence[Range], depth: int = 0) -> Analysis:
    """Find the ranges of all values of a program from the ranges of its inputs."""
    return Analysis(interpret(program, ins, RANGES), depth)
