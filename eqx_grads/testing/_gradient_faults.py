"""The faults of a gradient: what is wrong, which function causes it, and what to do."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from .._diagnosis.origins import NumberedLoss, Origin
from .._diagnosis.source_lines import source_line, UNKNOWN
from .._errors import place_of
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.structure import Call, structure
from ._gradient_report import GradientFault, LeafVerdict
from ._judge_leaf import Judge
from ._loss_program import along, LossProgram
from ._mistakes import Compared, likely_cause
from ._remove_rules import RuleRemoval


EXPLAIN_NAN = "`eqg.explain_nan` says where it becomes so."
# For a smaller relative error, the text compares it with the error of the differences.
_SMALL = 1e-2


def fault_of_value(loss: Any, program: LossProgram) -> GradientFault | None:
    """The fault of a loss that has no differences, as it is not finite, or returns another
    value each time."""
    values = [program.value() for _ in range(3)]
    if not np.all(np.isfinite(values)):
        detail = f"The loss itself is {values[0]}."
        return GradientFault(kind="not finite", detail=detail, cure=EXPLAIN_NAN)
    if max(values) - min(values) <= 1e-6 * max(map(abs, values)):
        return None
    origins = NumberedLoss(program.own).origins
    call = next((o for o in origins if "callback" in o.primitive), None)
    return GradientFault(
        **(UNKNOWN if call is None else call.source).fields(),
        kind="random",
        primitive="" if call is None else call.primitive,
        path="" if call is None else call.path,
        detail=f"Two calls return different values: {values[0]:.9g} and {values[1]:.9g}.",
        cure="A callback reads something that is not an argument: a random number of NumPy, "
        f"the time, or a counter. Pass it as an argument ({place_of(loss)}).",
    )


def faults_of_leaves(
    judge: Judge,
    leaves: Sequence[LeafVerdict],
    wrong: Collection[int],
    with_steps: Callable[[], LossProgram],
) -> dict[int, GradientFault]:
    """- `with_steps`: traces the loss with the steps of `filter_scan` as equations."""
    kinds = {i: _kind(leaves[i]) for i in wrong}
    finite = [i for i in wrong if kinds[i] != "not finite"]
    by_leaf, reference, kept = {}, None, []
    # Where reverse mode is right, the fault is in a forward rule.
    reverse = [i for i in finite if leaves[i].reverse is not None]
    reverse = [i for i in reverse if kinds[i] != "modes disagree"]
    if reverse:
        removal = RuleRemoval(with_steps())

        def wrong_without(removed):
            slope = lambda tangents: along(removal.gradient(removed), tangents)
            return {i for i in reverse if judge.is_wrong(i, slope)}

        by_leaf, removed = removal.culprits(wrong_without)
        reference = removal.gradient(removed) if removed else None
        kept = removal.kept

    def fault(i: int) -> GradientFault:
        leaf, kind, reasons = leaves[i], kinds[i], by_leaf.get(i, [])
        source, path = UNKNOWN, layer_of_leaf(leaf.leaf, judge.program)
        if reasons:
            source, path = reasons[0].source, reasons[0].path or path
        names = list(dict.fromkeys(o.primitive for o in reasons))
        is_forward = kind == "modes disagree" or leaf.reverse is None
        details, cure = [], _cure(kind, is_forward, names, kept)
        if leaf.relative_error < _SMALL:
            details.append(f"it is off by {leaf.relative_error:.0e} of its size")
        if kind == "wrong" and not reasons and judge.is_right_nearby(i):
            details.append("right at points nearby, and not at this one")
            if tie := _tie(judge.program):
                details[-1] += f": {tie}"
                cure = _AT_A_TIE
        if reference is not None:
            both = list(zip(map(np.asarray, reference), judge.gradient or (), strict=True))
            others = [Compared(*both[j]) for j in finite if j != i]
            details.append(
                likely_cause(*both[i], f"`{leaf.leaf}`", (), judge.leaves[i], others)
                if np.any(both[i][0])
                else f"the loss does not change with `{leaf.leaf}` near this point"
            )
        text = "; ".join(filter(None, details))
        text = f"{text[0].upper()}{text[1:]}." if text else ""
        return GradientFault(
            **source.fields(),
            leaf=leaf.leaf,
            kind=kind,
            primitive=", ".join(names),
            path=path,
            detail=text,
            cure=cure,
        )

    return {i: fault(i) for i in wrong}


_AT_A_TIE = (
    "Autodiff takes a half of each side at a tie. Move the point a little, or write the "
    "function without the comparison."
)


def layer_of_leaf(path: str, program: LossProgram) -> str:
    """The innermost layer that a leaf belongs to."""
    layers = program.traced.layers
    around = [layer for layer in layers if path.startswith((layer + ".", layer + "["))]
    return max(around, key=len, default="")


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

    evaluate(program.own.program, list(program.own.values), hook)
    return found[0] if found else ""


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


def _cure(kind: str, is_forward: bool, names: Sequence[str], kept: Sequence[Origin]) -> str:
    if kind == "not finite":
        return EXPLAIN_NAN
    if is_forward:
        return "A forward rule in the loss is wrong: try `eqgt.check_rule`."
    if names:
        shown = ", ".join(f"`{name}`" for name in names)
        text = f"The gradient is right without the rule of {shown}: try `eqgt.check_rule`."
        return text + " If it is another gradient on purpose, `skip` the leaves before it."
    if kind == "cut":
        return "`eqg.explain_zero` says where the gradient becomes zero."
    if kept:
        return (
            f"The rule of `{kept[0].primitive}` at {kept[0].source} can't be removed, as JAX "
            "can't differentiate what is beneath it: try `eqgt.check_rule`. The derivative of "
            "a solver is wrong if it solves another equation, or stops too early."
        )
    return (
        "No rule that can be removed explains it: check the layers one by one. A small error "
        "is usual for an iterative solver and low precision: then pass a larger `tolerance`."
    )
