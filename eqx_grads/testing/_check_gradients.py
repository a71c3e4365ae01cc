"""`check_gradients`: the gradient of a whole model against finite differences."""

import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._diagnosis.origins import NumberedLoss
from .._errors import name_of, place_of, rule_error
from .._jaxprs.structure import equations
from ._compare import as_real, norm, tolerance_of
from ._gradient_report import (
    GradientFault,
    GradientReport,
    LeafVerdict,
    RIGHT,
    SKIPPED,
    UNMEASURED,
    WRONG,
)
from ._judge_leaf import Judge
from ._likely_cause import likely_cause
from ._loss_program import along, LossProgram, trace_in_both_precisions
from ._remove_rules import RuleRemoval, Suspect


_CALLER = "check_gradients"
# Directions that perturb all leaves together.
_N_TOGETHER = 3
_ALL = "all leaves"


def check_gradients(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    skip: Collection[str] = (),
    tolerance: float | None = None,
    seed: int = 0,
    raises: bool = True,
    **kwargs: Any,
) -> GradientReport:
    program, own, remarks = _programs(loss, model, args, kwargs)
    skipped = _skipped(skip, program.names)
    modes, missing = _modes(program)
    remarks += missing
    found, is_random = _random(loss, model, args, kwargs, own)
    numbers: dict[str, object] = {"seed": seed, "precision": str(program.lowest or "float64")}
    if is_random:
        leaves = [LeafVerdict(path, UNMEASURED) for path in program.names]
        return _finish(GradientReport(name_of(loss), leaves, found, numbers, remarks), raises)
    admitted, remark = _tolerance(program, modes, seed) if tolerance is None else (tolerance, "")
    judge = Judge(program, admitted, modes, seed)
    leaves, together = _judge_all(judge, skipped)
    found += _faults(loss, model, args, kwargs, judge, leaves, together)
    remarks += [remark, _precision_lost(own, judge, skipped)]
    numbers["evaluations"] = judge.evaluations
    numbers["tolerance"] = admitted
    report = GradientReport(name_of(loss), leaves, found, numbers, list(filter(None, remarks)))
    return _finish(report, raises)


def _finish(report: GradientReport, raises: bool) -> GradientReport:
    if raises:
        report.raise_if_failed()
    return report


def _programs(loss, model, args, kwargs) -> tuple[LossProgram, LossProgram, list[str]]:
    """The program to differentiate, that in the user's precision, and remarks."""
    own, wide, why = trace_in_both_precisions(
        _CALLER, loss, model, args, kwargs, steps_are_visible=False
    )
    program = wide or own
    remarks = []
    if wide is None:
        remarks.append(
            f"The loss can't be traced in float64 ({why}). Its gradient is in "
            f"{own.lowest}; the differences are those of its program in float64."
        )
    elif wide.lowest is not None:
        remarks.append(
            f"The loss computes in {wide.lowest} even for a model in float64. The differences "
            "are those of its program in float64."
        )
    return program, own, remarks


def _skipped(skip: Collection[str], names: Sequence[str]) -> set[int]:
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)
    skipped: set[int] = set()
    for pattern in patterns:
        hits = {i for i, name in enumerate(names) if _matches(name, pattern)}
        if not hits:
            raise rule_error(
                f"`skip` names a leaf that the model does not have: `{pattern}`.",
                f"its leaves are {', '.join(names[:20])}",
                do="Name leaves by their paths, layers by the start of a path, or several with "
                "`*`.",
            )
        skipped |= hits
    if len(skipped) == len(names):
        raise rule_error(
            "`check_gradients` was asked to skip all leaves.",
            f"they are {', '.join(names[:20])}",
            do="Leave some of them out of `skip`.",
        )
    return skipped


def _matches(name: str, pattern: str) -> bool:
    if name == pattern or fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")):
        return True
    return name.startswith(pattern) and name[len(pattern)] in ".["


def _modes(program: LossProgram) -> tuple[list[str], list[str]]:
    """The modes in which the loss can be differentiated, and remarks on those in which not."""
    zeros = [np.zeros_like(x) for x in program.leaves]
    modes, remarks = [], []
    for mode, text, run in (
        ("reverse", "everse-mode", program.gradient),
        ("forward", "forward-mode", lambda: program.tangent(program.leaves, zeros)),
    ):
        error = program.mode_error(run, text)
        if error is None:
            modes.append(mode)
        else:
            remarks.append(f"There is no {mode} mode: {error}")
    if not modes:
        raise rule_error(
            "`check_gradients` was given a loss without derivatives.",
            *remarks,
            do="See `eqx_grads.custom_vjp` for a rule, and `eqx_grads.filter_scan` for a loop.",
        )
    return modes, remarks


# ---------------------------------------------------------------- randomness


def _random(loss, model, args, kwargs, own: LossProgram) -> tuple[list[GradientFault], bool]:
    """Faults of a loss that returns another value each time, and whether one compiled program
    does, which has no differences then."""
    values = [own.value() for _ in range(3)]
    if not _same(values):
        calls = [o for o in NumberedLoss(own.traced).origins if "callback" in o.primitive]
        first = calls[0] if calls else None
        fault = GradientFault(
            "",
            "random",
            layer=first.path if first else "",
            file=first.source.file if first else "",
            line=first.source.line if first else 0,
            primitive=first.primitive if first else "",
            text="The same program returns another value each time: "
            f"{', '.join(f'{v:.9g}' for v in values)}.",
            cure="Use `jax.random` with a key that is an argument. A host function that is "
            "called by a callback has to return the same for the same arguments.",
        )
        return [fault], True
    again, _, _ = trace_in_both_precisions(
        _CALLER, loss, model, args, kwargs, steps_are_visible=False, only_own=True
    )
    value = again.value()
    if _same([values[0], value]):
        return [], False
    fault = GradientFault(
        "",
        "random",
        text=f"Two calls return different values: {values[0]:.9g} and {value:.9g}. The "
        "gradient was checked for the values of one of them.",
        cure="The loss reads something that is not an argument: a NumPy or Python random "
        f"number, the time, or a counter. Pass it as an argument ({place_of(loss)}).",
    )
    return [fault], False


def _same(values: Sequence[float]) -> bool:
    size = max(map(abs, values))
    return not np.isfinite(size) or max(values) - min(values) <= 1e-6 * size


# ---------------------------------------------------------------- precision


def _tolerance(program: LossProgram, modes: Sequence[str], seed: int) -> tuple[float, str]:
    """The relative error that rounding explains. In less than float64 it is estimated: by how
    much the gradient changes when the model changes by what rounding does."""
    if program.lowest is None:
        return 1e-6, ""
    least = tolerance_of([np.zeros((), program.lowest)])
    if "reverse" not in modes:
        return least, ""
    rng = np.random.default_rng(seed)
    eps = float(jnp.finfo(program.lowest).eps)
    exact = program.gradient()
    worst = 0.0
    for _ in range(2):
        moved = [
            as_real_or_complex(x) * (1 + eps * rng.uniform(-1, 1, x.shape))
            for x in program.leaves
        ]
        for g, other in zip(exact, program.gradient(moved), strict=True):
            size = norm(as_real(g))
            if size > 0 and np.isfinite(size):
                worst = max(worst, norm(as_real(other) - as_real(g)) / size)
    admitted = max(least, min(10 * worst, 0.3))
    return admitted, f"Errors below {admitted:.1g} are explained by {program.lowest}."


def as_real_or_complex(x):
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _precision_lost(own: LossProgram, judge: Judge, skipped: set[int]) -> str:
    """A remark on the leaves whose gradient is right in float64, and not in the user's
    precision."""
    names = {eqn.primitive.name for eqn in equations(own.traced.program)}
    if judge.gradient is None or own.lowest is None or own is judge.program:
        return ""
    if any("random" in name or "threefry" in name for name in names):
        return ""  # it draws other numbers in another precision
    off = []
    admitted = 30 * tolerance_of([np.zeros((), own.lowest)])
    for i, (g, exact) in enumerate(zip(own.gradient(), judge.gradient, strict=True)):
        g, exact = as_real(g), as_real(exact)
        size = norm(exact)
        if i in skipped or size == 0 or not np.all(np.isfinite(exact)):
            continue
        error = norm(g - exact) / size
        if not error <= admitted:
            off.append((error, own.names[i]))
    if not off:
        return ""
    off.sort(reverse=True)
    shown = ", ".join(f"{name} ({error:.1g})" for error, name in off[:6])
    return f"In {own.lowest}, rounding changes the gradient. Its relative error: {shown}."


# ---------------------------------------------------------------- verdicts


def _judge_all(judge: Judge, skipped: set[int]) -> tuple[list[LeafVerdict], list[LeafVerdict]]:
    """The verdict of each leaf, and those of directions that perturb all leaves."""
    names = judge.program.names
    kept = [i for i in range(len(names)) if i not in skipped and judge.leaves[i].size]
    together = [judge.judge(judge.direction(_ALL, kept)) for _ in range(_N_TOGETHER)]
    leaves = []
    for i, name in enumerate(names):
        if i in skipped:
            leaves.append(LeafVerdict(name, SKIPPED))
        elif i not in kept:
            leaves.append(LeafVerdict(name, RIGHT))  # without entries
        else:
            leaves.append(judge.judge(judge.direction(name, [i])))
    return leaves, together


def _faults(loss, model, args, kwargs, judge, leaves, together) -> list[GradientFault]:
    wrong = [i for i, leaf in enumerate(leaves) if leaf.verdict == WRONG]
    if not wrong:
        for verdict in together:
            if verdict.verdict == WRONG:
                text = f"Along a direction of all leaves, {_in_numbers(verdict)}."
                cure = "Each leaf alone is right. Try other seeds: `seed=1`."
                return [GradientFault(_ALL, _kind(verdict), text=text, cure=cure)]
        return []
    finite = [i for i in wrong if _kind(leaves[i]) != "not finite"]
    reasons = _Reasons({}, None, False)
    if finite:
        # Where reverse mode is right, the fault is in a forward rule.
        is_reverse = any(leaves[i].reverse is not None for i in finite)
        in_reverse = [i for i in finite if is_reverse and _kind(leaves[i]) != "modes disagree"]
        mode = "reverse" if in_reverse else "forward"
        reasons = _reasons(loss, model, args, kwargs, judge, in_reverse or finite, mode)
    return [_fault(judge, leaves[i], i, reasons) for i in wrong]


class _Reasons(NamedTuple):
    """- `by_leaf`: the rules that make a leaf wrong.
    - `reference`: the gradient without them.
    - `is_scan`: whether the gradient is right as soon as the steps of `filter_scan` are
        differentiated one by one.
    """

    by_leaf: dict[int, list[Suspect]]
    reference: Sequence[Any] | None
    is_scan: bool


def _reasons(loss, model, args, kwargs, judge, leaves, mode) -> _Reasons:
    own, wide, _ = trace_in_both_precisions(_CALLER, loss, model, args, kwargs)
    removal = RuleRemoval(wide if judge.program.context is not own.context else own)

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
    return _Reasons(by_leaf, removal.gradient(removed) if is_known else None, is_scan)


def _fault(judge, leaf, i, known: _Reasons) -> GradientFault:
    kind, reasons = _kind(leaf), known.by_leaf.get(i, [])
    first = reasons[0] if reasons else None
    layer = first.layer if first else ""
    text = f"{leaf.path}: {_in_numbers(leaf)}"
    if known.reference is not None and judge.gradient is not None:
        want, have = np.asarray(known.reference[i]), np.asarray(judge.gradient[i])
        likely = likely_cause(want, have, f"`{leaf.path}`", (), judge.leaves[i])
        text += f"; {likely}" if likely else ""
    return GradientFault(
        leaf.path,
        kind,
        layer or _layer_of_leaf(leaf.path, judge.program.traced.layers),
        function=", ".join(dict.fromkeys(s.name for s in reasons)),
        file=first.origin.source.file if first else "",
        line=first.origin.source.line if first else 0,
        primitive=first.origin.eqn.primitive.name if first else "",
        text=text + ".",
        cure=_cure(kind, reasons, known.is_scan),
    )


def _in_numbers(leaf: LeafVerdict) -> str:
    have = leaf.forward if leaf.reverse is None else leaf.reverse
    return (
        f"the gradient gives {have:.6g} along a direction, differences {leaf.differences:.6g} "
        f"(+- {leaf.error:.1g})"
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


def _cure(kind: str, reasons: Sequence[Suspect], is_scan: bool) -> str:
    if kind == "not finite":
        return "`eqx_grads.explain_nan` says where it becomes so."
    if is_scan:
        return "The steps are right: the gradient of a `filter_scan` is at fault."
    if not reasons:
        if kind == "cut":
            return "`eqx_grads.explain_zero` says where the gradient becomes zero."
        if kind == "modes disagree":
            return "Reverse mode is right, forward mode is not."
        return "No rule explains it. Check the layers one by one."
    stops = [s for s in reasons if s.is_stop]
    if stops:
        where = ", ".join(dict.fromkeys(str(s.origin.source) for s in stops))
        return f"Without the `stop_gradient` in {where} the gradient is right."
    names = ", ".join(dict.fromkeys(f"`{s.name}`" for s in reasons))
    if kind == "modes disagree":
        return f"Without the rule of {names} forward mode is right, as reverse mode is."
    text = f"Without the rule of {names} the gradient is right: `check_rule` says what is wrong."
    if kind == "not a derivative":
        text += " If the rule is another gradient on purpose, `skip` the leaves before it."
    return text


def _layer_of_leaf(path: str, layers: Sequence[str]) -> str:
    """The innermost layer that a leaf belongs to."""
    around = [layer for layer in layers if path.startswith((layer + ".", layer + "["))]
    return max(around, key=len, default="")
