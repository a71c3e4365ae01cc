"""What a loss keeps for its backward pass, and which equation of the loss computes it.

The pullback that `jax.vjp` returns is a PyTree whose leaves are the residuals. So they are the
outputs of a program, the forward pass. Each output is followed back to the equation that
computes it, into the bodies of the loops that stack it.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from ..._control_flow.replay import PLAIN, replayed_scan
from ..._errors import first_line, rule_error, RuleError
from ..._jaxprs.dependence import free_variables, variables, without_unused
from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    equations,
    Scan,
    structure,
)
from .._programs.peak_memory import bytes_of
from ..origins import NumberedLoss, Origin
from ..report import AbstractRecord
from ..source_lines import UNKNOWN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(AbstractRecord):
    """An array that is kept from the forward to the backward pass.

    It has the fields of all records; `step` is empty. The kinds are `"computed"`, `"carry"`,
    `"rule"`, `"constant"` and `"input"`. Also:

    - `shape`, `dtype`: those of one step, if a loop keeps one for each step.
    - `n_steps`: how many are kept: the product of the lengths of all enclosing loops.
    - `bytes`: of all steps.
    """

    shape: tuple[int, ...]
    dtype: str
    n_steps: int
    bytes: int

    @property
    def bytes_per_step(self) -> int:
        return self.bytes // max(self.n_steps, 1)


@dataclasses.dataclass(frozen=True)
class Source:
    """The variable that a residual is a copy of, or a stack of.

    - `program`: the program that has the variable, and `var`.
    - `eqn`: the equation that computes it, or `None` for an input of the program.
    - `origin`: the equation of the loss, if it is known.
    - `loops`: the numbers of the loops, in the loss, that stack it; `None` where unknown.
    - `steps`: the product of their lengths.
    - `kept_by_loop`: an output of a loop that is only there for the backward pass.
    """

    program: ClosedJaxpr
    var: Any
    eqn: Any
    origin: Origin | None
    loops: tuple[int | None, ...] = ()
    steps: int = 1
    kept_by_loop: bool = False
    is_carry: bool = False


_USE_SCAN = (
    "Only reverse mode keeps anything for a backward pass. A `while_loop` has none: use a "
    "`scan`."
)
_SAME_ERROR = "`jax.grad` of the loss raises this error as well: fix it first."


class Gradient:
    """The gradient of a loss as a program, and the residuals in it."""

    def __init__(self, numbered: NumberedLoss):
        self.numbered = numbered
        traced = numbered.traced
        n = len(traced.leaves)

        def gradient(arrays, others):
            value, pullback = jax.vjp(lambda *arrays: numbered(*arrays, *others), *arrays)
            value = jax.lax.optimization_barrier(value)  # what follows is the backward pass
            return jax.tree.leaves(pullback), (value, pullback(jnp.ones_like(value)))

        trace = jax.make_jaxpr(gradient, return_shape=True)
        try:
            program, out = trace(traced.values[:n], traced.values[n:])
        except RuleError:
            raise  # it says what to do
        except (ValueError, NotImplementedError) as error:
            do = _USE_SCAN if "while_loop" in str(error) else _SAME_ERROR
            what = "The loss has no derivative in reverse mode."
            raise rule_error(what, first_line(error), do=do) from error
        n_residuals = len(out[0])
        n_others = len(program.out_avals) - n_residuals
        self.program = program
        # The program without what is only there to return the residuals.
        self.gradient = without_unused(program, [False] * n_residuals + [True] * n_others)
        value = self.gradient.jaxpr.outvars[0]
        eqns = self.gradient.eqns
        start = next(i for i, eqn in enumerate(eqns) if value in eqn.outvars)
        # A pullback may hold what a compiled gradient does not need, such as the arguments of
        # a call with a rule.
        used = free_variables(eqns[start + 1 :], self.gradient.jaxpr.outvars[1:])
        self._residuals = [
            v for v in variables(program.jaxpr.outvars[:n_residuals]) if v in set(used)
        ]
        # By program. A program is known by its `jaxpr`, which lives as long as `program`.
        self._producers: dict[int, dict[Any, Any]] = {}

    def plain_calls(self) -> list[Any]:
        """The equations of the loss that are a `filter_scan` with `checkpoint="auto"`, which
        chose plain scan."""
        inside = [e for e in equations(self.program) if PLAIN in str(e.source_info.name_stack)]
        origins = {o.number: o for o in map(self.numbered.origin_of, inside) if o is not None}
        return [o.eqn for o in origins.values() if o.primitive == replayed_scan.__name__]

    @ft.cached_property
    def sources(self) -> list[Source]:
        """Where the residuals come from, each once."""
        found: dict[tuple[int, Any, int], Source] = {}
        for var in self._residuals:
            source = self._follow(Source(self.program, var, None, None))
            found.setdefault((id(source.program.jaxpr), source.var, source.steps), source)
        return list(found.values())

    def _producer(self, program, var) -> Any:
        """The equation that computes a variable; `None` for an input of the program."""
        key = id(program.jaxpr)
        if key not in self._producers:
            self._producers[key] = {v: eqn for eqn in program.eqns for v in eqn.outvars}
        return self._producers[key].get(var)

    def _follow(self, at: Source) -> Source:
        """From a variable to the one inside that it is a copy of, or a stack of."""
        eqn = self._producer(at.program, at.var)
        if eqn is None:
            return dataclasses.replace(at, eqn=None)
        origin = self.numbered.origin_of(eqn) or at.origin
        at = dataclasses.replace(at, eqn=eqn, origin=origin)
        index = eqn.outvars.index(at.var)
        match structure(eqn):
            case Call() | Checkpoint() as call:
                return self._follow_into(at, call.programs[0], index, eqn.invars)
            case Scan() as scan:
                return self._follow_into_scan(at, scan, index)
            case Cond() as cond:
                return self._follow_into_branch(at, cond, index)
        return at

    def _follow_into(self, at, program, index, operands) -> Source:
        var = program.jaxpr.outvars[index]
        if isinstance(var, Literal):
            return at
        inner = self._follow(dataclasses.replace(at, program=program, var=var, eqn=None))
        invars = program.jaxpr.invars
        if inner.program is program and inner.eqn is None and inner.var in invars:
            operand = operands[invars.index(inner.var)]
            if isinstance(operand, Literal):
                return at
            return self._follow(dataclasses.replace(at, var=operand, eqn=None))
        return inner

    def _follow_into_scan(self, at, scan, index) -> Source:
        (body,) = scan.programs
        var = body.jaxpr.outvars[index]
        if isinstance(var, Literal):
            return at
        if index < scan.n_carry:  # the last carry, which is kept once
            inner = self._follow(dataclasses.replace(at, program=body, var=var, eqn=None))
            return dataclasses.replace(at, origin=inner.origin or at.origin)
        # A loop in a rule is not one of the loss, and all that it stacks is for the derivative.
        loop = self.numbered.origin_of(at.eqn)
        if loop is not None and not isinstance(structure(loop.eqn), Scan):
            loop = None
        n_outputs = len(loop.eqn.outvars) if loop is not None else 0
        inside = dataclasses.replace(
            at,
            loops=(*at.loops, loop.number if loop is not None else None),
            steps=at.steps * scan.length,
            kept_by_loop=at.kept_by_loop or index >= n_outputs,
        )
        inner = self._follow(dataclasses.replace(inside, program=body, var=var, eqn=None))
        if inner.program is not body or inner.eqn is not None:
            return inner
        position = body.jaxpr.invars.index(inner.var) if inner.var in body.jaxpr.invars else -1
        carried = position - scan.n_consts
        if not 0 <= carried < scan.n_carry:
            return inner
        # The carry before each step: named after the equation that computes the one after it.
        after = body.jaxpr.outvars[carried]
        if not isinstance(after, Literal):
            step = self._follow(dataclasses.replace(inside, program=body, var=after, eqn=None))
            inner = dataclasses.replace(inner, origin=step.origin)
        return dataclasses.replace(inner, is_carry=True)

    def _follow_into_branch(self, at, cond, index) -> Source:
        for branch in cond.programs:
            var = branch.jaxpr.outvars[index]
            if isinstance(var, Literal):
                continue
            inner = self._follow(dataclasses.replace(at, program=branch, var=var, eqn=None))
            # The other branches return zeros or uninitialized memory of the same shape.
            if inner.eqn is not None and not _is_filler(inner.eqn):
                return dataclasses.replace(at, origin=inner.origin or at.origin)
        return at

    def residuals(self) -> list[Residual]:
        """A record of each of `sources`."""
        return list(map(self._record, self.sources))

    def _record(self, source: Source) -> Residual:
        aval, origin = source.var.aval, source.origin
        kind = _kind(source, self.program)
        return Residual(
            **(origin.source if origin is not None else UNKNOWN).fields(),
            leaf=self._leaf(source.var) if kind == "input" else "",
            primitive=_name(source, self._input_name),
            path=origin.path if origin is not None else "",
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            n_steps=source.steps,
            bytes=source.steps * bytes_of(aval),
            kind=kind,
        )

    def _leaf(self, var) -> str:
        """The path of an input of the program in the model; empty for any other input, and for
        a constant."""
        inputs = self.program.jaxpr.invars
        return self.numbered.traced.leaf_of(inputs.index(var)) if var in inputs else ""

    def _input_name(self, var) -> str:
        names = zip(self.program.jaxpr.invars, self.numbered.traced.inputs, strict=True)
        return next((name for v, name in names if v is var), "constant")


def _is_filler(eqn) -> bool:
    return eqn.primitive.name in ("broadcast_in_dim", "empty", "empty2")


def _name(source: Source, input_name: Callable[[Any], str]) -> str:
    if source.eqn is None and not source.is_carry:
        return input_name(source.var)
    if source.origin is None:
        return source.eqn.primitive.name if source.eqn is not None else "scan"
    return source.origin.primitive


def _kind(source: Source, program: ClosedJaxpr) -> str:
    if source.is_carry:
        return "carry"
    if source.eqn is None and source.program is program:
        return "constant" if source.var in program.jaxpr.constvars else "input"
    origin = source.origin
    has_rule = origin is not None and isinstance(structure(origin.eqn), CallWithRule)
    return "rule" if has_rule and source.eqn is not None else "computed"
