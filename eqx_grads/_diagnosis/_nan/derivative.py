"""The derivative of a loss as a program, and where its operations come from.

The loss is traced with numbers at its equations, and the derivative with its seed as an input:
the values that depend on the seed are the cotangents. Rules have become equations.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ..._jaxprs.structure import CallWithRule, structure
from ..carried import outward, Place
from ..origins import is_in_derivative, NumberedLoss, Origin
from ..source_lines import rule_line, SourceLine, UNKNOWN


@dataclasses.dataclass(frozen=True)
class Derivative:
    """A program with the loss and the gradient of each leaf as its outputs; in forward mode,
    the loss and its tangent. `values` are its inputs; the last ones are the seeds."""

    numbered: NumberedLoss
    program: ClosedJaxpr
    values: Sequence[Any]
    n_seeds: int
    is_reverse: bool

    def origin(self, place: Place | None) -> Origin | None:
        """The equation of the loss that an operation comes from."""
        origins = (self.numbered.origin_of(p.eqn) for p in outward(place))
        return next(filter(None, origins), None)

    def steps_of(self, place: Place | None) -> tuple[int, ...]:
        """The steps of the loops around an operation. Only the steps that are known: the loop
        of a solver has a rule, in which another loop runs some steps forward and some backward,
        and counts both."""
        found = []
        for inside in reversed(list(outward(place))):
            if inside.around is not None and inside.step is not None:
                origin = self.origin(inside.around)
                if origin is None or isinstance(structure(origin.eqn), CallWithRule):
                    break
                found.append(inside.step)
        return tuple(found)


def differentiate(numbered: NumberedLoss) -> Derivative:
    """The derivative in reverse mode; in forward mode, if the loss has no reverse mode."""
    values, n = list(numbered.traced.values), len(numbered.traced.leaves)
    loss = lambda values: lambda *leaves: numbered(*leaves, *values[n:])

    def reverse(values, seed):
        value, pullback = jax.vjp(loss(values), *values[:n])
        return value, pullback(seed)

    def forward(values, seeds):
        return jax.jvp(loss(values), tuple(values[:n]), tuple(seeds))

    seed = jnp.ones_like(numbered.traced.program.out_avals[0])
    try:
        program = jax.make_jaxpr(reverse)(values, seed)
        return Derivative(numbered, program, [*values, seed], 1, True)
    except ValueError as error:
        # A `while_loop` has no derivative in reverse mode. There is no other sign of it: the
        # loop may be in a function with a rule, which has a derivative.
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
    seeds = [jnp.ones_like(x) for x in values[:n]]
    program = jax.make_jaxpr(forward)(values, seeds)
    return Derivative(numbered, program, [*values, *seeds], len(seeds), False)


def line_in_rule(place: Place | None) -> SourceLine:
    """The line of the rule that made an equation, or one around it: the equations of
    `jnp.where` have the line of its first call only."""
    lines = (rule_line(p.eqn) for p in outward(place))
    return next((line for line in lines if line.file), UNKNOWN)


def differentiated(numbered: NumberedLoss, origin: Origin) -> Origin:
    """The operation itself, or, in a derivative that the loss takes, the operation whose
    derivative it is in: the first one that was traced at the same place."""
    if origin.primitive.startswith("safe.") or not is_in_derivative(numbered.origins, origin):
        return origin
    traceback = origin.eqn.source_info.traceback
    return next(o for o in numbered.origins if o.eqn.source_info.traceback == traceback)
