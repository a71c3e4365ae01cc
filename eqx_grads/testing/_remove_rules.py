"""Which function's rule makes a gradient wrong: without that rule, the gradient is right.

Each call of a function with a rule becomes a `cond` between the call and what is beneath the
rule. So one compiled program has the gradient without any set of rules.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Set

import jax
import numpy as np

from .._diagnosis.origins import NumberedLoss, Origin
from .._diagnosis.source_lines import source_line, SourceLine
from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.host_calls import host_function_in
from .._jaxprs.operands import restricted
from .._jaxprs.structure import Cond, equations, primal_program, ShardMap, structure
from .._jaxprs.versions import function_name
from .._tangent_spaces import is_differentiable
from ._loss_program import LossProgram
from ._outcome import outcome
from ._without_rules import has_given_solver, is_rule, replaced


class RuleRemoval:
    """The derivative of a loss without some of its rules.

    - `suspects`: what can be removed: the first call of a function in a layer. A set of rules
        is a set of indices of this list.
    - `kept`: what can't, as JAX can't differentiate what is beneath the rule.
    """

    def __init__(self, program: LossProgram):
        self.program = program
        self.suspects: list[Origin] = []
        self.kept: list[Origin] = []
        self._index: dict[int, int] = {}  # from the id of an equation
        self._known: dict[frozenset[int], list[np.ndarray]] = {}
        numbers: dict[tuple[str, str], int] = {}
        for origin in NumberedLoss(program.traced).origins:
            if not is_rule(origin.eqn):
                continue
            origin = dataclasses.replace(origin, primitive=_name(origin), source=_place(origin))
            if not self._is_removable(origin.eqn):
                self.kept.append(origin)
                continue
            # A function is the same wherever a layer calls it.
            number = numbers.setdefault((origin.primitive, origin.path), len(self.suspects))
            self._index[id(origin.eqn)] = number
            self.suspects += [origin] * (number == len(self.suspects))

    def _is_removable(self, eqn) -> bool:
        program = primal_program(eqn)
        if program is None or has_given_solver(eqn):
            return False
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        indices = [i for i, x in enumerate(inputs) if is_differentiable(x)]

        def derivative(xs):
            run = lambda *xs: list(filter(is_differentiable, evaluate(program, xs)))
            out, pull = jax.vjp(restricted(run, xs, indices), *(xs[i] for i in indices))
            return pull(out)

        found = outcome(self.program.in_its_types, jax.eval_shape, derivative, inputs)
        return not isinstance(found, Exception)

    def gradient(self, removed: Set[int]) -> list[np.ndarray]:
        key = frozenset(removed)
        if key not in self._known:  # the search asks for some sets several times
            mask = np.array([i in removed for i in range(len(self.suspects))], bool)
            self._known[key] = self.program.call(
                "without rules", jax.grad(self._loss), self.program.leaves, more=mask
            )
        return self._known[key]

    def _loss(self, leaves, others, mask):
        def without(eqn, values):
            if id(eqn) not in self._index:
                return bind(eqn, values)
            run = lambda values: run_without(primal_program(eqn), values)
            return jax.lax.cond(mask[self._index[id(eqn)]], run, ft.partial(bind, eqn), values)

        def is_replaced(eqn):
            return id(eqn) in self._index or _cannot_be_entered(eqn)

        run_without = lambda program, values: replaced(program, values, is_replaced, without)
        program = self.program.traced.program
        return self.program.of(lambda xs: run_without(program, [*xs, *others])[0])(leaves)

    def culprits(
        self, wrong: Callable[[Set[int]], Set[int]]
    ) -> tuple[dict[int, list[Origin]], Set[int]]:
        """For each wrong leaf the rules that make it wrong, and the set of all such rules.

        - `wrong`: the leaves that are wrong without a set of rules.
        """
        removed = set(range(len(self.suspects)))
        if wrong(removed):
            # One of the functions may have no other derivative than its rule.
            removed = next(({i} for i in sorted(removed) if not wrong({i})), set())
        for i in sorted(removed):
            removed -= {i} if not wrong(removed - {i}) else set()
        # A rule inside another one can't be removed alone.
        enclosing = {number for i in removed for number in self.suspects[i].enclosing}
        by_leaf: dict[int, list[Origin]] = {}
        for i in sorted(removed):
            if self.suspects[i].number not in enclosing:
                for leaf in wrong(removed - {i}):
                    by_leaf.setdefault(leaf, []).append(self.suspects[i])
        return by_leaf, removed


def _cannot_be_entered(eqn) -> bool:
    known = structure(eqn)
    return isinstance(known, ShardMap) or (isinstance(known, Cond) and known.by_platform)


def _place(origin: Origin) -> SourceLine:
    """The line of the call. If no frame of the call is the user's, a line of the function."""
    program = primal_program(origin.eqn)
    inner = [] if program is None else map(source_line, equations(program))
    return next((line for line in (origin.source, *inner) if line.file), origin.source)


def _name(origin: Origin) -> str:
    program = primal_program(origin.eqn)
    if origin.eqn.primitive.name == "call_hi_primitive" and program is not None:
        return function_name(program)
    return host_function_in(origin.eqn) or origin.primitive
