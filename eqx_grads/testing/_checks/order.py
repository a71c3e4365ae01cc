"""The check `order`: higher derivatives, in every order of the modes."""

from collections.abc import Iterator

import numpy as np

from .._case import Case
from .._compare import as_real, difference, pairing
from .._findings import broke, compare, NO_REVERSE, skipped
from .._finite_differences import directional
from .._precision import Precision
from .._report import FAILED, Finding


_KINDS = ("forward over reverse", "reverse over reverse", "reverse over forward")
_TO_FIRST_ORDER = (
    "right to first order, {} at the next; to check the first order only, as of a "
    "straight-through rule, pass `order=1`"
)
_FAILS = _TO_FIRST_ORDER.format("fails")
_WRONG = _TO_FIRST_ORDER.format("wrong")
_ONLY_HERE = (
    "the first derivative is right at these arguments, and wrong at others nearby, as if a "
    "factor is missing that is 1 here, or a term that is 0 here: check the rule at other "
    "arguments too"
)
# A loss that is linear in the output does not depend on the derivative of that value.
_VALUE_BY_FORMULA = (
    "right to first order, wrong at the next, but not for a loss that is linear in the output: "
    "the rule returns its value by a formula instead of calling the function, and so the value "
    "has no rule at the next order; return `f(*primals)` as the value"
)
_TRUSTED = 1e-4  # the largest estimated error of finite differences that are a reference
_TRUSTED_OF_ROUNDED = 1e-3  # of a function whose values are rounded to float32
# The error of such differences that is admitted where autodiff without the rule has another
# first derivative: it is one of a solver, as a rule, whose values stop at a tolerance.
_OF_SOLVERS = 1e-3
# How far away the first derivative is looked at once more, relative to the arguments.
_NEARBY = 0.125


def order(case: Case) -> Iterator[Finding]:
    """Derivatives of order 2 and more, of a scalar loss of the outputs."""
    options = case.options
    explicit = options.expected_tangent or options.expected_cotangent
    if options.expected_cotangent and options.nonlinear:
        yield skipped("order", "no reference for a non-linear `expected_cotangent`")
        return
    if options.reference is None and (explicit or options.nonlinear):
        yield skipped("order", "no reference: give `reference=` for higher derivatives")
        return
    if not case.offers_reverse:
        yield skipped("order", NO_REVERSE)
        return
    p = case.precision
    t, w = p.like_leaves(case.tangents()), p.like_outputs(case.cotangents())
    if not w:
        yield skipped("order", "no output has a derivative")
        return
    for n in range(2, options.order + 1):
        yield from _one_order(case, p, n, t, w)


def _one_order(case: Case, p: Precision, n: int, t, w) -> Iterator[Finding]:
    by_autodiff = _by_autodiff(p, n, t, w)
    is_given = case.options.reference is not None
    kinds = [k for k in _KINDS if case.offers_forward or k != "reverse over forward"]
    for kind, got in p.rule.higher_of_kinds(kinds, t, w, n).items():
        where = f"order {n}, {kind}"
        if isinstance(got, Exception):
            if not (isinstance(got, TypeError) and "forward-mode" in str(got)):
                yield broke("order", where, got, _FAILS)
            continue  # a `jax.custom_vjp` has no forward mode
        finding = None
        if by_autodiff is not None:
            reference = "autodiff of `reference`" if is_given else "autodiff without the rule"
            finding = _compare(case, p, where, by_autodiff, got, reference, t, w)
        if finding is None or finding.verdict == FAILED:
            # The check of the first derivative has its own reference, so finite differences of
            # the rule's gradient are a reference for the second. Autodiff is none for a rule
            # that is wrong on purpose: the gradient is then not that of any function (the
            # second derivative of `reverse_gradient` is that of the reversed gradient).
            is_refuted = finding is not None and not is_given
            is_refuted = is_refuted and not _is_right_to_first_order(case, p, t, w)
            numeric = _by_differences(case, p, w) if n == 2 else None
            if numeric is not None:
                scaled, exact, error, rounding = numeric
                along = p.rule.higher(kind, p.like_leaves(scaled), w, n)
                reference = "differences of the gradient"
                loose = max(10 * error, _OF_SOLVERS if is_refuted else 0.0)
                if any(rounding):
                    loose = 0.0
                args = case, p, where, exact, along, reference, t, w, loose, rounding
                other = _compare(*args)
                passes = finding is None or is_refuted or other.verdict != FAILED
                if passes and finding is not None and not is_refuted:
                    passes = not _is_wrong_nearby(case, p, w)
                finding = other if passes else finding
            elif is_refuted:
                why = "autodiff without the rule is another one to first order"
                finding = skipped("order", f"no reference for {where}: {why}")
        yield finding or skipped("order", f"no reference for {where}")


def _is_wrong_nearby(case: Case, p: Precision, w) -> bool:
    """Whether the first derivative of the rule is wrong at a point nearby. Where the arguments
    are zero, equal or symmetric, a wrong rule may be right to first order, and differences of
    its gradient agree with its wrong second derivative."""
    scaled = case.scaled_tangents()
    leaves = [np.asarray(x) for x in p.subject.leaves]
    moved = [x + _NEARBY * t for x, t in zip(leaves, scaled, strict=True)]
    moved = p.like_leaves(moved)
    names = ["all leaves"]
    try:
        got = p.rule.vjp(w, moved)
        if case.options.reference is not None:
            want, have, names, error = p.reference.vjp(w, moved), got, case.names, 0.0
        else:
            value = lambda *xs: [pairing(p.plain.value_at(xs), w)]
            with p.context():
                want, error, _ = directional(value, moved, scaled, p.rounded_to)
            have = [np.asarray(pairing(got, scaled))]
    except Exception:
        return False
    if not error <= _TRUSTED or not all(np.all(np.isfinite(as_real(x))) for x in want):
        return False
    return difference(want, have, names).error > max(10 * case.tolerance(p), 10 * error)


def _by_autodiff(p: Precision, n: int, t, w):
    """`None` where plain autodiff has no such derivative: a host function, a loop, a NaN."""
    try:
        derivative = p.reference.higher("forward over reverse", t, w, n)
    except Exception:
        return None
    return derivative if all(np.all(np.isfinite(as_real(x))) for x in derivative) else None


def _by_differences(case: Case, p: Precision, w):
    """Finite differences of the rule's gradient: the direction, the derivative and its relative
    error. `None` where they are not exact enough to be a reference."""
    scaled = case.scaled_tangents()
    leaves = [np.asarray(x) for x in p.subject.leaves]
    gradient = lambda *xs: p.rule.higher("reverse over reverse", scaled, w, 1, xs)
    try:
        with p.context():
            exact, error, rounding = directional(gradient, leaves, scaled, p.rounded_to)
    except Exception:
        return None
    trusted = _TRUSTED_OF_ROUNDED if any(rounding) else _TRUSTED
    return (scaled, exact, error, rounding) if error <= trusted else None


def _compare(
    case: Case, p: Precision, where, want, got, reference, t, w, loose: float = 0.0, rounding=()
) -> Finding:
    tolerance = max(case.tolerance_of_order(p), loose)
    scale = [10 * error / tolerance for error in rounding] or 0.0
    compared = lambda cause: compare(
        "order", where, want, got, case.names, tolerance, cause=cause, reference=reference,
        scale=scale,
    )  # fmt: skip
    finding = compared("")
    if finding.verdict == FAILED and _is_right_to_first_order(case, p, t, w):
        if _is_wrong_nearby(case, p, w):
            return compared(_ONLY_HERE)
        is_right = _is_right_for_linear_loss(case, p, t, w)
        return compared(_VALUE_BY_FORMULA if is_right else _WRONG)
    return finding


def _is_right_for_linear_loss(case: Case, p: Precision, t, w) -> bool:
    functions = (p.reference, p.rule)
    try:
        want, got = (f.higher(_KINDS[0], t, w, 2, of_linear_loss=True) for f in functions)
    except Exception:
        return False
    return difference(want, got, case.names).error <= case.tolerance_of_order(p)


def _is_right_to_first_order(case: Case, p: Precision, t, w) -> bool:
    """Whether the modes that are offered agree with autodiff of the reference."""
    try:
        pairs = [(p.reference.vjp(w), p.rule.vjp(w), case.names)]
        if case.offers_forward:
            pairs.append((p.reference.jvp(t), p.rule.jvp(t), case.output_names))
    except Exception:
        return False
    return all(difference(*pair).error <= case.tolerance(p) for pair in pairs)
