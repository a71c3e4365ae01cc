"""The faults of a gradient: what is wrong, because of which function, and what to do."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._diagnosis.origins import NumberedLoss, Origin
from .._diagnosis.source_lines import source_line, UNKNOWN
from .._errors import place_of
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.host_calls import host_function_in
from .._jaxprs.structure import Call, structure
from ._gradient_report import GradientFault, LeafVerdict, WRONG
from ._judge_leaf import Judge
from ._loss_program import along, LossProgram
from ._mistakes import Compared, likely_cause, NO_INFLUENCE
from ._oracle import is_same_program
from ._remove_rules import RuleRemoval, Suspect


ALL = "all leaves"
# Of a smaller relative error the text says how it compares with that of the differences.
_SMALL = 1e-2


def faults_of_value(
    loss, program: LossProgram, again: Callable[[], LossProgram]
) -> tuple[list[GradientFault], bool]:
    """Faults of a loss that is not finite or returns another value each time, and whether it
    has no differences for that reason.

    - `again`: traces the loss once more.
    """
    values = [program.value() for _ in range(3)]
    if not np.all(np.isfinite(values)):
        fault = GradientFault(
            kind="not finite",
            detail=f"The loss itself is {values[0]}.",
            cure="`eqg.explain_nan` says where it becomes so.",
        )
        return [fault], True
    if not _same(values):
        calls = [o for o in NumberedLoss(program.own).origins if "callback" in o.primitive]
        first = calls[0] if calls else None
        fault = GradientFault(
            **(first.source if first else UNKNOWN).fields(),
            kind="random",
            primitive=first.primitive if first else "",
            path=first.path if first else "",
            detail="The same program returns another value each time: "
            f"{', '.join(f'{v:.9g}' for v in values)}.",
            cure="Use `jax.random` with a key that is an argument. A host function that is "
            "called by a callback has to return the same for the same arguments.",
        )
        return [fault], True
    other = again()
    values = [values[0]]
    if not is_same_program(program.traced.program, other.traced.program, exactly=True):
        values.append(other.value())
    if _same(values):
        return [], False
    fault = GradientFault(
        kind="random",
        detail=f"Two calls return different values: {values[0]:.9g} and {values[1]:.9g}. The "
        "gradient was checked for the values of one of them.",
        cure="The loss reads something that is not an argument: a NumPy or Python random "
        f"number, the time, or a counter. Pass it as an argument ({place_of(loss)}).",
    )
    return [fault], False


def _same(values: Sequence[float]) -> bool:
    size = max(map(abs, values))
    return not np.isfinite(size) or max(values) - min(values) <= 1e-6 * size


def faults_of_leaves(
    judge: Judge,
    leaves: Sequence[LeafVerdict],
    together: Sequence[LeafVerdict],
    with_steps: Callable[[], LossProgram],
) -> list[GradientFault]:
    """- `together`: the verdicts along directions that perturb all leaves.
    - `with_steps`: traces the loss with the steps of `filter_scan` as equations."""
    wrong = [i for i, leaf in enumerate(leaves) if leaf.verdict == WRONG]
    if not wrong:
        cure = "Each leaf alone is right. Try other seeds: `seed=1`."
        return [
            GradientFault(leaf=ALL, kind=_kind(v), detail=_in_numbers(v), cure=cure)
            for v in [v for v in together if v.verdict == WRONG][:1]
        ]
    finite = [i for i in wrong if _kind(leaves[i]) != "not finite"]
    reasons = NO_REASONS
    if finite:
        # Where reverse mode is right, the fault is in a forward rule.
        is_reverse = any(leaves[i].reverse is not None for i in finite)
        in_reverse = [i for i in finite if is_reverse and _kind(leaves[i]) != "modes disagree"]
        mode = "reverse" if in_reverse else "forward"
        reasons = _reasons(with_steps(), judge, in_reverse or finite, mode)
    return [_fault(judge, leaves[i], i, reasons, [j for j in finite if j != i]) for i in wrong]


class _Reasons(NamedTuple):
    """- `by_leaf`: the rules that make a leaf wrong.
    - `reference`: the gradient without them.
    - `is_scan`: whether the gradient is right as soon as the steps of `filter_scan` are
        differentiated one by one.
    - `opaque`: what JAX can't differentiate, whatever is removed.
    - `around`: the rules in which that is.
    - `solvers`: the equations with a solver of the user's.
    """

    by_leaf: dict[int, list[Suspect]]
    reference: Sequence[Any] | None
    is_scan: bool
    opaque: Sequence[Origin]
    around: Sequence[Suspect]
    solvers: Sequence[Origin]


NO_REASONS = _Reasons({}, None, False, [], [], [])


def _reasons(program: LossProgram, judge: Judge, leaves: Sequence[int], mode: str) -> _Reasons:
    removal = RuleRemoval(program)

    def wrong(removed):
        if mode == "reverse":
            gradient = removal.gradient(removed)
            found = lambda tangents: along(gradient, tangents)
        else:
            found = lambda tangents: removal.tangent(removed, tangents)
        directions = {i: judge.measured[i][0].tangents for i in leaves}
        return {i for i in leaves if judge.is_wrong(i, found(directions[i]))}

    is_scan = not wrong(set())
    by_leaf, removed = ({}, set()) if is_scan else removal.culprits(wrong)
    is_known = mode == "reverse" and (is_scan or removed)
    reference = removal.gradient(removed) if is_known else None
    inside = {number for o in removal.opaque for number in o.enclosing}
    around = [suspect for suspect in removal.suspects if suspect.origin.number in inside]
    return _Reasons(by_leaf, reference, is_scan, removal.opaque, around, removal.solvers)


def _fault(judge, leaf, i, known: _Reasons, others: Sequence[int]) -> GradientFault:
    kind, reasons = _kind(leaf), known.by_leaf.get(i, [])
    first = reasons[0] if reasons else None
    parts = []
    if leaf.reverse is not None and leaf.forward is not None and _agrees(leaf, leaf.forward):
        parts.append("forward mode agrees with the differences")
    if leaf.relative_error < _SMALL:
        parts.append(_how_small(leaf))
    tie = ""
    is_unknown = not reasons and not known.is_scan and kind == "wrong"
    if is_unknown and judge.is_right_nearby(judge.measured[i][0]):
        tie = _tie(judge.program)
        parts.append(
            "right at points nearby, and not at this one" + (f": {tie}" if tie else "")
        )
    is_infinite = judge.gradient is not None and bool(np.any(np.isinf(judge.gradient[i])))
    if kind == "not finite" and is_infinite:
        parts.append("entries of the gradient are infinite")
    if known.reference is not None and judge.gradient is not None:
        reference, gradient = known.reference, judge.gradient
        compare = lambda j: Compared(np.asarray(reference[j]), np.asarray(gradient[j]))
        want, have, _ = compare(i)
        compared = list(map(compare, others))
        likely = likely_cause(
            want, have, f"`{leaf.leaf}`", (), judge.leaves[i], others=compared
        )
        if NO_INFLUENCE in likely:
            likely = f"the loss does not change with `{leaf.leaf}` near this point"
        parts += [likely] if likely else []
    return GradientFault(
        **(first.place if first else UNKNOWN).fields(),
        leaf=leaf.leaf,
        kind=kind,
        primitive=", ".join(dict.fromkeys(s.name for s in reasons)),
        path=(first.layer if first else "")
        or _layer_of_leaf(leaf.leaf, judge.program.traced.layers),
        detail=f"{parts[0][0].upper()}{'; '.join(parts)[1:]}." if parts else "",
        cure=_AT_A_TIE if tie else _cure(kind, reasons, known, leaf.relative_error < _SMALL),
    )


_AT_A_TIE = (
    "Autodiff takes a half of each side at a tie. Move the point a little, or write the "
    "function without the comparison."
)


def _tie(program: LossProgram) -> str:
    """The first comparison of numbers that are equal at this point."""
    found: list[str] = []

    def hook(eqn, values):
        name = eqn.primitive.name
        if name in ("max", "min") and np.any(np.equal(*map(np.asarray, values))):
            found.append(f"a tie of `{name}` at {source_line(eqn)}")
        if isinstance(structure(eqn), Call):
            return enter(eqn, values, lambda p, xs, _: evaluate(p, xs, hook))
        return bind(eqn, values)

    values = program.own.values
    evaluate(program.own.program, list(values), hook)
    return found[0] if found else ""


def _how_small(leaf: LeafVerdict) -> str:
    """An error that the columns of the table hardly show, and why it is one."""
    text = f"it is off by {leaf.relative_error:.0e} of its size"
    have = [d for d in (leaf.reverse, leaf.forward) if d is not None]
    gap = max(abs(d - (leaf.differences or 0.0)) for d in have)
    if leaf.error > 0:
        text += f", {gap / leaf.error:.0e} times the error of the differences"
    return text


def _agrees(leaf: LeafVerdict, derivative: float) -> bool:
    """Whether a derivative is much nearer to the differences than the wrong one."""
    wrong = derivative if leaf.reverse is None else leaf.reverse
    gap = abs(derivative - (leaf.differences or 0.0))
    return gap <= 0.01 * abs(wrong - (leaf.differences or 0.0))


def _in_numbers(leaf: LeafVerdict) -> str:
    modes = [("reverse", leaf.reverse), ("forward", leaf.forward)]
    have = [f"{mode} mode gives {d:.6g}" for mode, d in modes if d is not None]
    return (
        f"Along a direction {' and '.join(have)}, differences give {leaf.differences:.6g} "
        f"(+- {leaf.error:.1g})."
    )


def _kind(leaf: LeafVerdict) -> str:
    have = leaf.forward if leaf.reverse is None else leaf.reverse
    if have is None or leaf.differences is None or not np.isfinite(have):
        return "not finite"
    if leaf.reverse is not None and leaf.forward is not None:
        gap = abs(leaf.forward - leaf.differences)
        if not abs(leaf.reverse - leaf.differences) > 0.01 * gap:
            return "modes disagree"
    if have == 0:
        return "cut"
    if abs(leaf.differences) <= 10 * leaf.error or leaf.differences == 0:
        return "not a derivative"
    return "wrong"


def _cure(kind: str, reasons: Sequence[Suspect], known: _Reasons, is_small: bool) -> str:
    if kind == "not finite":
        return "`eqg.explain_nan` says where it becomes so."
    if known.is_scan:
        return "The steps are right: the gradient of a `filter_scan` is at fault."
    if not reasons:
        if kind == "wrong" and known.solvers:
            first = known.solvers[0]
            return (
                f"The derivative of the solver at {first.source} is that of the equation that "
                "it is given, and is wrong if it solves another one, or stops too early. Apply "
                "`eqgt.check_rule` to it."
            )
        if known.opaque:
            first = known.opaque[0]
            host = host_function_in(first.eqn)
            what = f"the host function `{host}`" if host else f"`{first.primitive}`"
            text = f"JAX can't differentiate {what} at {first.source}"
            if known.around:
                names = ", ".join(dict.fromkeys(f"`{s.name}`" for s in known.around))
                return f"{text}, so the rule of {names} can't be removed. Check it first."
            return f"{text}. The differences contain its derivative, and the gradient does not."
        if kind == "cut":
            return "`eqg.explain_zero` says where the gradient becomes zero."
        if kind == "modes disagree":
            return "Reverse mode is right, forward mode is not."
        if is_small:
            return (
                "No rule explains it. An error as small as this is usual for a solver that "
                "iterates to a tolerance, and for what computes in less precision: make these "
                "tighter, or pass a larger `tolerance`."
            )
        return "No rule that can be removed explains it. Check the layers one by one."
    names = ", ".join(dict.fromkeys(f"`{s.name}`" for s in reasons))
    if kind == "modes disagree":
        return f"Without the rule of {names} forward mode is right, as reverse mode is."
    text = f"The gradient is right without the rule of {names}, which `eqgt.check_rule` checks."
    if kind in ("not a derivative", "wrong"):
        text += " If the rule is another gradient on purpose, `skip` the leaves before it."
    return text


def _layer_of_leaf(path: str, layers: Sequence[str]) -> str:
    """The innermost layer that a leaf belongs to."""
    around = [layer for layer in layers if path.startswith((layer + ".", layer + "["))]
    return max(around, key=len, default="")
