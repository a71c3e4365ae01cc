"""The faults of a gradient: what is wrong, which function's rule causes it, and what to do.

Without the rule at fault, the gradient is right. Each call of a function with a rule becomes a
`cond` between the call and what is beneath the rule. So one compiled program has the gradient
without any set of rules.
"""

import dataclasses
import functools as ft
import re
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

import jax
import numpy as np

from .._diagnosis.origins import NumberedLoss, Origin
from .._diagnosis.report import show_list
from .._diagnosis.source_lines import source_line, SourceLine
from .._errors import place_of
from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.host_calls import host_function_in
from .._jaxprs.operands import restricted
from .._jaxprs.structure import Cond, equations, primal_program, ShardMap, structure
from .._jaxprs.versions import function_name
from .._tangent_spaces import is_differentiable
from ._compare import are_finite, as_double, norm, tolerance_of
from ._gradient_report import GradientFault, LeafVerdict
from ._judge_leaf import Judge
from ._loss_program import LossProgram
from ._mistakes import likely_cause
from ._oracle import lowest_precisions
from ._outcome import outcome
from ._without_rules import has_given_solver, is_rule, replaced


EXPLAIN_NAN = "`eqg.explain_nan` says where it becomes so."
_LOST = 30.0  # times what rounding explains is worth a remark
# For a smaller relative error, the text compares it with the error of the differences.
_SMALL = 1e-2


def fault_of_value(loss: Any, program: LossProgram) -> GradientFault | None:
    """The fault of a loss that has no differences, as it is not finite, or returns another
    value each time."""
    values = [program.value() for _ in range(3)]
    if not are_finite(values):
        detail = f"The loss itself is {values[0]}."
        return GradientFault(kind="not finite", detail=detail, cure=EXPLAIN_NAN)
    if max(values) - min(values) <= 1e-6 * max(map(abs, values)):
        return None
    origins = NumberedLoss(program.own).origins
    return GradientFault(
        **next((o.fields() for o in origins if "callback" in o.primitive), {}),
        kind="random",
        detail=f"Two calls return different values: {values[0]:.9g} and {values[1]:.9g}.",
        cure="A callback reads something that is not an argument: a random number of NumPy, "
        f"the time, or a counter. Pass it as an argument ({place_of(loss)}).",
    )


def faults_in_own_precision(
    program: LossProgram, gradient: Sequence[Any] | None, kept: set[int]
) -> tuple[dict[int, GradientFault], list[str]]:
    """The faults of leaves whose gradient is not finite, in float64 or in the user's precision,
    or is zero in half precision only, whatever the differences are; and remarks on leaves that
    lose much there."""
    if gradient is None:
        return {}, []
    value, own = program.own_gradient or (program.value(), gradient)
    lowest = program.lowest_of_user or np.dtype(float)
    rounding = lambda dtype: tolerance_of([np.zeros((), dtype or float)])
    in_rules = lowest_precisions(program.programs["gradient"])
    faults, lost = {}, []
    for i in sorted(kept):
        exact, of_user, cure = as_double(gradient[i]), as_double(own[i]), EXPLAIN_NAN
        size, is_finite = norm(exact), are_finite([exact])
        with np.errstate(invalid="ignore"):  # of a gradient of zero, relative to the loss
            error = norm(of_user - exact) / (size or abs(float(value)) or 1.0)
        if not are_finite([exact, of_user]):
            dtype, at = (lowest, float(value)) if is_finite else ("float64", program.value())
            what = "NaN" if np.any(np.isnan(of_user)) else "infinite"
            shown = "finite" if np.isfinite(at) else at
            kind = "not finite"
            text = f"In {dtype}, entries of the gradient are {what}, and the loss is {shown}."
        elif lowest.itemsize < 4 and np.any(exact) and not np.any(of_user):
            kind, text = "cut", f"In {lowest}, the gradient is zero; in float64, {size:.1g}."
            cure = "Multiply the loss by a large number, and divide the gradient by it. If an "
            cure += "operation counts many elements, compute in float32."
        elif rounding(in_rules[i]) > rounding(lowest) and error > rounding(lowest):
            kind, cure = "wrong", "Try `eqgt.check_rule`."
            text = f"A rule rounds to {in_rules[i]}, the loss to {lowest}: off by {error:.1g}."
        else:
            lost += [(error, program.names[i])] * (error > _LOST * rounding(lowest))
            continue
        leaf = program.names[i]
        faults[i] = GradientFault(
            leaf=leaf, path=_layer_of(leaf), kind=kind, detail=text, cure=cure
        )
    worst = [f"{name} ({error:.1g})" for error, name in sorted(lost, reverse=True)]
    text = f"In {lowest}, rounding changes the gradient. Its relative error"
    return faults, [f"{text}: {show_list(worst, 6)}."] * bool(lost)


def faults_of_leaves(
    judge: Judge,
    leaves: Sequence[LeafVerdict],
    wrong: Collection[int],
    with_steps: Callable[[], LossProgram],
) -> dict[int, GradientFault]:
    """- `with_steps`: traces the loss with the steps of `filter_scan` as equations."""
    kinds = {i: _kind(leaves[i]) for i in wrong}
    # Where reverse mode is right, the fault is in a forward rule.
    is_forward = lambda i: leaves[i].reverse is None or kinds[i] == "modes disagree"
    reverse = [i for i in kinds if not is_forward(i)]
    rules = RuleRemoval(with_steps()) if reverse else None
    wrong_with = lambda gradient: {i for i in reverse if judge.is_wrong(i, gradient)}
    by_leaf, right = rules.culprits(wrong_with) if rules else ({}, None)
    faults = {}
    for i, kind in kinds.items():
        leaf, reasons, details, tie = leaves[i], by_leaf.get(i, []), [], ""
        if kind in ("wrong", "cut") and not reasons and judge.is_right_nearby(i):
            tie = _tie(judge.program)
            details.append(f"right at points nearby, and not at this one{tie}")
        if right is not None and i in reverse:
            details.append(_detail(judge, i, right))
        if leaf.relative_error < _SMALL and not any(details):
            details.append(f"it is off by {leaf.relative_error:.0e} of its size")
        text = "; ".join(filter(None, details))
        of_rule: dict[str, Any] = reasons[0].fields() if reasons else {"path": ""}
        names = list(dict.fromkeys(o.primitive for o in reasons))
        of_rule["primitive"] = ", ".join(names)
        of_rule["path"] = of_rule["path"] or _layer_of(leaf.leaf)
        shown = ", ".join(f"`{name}`" for name in names)
        if kind == "not finite":
            cure = EXPLAIN_NAN
        elif is_forward(i):
            cure = "A forward rule in the loss is wrong: try `eqgt.check_rule`."
        elif names:
            cure = f"The gradient is right without the rule of {shown}: {_ON_PURPOSE}"
        elif tie:
            cure = _OF_A_TIE
        elif kind == "cut":
            cure = "`eqg.explain_zero` says where the gradient becomes zero."
        elif rules and rules.kept:
            known = rules.kept[0]
            cure = f"The rule of `{known.primitive}` at {known.source} {_OPAQUE}"
        else:
            cure = _UNKNOWN
        detail = f"{text[0].upper()}{text[1:]}." if text else ""
        faults[i] = GradientFault(
            **of_rule, leaf=leaf.leaf, kind=kind, detail=detail, cure=cure
        )
    return faults


_ON_PURPOSE = (
    "try `eqgt.check_rule`. If it is another gradient on purpose, `skip` the leaves before it."
)
_OF_A_TIE = (
    "At a tie, autodiff takes a half of each side, or the branch that is selected. Move the "
    "point a little, or write the function without the comparison."
)
_OPAQUE = (
    "can't be removed, as JAX can't differentiate what is beneath it: try `eqgt.check_rule`. "
    "The derivative of a solver is wrong if it solves another equation, or stops too early."
)
_UNKNOWN = (
    "No rule that can be removed explains it: check the layers one by one. A small error is "
    "usual for an iterative solver and low precision: then pass a larger `tolerance`."
)


def _layer_of(path: str) -> str:
    """The path of a leaf without the last field, and without what is in that field."""
    field = re.search(r"\.\w+(\[[^\[\]]*\])*$", path)
    return path[: field.start()] if field else ""


def _kind(leaf: LeafVerdict) -> str:
    have: Any = leaf.forward if leaf.reverse is None else leaf.reverse
    slope: Any = leaf.differences
    if not np.isfinite(have):
        return "not finite"
    if leaf.forward is not None and abs(have - slope) < 0.01 * abs(leaf.forward - slope):
        return "modes disagree"
    if have == 0:
        return "cut"
    return "not a derivative" if abs(slope) <= 10 * leaf.error else "wrong"


def _detail(judge: Judge, i: int, right: Sequence[Any]) -> str:
    """The likely mistake in the gradient of a leaf, beside the one without the wrong rules."""
    assert judge.gradient is not None
    want, have = map(np.asarray, (right[i], judge.gradient[i]))
    name = f"`{judge.program.names[i]}`"
    if not np.any(want):
        return f"the loss does not change with {name} near this point"
    return likely_cause(want, have, name, (), judge.leaves[i])


def _tie(program: LossProgram) -> str:
    """The first comparison of numbers that are equal at this point, or step that is at this
    point, outside of loops."""
    names = ("min", "max", "eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil")
    found: list[str] = []

    def compared(eqn, values):
        outs = bind(eqn, values)
        x, y, *_ = *values, *outs
        if outcome(lambda: bool(np.any(np.equal(x, y)))) is True:
            found.append(f": a tie of `{eqn.primitive.name}` at {source_line(eqn)}")
        return outs

    def is_compared(eqn):
        x, *others = eqn.invars
        return eqn.primitive.name in names and is_differentiable(x.aval) and x not in others

    replaced(program.own.program, program.own.values, is_compared, compared)
    return next(iter(found), "")


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
        mask = np.array([i in removed for i in range(len(self.suspects))], bool)
        gradient = jax.grad(self._loss)
        return self.program.call("without rules", gradient, self.program.leaves, more=mask)

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
        self, wrong_with: Callable[[Sequence[Any]], Set[int]]
    ) -> tuple[dict[int, list[Origin]], Sequence[Any] | None]:
        """For each wrong leaf the rules that make it wrong; and the gradient without all such
        rules, if there are any.

        - `wrong_with`: the leaves that are wrong with a gradient.
        """
        wrong = lambda removed: wrong_with(self.gradient(removed))
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
        return by_leaf, self.gradient(removed) if removed else None


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
