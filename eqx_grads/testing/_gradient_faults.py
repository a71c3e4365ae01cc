"""The faults of a gradient: what is wrong, because of which function, and what to do."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._diagnosis.origins import NumberedLoss, Origin
from .._diagnosis.source_lines import source_line, UNKNOWN
from .._errors import place_of
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.structure import Call, structure
from ._gradient_report import GradientFault, LeafVerdict
from ._judge_leaf import Judge
from ._loss_program import LossProgram
from ._mistakes import Compared, likely_cause, NO_INFLUENCE
from ._oracle import is_same_program
from ._remove_rules import RuleRemoval
from ._without_rules import has_given_solver


EXPLAIN_NAN = "`eqg.explain_nan` says where it becomes so."
# Of a smaller relative error the text says how it compares with that of the differences.
_SMALL = 1e-2


def fault_of_value(
    loss: Any, program: LossProgram, again: Callable[[], LossProgram]
) -> tuple[GradientFault | None, bool]:
    """The fault of a loss that is not finite or returns another value each time, and whether it
    has no differences for that reason.

    - `again`: traces the loss once more.
    """
    values = [program.value() for _ in range(3)]
    if not np.all(np.isfinite(values)):
        detail = f"The loss itself is {values[0]}."
        return GradientFault(kind="not finite", detail=detail, cure=EXPLAIN_NAN), True
    is_over, calls = not _same(values), []
    if is_over:
        calls = [o for o in NumberedLoss(program.own).origins if "callback" in o.primitive]
    else:
        other = again()
        if is_same_program(program.traced.program, other.traced.program, exactly=True):
            return None, False
        values = [values[0], other.value()]
        if _same(values):
            return None, False
    fault = GradientFault(
        **(calls[0].source if calls else UNKNOWN).fields(),
        kind="random",
        primitive=calls[0].primitive if calls else "",
        path=calls[0].path if calls else "",
        detail=f"Two calls return different values: {values[0]:.9g} and {values[1]:.9g}.",
        cure="The loss reads something that is not an argument: a random number of NumPy or "
        "Python, the time, or a counter, perhaps in a callback. Pass it as an argument, or use "
        f"`jax.random` with a key that is one ({place_of(loss)}).",
    )
    return fault, is_over


def _same(values: Sequence[float]) -> bool:
    size = max(map(abs, values))
    return not np.isfinite(size) or max(values) - min(values) <= 1e-6 * size


class _Search(NamedTuple):
    """- `by_leaf`: the rules that make a leaf wrong.
    - `reference`: the gradient without them.
    - `kept`: the rules that can't be removed.
    """

    by_leaf: dict[int, list[Origin]]
    reference: Sequence[Any] | None
    kept: Sequence[Origin]


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
    if finite:
        # Where reverse mode is right, the fault is in a forward rule.
        reverse = [i for i in finite if leaves[i].reverse is not None]
        reverse = [i for i in reverse if kinds[i] != "modes disagree"]
        removal = RuleRemoval(with_steps(), "reverse" if reverse else "forward")

        def wrong_without(removed):
            slope = lambda tangents: removal.slope(removed, tangents)
            return {i for i in reverse or finite if judge.is_wrong(i, slope)}

        by_leaf, removed = removal.culprits(wrong_without)
        reference = removal.gradient(removed) if reverse and removed else None
        kept = removal.kept
    search = _Search(by_leaf, reference, kept)
    return {i: _fault(judge, leaves[i], kinds, i, search) for i in wrong}


def _fault(judge, leaf: LeafVerdict, kinds: dict[int, str], i: int, search: _Search):
    kind, reasons = kinds[i], search.by_leaf.get(i, [])
    is_small = leaf.relative_error < _SMALL
    cure = _cure(kind, reasons, search.kept, is_small)
    parts = []
    if kind != "not finite" and leaf.reverse is not None and leaf.forward is not None:
        gaps = [abs(d - (leaf.differences or 0.0)) for d in (leaf.forward, leaf.reverse)]
        if gaps[0] <= 0.01 * gaps[1]:
            parts.append("forward mode agrees with the differences")
    if is_small:
        parts.append(f"it is off by {leaf.relative_error:.0e} of its size")
    if kind == "wrong" and not reasons and judge.is_right_nearby(i):
        parts.append("right at points nearby, and not at this one")
        if tie := _tie(judge.program):
            parts[-1] += f": {tie}"
            cure = _AT_A_TIE
    if search.reference is not None:
        others = [j for j in kinds if j != i and kinds[j] != "not finite"]
        parts.append(_likely_cause(judge, search.reference, leaf.leaf, i, others))
    text = "; ".join(filter(None, parts))
    source = reasons[0].source if reasons else UNKNOWN
    return GradientFault(
        **source.fields(),
        leaf=leaf.leaf,
        kind=kind,
        primitive=", ".join(dict.fromkeys(o.primitive for o in reasons)),
        path=(reasons[0].path if reasons else "") or layer_of_leaf(leaf.leaf, judge.program),
        detail=f"{text[0].upper()}{text[1:]}." if text else "",
        cure=cure,
    )


_AT_A_TIE = (
    "Autodiff takes a half of each side at a tie. Move the point a little, or write the "
    "function without the comparison."
)


def layer_of_leaf(path: str, program: LossProgram) -> str:
    """The innermost layer that a leaf belongs to."""
    layers = program.traced.layers
    around = [layer for layer in layers if path.startswith((layer + ".", layer + "["))]
    return max(around, key=len, default="")


def _likely_cause(judge, reference, name: str, i: int, others: Sequence[int]) -> str:
    compare = lambda j: Compared(np.asarray(reference[j]), np.asarray(judge.gradient[j]))
    want, have = compare(i)
    compared = list(map(compare, others))
    likely = likely_cause(want, have, f"`{name}`", (), judge.leaves[i], others=compared)
    if NO_INFLUENCE in likely:
        return f"the loss does not change with `{name}` near this point"
    return likely


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


def _cure(kind: str, reasons: Sequence[Origin], kept: Sequence[Origin], is_small: bool) -> str:
    names = ", ".join(dict.fromkeys(f"`{o.primitive}`" for o in reasons))
    if kind == "not finite":
        return EXPLAIN_NAN
    if names and kind == "modes disagree":
        return f"Without the rule of {names} forward mode is right, as reverse mode is."
    if names:
        text = f"The gradient is right without the rule of {names}: try `eqgt.check_rule`."
        if kind != "cut":
            text += " If it is another gradient on purpose, `skip` the leaves before it."
        return text
    if kind == "cut":
        return "`eqg.explain_zero` says where the gradient becomes zero."
    if kept and has_given_solver(kept[0].eqn):
        return (
            f"The derivative of the solver at {kept[0].source} is that of its equation. It is "
            "wrong if it solves another one, or stops too early: try `eqgt.check_rule`."
        )
    if kept:
        return (
            f"JAX can't differentiate what is beneath the rule of `{kept[0].primitive}` at "
            f"{kept[0].source}, so this rule can't be removed: try `eqgt.check_rule`."
        )
    if kind == "modes disagree":
        return "Reverse mode is right, forward mode is not."
    if is_small:
        return (
            "No rule explains it. An error as small as this is usual for an iterative solver "
            "and for low precision: make these tighter, or pass a larger `tolerance`."
        )
    return "No rule that can be removed explains it. Check the layers one by one."
