"""Which function's rule makes a gradient wrong: without that rule, the gradient is right.

Each call of a function with a rule becomes a `cond` between the call and what is beneath the
rule. So one compiled program has the gradient without any set of rules.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import numpy as np

from .._diagnosis._programs.linear_solve import enter_also_solve, is_linear_solve
from .._diagnosis._programs.pairs import differentiable_pairs, is_inexact
from .._diagnosis.origins import NumberedLoss, Origin
from .._diagnosis.source_lines import source_line, SourceLine
from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.host_calls import host_function_in
from .._jaxprs.primitives import ELEMENTARY
from .._jaxprs.structure import (
    CallWithRule,
    Cond,
    equations,
    inner_programs,
    primal_program,
    ShardMap,
    structure,
    While,
)
from ._loss_program import LossProgram
from ._without_rules import has_given_solver, is_rule


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A function with a rule that is called in a layer.

    - `name`: what the user calls it.
    - `origin`: the first call of it.
    """

    name: str
    layer: str
    origin: Origin

    @property
    def place(self) -> SourceLine:
        """The line of the call. If no frame of it is the user's, of what is called."""
        sources = [self.origin.source]
        program = primal_program(self.origin.eqn)
        if program is not None:
            sources += map(source_line, equations(program))
        return next((source for source in sources if source.file), sources[0])


class RuleRemoval:
    """The gradient of a loss without some of its rules.

    - `suspects`: what can be removed. A set of rules is a set of indices of this list.
    - `solvers`: the equations with a solver of the user's. They can't be removed.
    - `opaque`: the equations that JAX can't differentiate. A rule may keep the derivative from
        them. Without it, their derivative is zero here, and so is that of a `while_loop` in
        reverse mode.
    """

    def __init__(self, program: LossProgram):
        self.program = program
        self.suspects: list[Suspect] = []
        self._known: dict[frozenset[int], list[np.ndarray]] = {}
        self._index: dict[int, int] = {}  # from the id of an equation
        known: dict[tuple[str, str, bool], int] = {}
        origins = NumberedLoss(program.traced).origins
        self.solvers = [origin for origin in origins if has_given_solver(origin.eqn)]
        # From the id of an equation: the operands in which it has no derivative.
        self._stopped = program.in_its_types(_undifferentiable_operands, origins)
        self.opaque = [o for o in origins if self._stopped.get(id(o.eqn)) == _inexact(o.eqn)]
        for origin in origins:
            if not _is_suspect(origin.eqn) or id(origin.eqn) in self._stopped:
                continue
            suspect = Suspect(_name(origin), origin.path, origin)
            # A function is the same wherever a layer calls it.
            is_host = bool(host_function_in(origin.eqn))  # which has the name of any function
            key = (suspect.name, suspect.layer, is_host)
            if key not in known:
                known[key] = len(self.suspects)
                self.suspects.append(suspect)
            self._index.setdefault(id(origin.eqn), known[key])

    def _loss(self, leaves, others, removed, stop: type | tuple[type, ...] = ()):
        values = [*leaves, *others]
        return self._evaluate(removed, stop, self.program.traced.program, values)[0]

    def gradient(self, removed: Set[int]) -> list[np.ndarray]:
        key = frozenset(removed)
        if key not in self._known:  # the search asks for some sets several times
            loss = lambda xs, others, mask: self._loss(xs, others, mask, stop=While)
            run, leaves = jax.grad(loss), self.program.leaves
            self._known[key] = self.program.call(
                "without rules", run, leaves, more=self._mask(removed)
            )
        return self._known[key]

    def tangent(self, removed: Set[int], tangents: Sequence[Any]) -> float:
        """The derivative along a direction, in forward mode."""

        def tangent(xs, ts, others, mask):
            return jax.jvp(lambda xs: self._loss(xs, others, mask), (xs,), (ts,))[1]

        vectors = self.program.leaves, tangents
        mask = self._mask(removed)
        return float(self.program.call("tangent without", tangent, *vectors, more=mask))

    def _mask(self, removed: Set[int]) -> np.ndarray:
        return np.array([i in removed for i in range(len(self.suspects))])

    def culprits(
        self, wrong: Callable[[Set[int]], Set[int]]
    ) -> tuple[dict[int, list[Suspect]], Set[int]]:
        """For each wrong leaf the rules that make it wrong, and the set of these rules.

        - `wrong`: the indices of the leaves that are wrong without a set of rules.
        """
        if not self.suspects:
            return {}, set()
        removed = set(range(len(self.suspects)))
        if wrong(removed):
            # One of the functions may have no other derivative than its rule.
            alone = [{i} for i in sorted(removed) if not wrong({i})]
            if not alone:
                return {}, set()
            removed = alone[0]
        for i in sorted(removed):
            if not wrong(removed - {i}):
                removed = removed - {i}
        by_leaf: dict[int, list[Suspect]] = {}
        for i in sorted(removed):
            is_around = any(
                self.suspects[i].origin.number in self.suspects[j].origin.enclosing
                for j in removed
            )
            if is_around:  # the rule inside can't be removed alone
                continue
            for leaf in wrong(removed - {i}):
                by_leaf.setdefault(leaf, []).append(self.suspects[i])
        return by_leaf, removed

    def _evaluate(self, removed, stop, program, values):
        """The outputs of a program without some rules. `stop`: the loops without derivative."""

        def hook(eqn, values):
            index = self._index.get(id(eqn))
            if index is not None:
                without = ft.partial(self._without_rule, removed, stop, eqn)
                return jax.lax.cond(removed[index], without, ft.partial(bind, eqn), values)
            stopped = self._stopped.get(id(eqn), frozenset())
            if isinstance(structure(eqn), stop):
                stopped = range(len(values))
            if stopped:
                held = lambda i, x: jax.lax.stop_gradient(x) if i in stopped else x
                return bind(eqn, [held(i, x) for i, x in enumerate(values)])
            if not self._is_entered(eqn):
                return bind(eqn, values)
            return enter_also_solve(eqn, values, run)

        run = lambda inner, values, _: self._evaluate(removed, stop, inner, values)
        return evaluate(program, values, hook)

    def _without_rule(self, removed, stop, eqn, values):
        return self._evaluate(removed, stop, primal_program(eqn), values)

    def _is_entered(self, eqn) -> bool:
        known = structure(eqn)
        if known is None and not is_linear_solve(eqn):
            return False
        if isinstance(known, CallWithRule | ShardMap):
            return False
        if isinstance(known, Cond) and known.by_platform:
            return False
        return any(
            id(inner) in self._index
            or id(inner) in self._stopped
            or isinstance(structure(inner), While)
            for p in inner_programs(eqn)
            for inner in equations(p)
        )


def _is_suspect(eqn) -> bool:
    return is_rule(eqn) and primal_program(eqn) is not None and not has_given_solver(eqn)


def _inexact(eqn) -> frozenset[int]:
    return frozenset(i for i, v in enumerate(eqn.invars) if is_inexact(v))


def _undifferentiable_operands(origins: Sequence[Origin]) -> dict[int, frozenset[int]]:
    """For the id of an equation, the operands in which JAX can't differentiate it: all, of a
    primitive or a host function without a derivative, or some, as the state of a solver of
    Lineax."""
    has_derivative: dict[str, bool] = {}  # in all operands together

    def of(eqn) -> frozenset[int]:
        name = eqn.primitive.name
        if host_function_in(eqn):
            pairs = differentiable_pairs(eqn, _inexact(eqn))
            return frozenset() if pairs is not None else _inexact(eqn)
        if "callback" in name:  # which JAX can't differentiate, whatever it returns
            return _inexact(eqn)
        if structure(eqn) is not None or name in ELEMENTARY or _is_suspect(eqn):
            return frozenset()
        if name not in has_derivative:
            has_derivative[name] = differentiable_pairs(eqn, _inexact(eqn)) is not None
        if has_derivative[name]:
            return frozenset()
        return frozenset(i for i in _inexact(eqn) if differentiable_pairs(eqn, {i}) is None)

    stopped = {id(origin.eqn): of(origin.eqn) for origin in origins}
    return {key: operands for key, operands in stopped.items() if operands}


def _name(origin: Origin) -> str:
    if name := host_function_in(origin.eqn):
        return name
    info = getattr(getattr(primal_program(origin.eqn), "jaxpr", None), "debug_info", None)
    # Such as "square at /home/user/model.py:12".
    name = str(getattr(info, "func_src_info", "")).partition(" at ")[0]
    generic = origin.primitive in ("custom_jvp_call", "custom_vjp_call")
    generic = generic or origin.eqn.primitive.name == "call_hi_primitive"
    return name if generic and name else origin.primitive
