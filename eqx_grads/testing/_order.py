"""The check `order`: higher derivatives, in every order of the modes, as rows of a table."""

import dataclasses
import functools as ft
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ._case import are_finite, Case
from ._compare import as_double, relative_error
from ._derivatives import judge
from ._differences import directional
from ._oracle import At, jvp, Row, vjp
from ._outcome import outcome
from ._report import broke, compare, FAILED, failed, Finding, PASSED, skipped
from ._table import NO_REVERSE


_ONLY_FIRST = "To check the first order only, as of a straight-through rule, pass `order=1`"
_FAILS = f"right to first order, fails at the next. {_ONLY_FIRST}"
_NEXT = "right to first order, wrong at the next:"
_BY_FORMULA = (
    f"{_NEXT} does the rule return `f(*primals)` as the value, or a formula? {_ONLY_FIRST}"
)
_HELD = (
    f"{_NEXT} does the rule hold something constant (`stop_gradient`, NumPy), or call a "
    f"function with a wrong rule? {_ONLY_FIRST}"
)
_NOT_HELD = f"{_NEXT} the function is constant in {{}}. Is its rule constant, too?"
_ONLY_HERE = (
    "the first derivative is right at these arguments, and wrong at others nearby, as if a "
    "factor is missing that is 1 here, or a term that is 0 here"
)
_OF_SOLVERS = 1e-3  # the error of differences of a gradient that is admitted for a solver


def order(case: Case) -> Iterator[Finding]:
    """Derivatives of order 2 and more, of a scalar loss of the outputs."""
    options = case.options
    if options.nonlinear:
        # If a gradient is not a derivative, the orders of the modes differ.
        yield skipped("order", "the backward rule is declared non-linear")
    elif not case.has_reverse:
        yield skipped("order", NO_REVERSE)
    elif options.order > 1:
        first = _First(case)
        for n in range(2, options.order + 1):
            for finding in _one_order(case, n, first):
                yield finding
                if finding.verdict == FAILED:
                    return
        if first.is_wrong_nearby:
            # The odd functions are an example: `t_x` instead of `cos(x) * t_x`, at zero.
            text = "the first derivative is wrong at a point nearby"
            yield failed("order", "a point nearby", text, _ONLY_HERE)


class _First:
    """Known facts about the first derivative of a rule.

    - `is_right`: whether the modes that are offered agree with autodiff.
    - `is_wrong_nearby`: whether it is right here only. Where the arguments are zero, equal or
        symmetric, a wrong rule may be right to first order, and differences of its gradient
        agree with its wrong second derivative.
    """

    def __init__(self, case: Case):
        modes = ["reverse", *["forward"] * case.has_forward]
        agrees = lambda finding, is_expected: is_expected and finding.verdict != FAILED
        self.is_right = True is outcome(
            lambda: all(agrees(*judge(case, mode)) for mode in modes)
        )
        nearby = outcome(lambda: judge(case.nearby(), "reverse")[0].verdict)
        self.is_wrong_nearby = self.is_right and nearby == FAILED


def _one_order(case: Case, n: int, first: _First) -> Iterator[Finding]:
    side = case.wide
    at = At(side.subject.leaves, case.tangents[0], _weights(case))
    rows: dict[str, Row] = {
        f"order {n}, {kind}": ft.partial(derive, side.f, n)
        for kind, derive in _KINDS.items()
        if case.has_forward or kind != "reverse over forward"
    }
    expected = ft.partial(forward_over_reverse, side.expected, n)
    *found, want = side.compute(rows | {f"expected {n}": expected}, at).values()
    for (where, row), got in zip(rows.items(), found, strict=True):
        if isinstance(got, Exception):
            # A `jax.custom_vjp` has no forward mode.
            if not (isinstance(got, TypeError) and "forward-mode" in str(got)):
                yield broke("order", where, got, _FAILS)
            continue
        finding = skipped("order", f"no reference for {where}")
        if not isinstance(want, Exception) and are_finite(want):
            finding = compare("order", where, want, got, case.names, 10 * case.admitted(),
                              cause="", note=case.reference)  # fmt: skip
        if finding.verdict != PASSED and n == 2:
            finding = _by_differences(case, where, row, finding, first)
        if finding.verdict == FAILED and first.is_right:
            cause = _ONLY_HERE if first.is_wrong_nearby else _cause(case, got)
            finding = dataclasses.replace(finding, cause=cause)
        yield finding


def _cause(case: Case, second: Any) -> str:
    """Why a rule with the expected first derivative has another second one."""
    # The value that the rule returns has to have the derivative of the rule.
    of_value = lambda at: vjp(lambda *xs: jax.vjp(case.wide.f, *xs)[0], at.x, at.w)
    at = At(case.wide.subject.leaves, w=case.cotangents[0])
    want = case.derivative("vjp")
    have = outcome(case.wide.one, "value of the rule", of_value, at)
    if isinstance(have, Exception) or relative_error(want, have) > case.admitted():
        return _BY_FORMULA
    if not are_finite(second):
        return ""  # `finite` says why
    constant = [n for n, x in zip(case.names, want, strict=True) if x.size and not np.any(x)]
    return _NOT_HELD.format(", ".join(constant)) if constant else _HELD


def _by_differences(
    case: Case, where: str, row: Row, finding: Finding, first: _First
) -> Finding:
    """The check of the first derivative has its own reference, so differences of the rule's
    gradient are a reference for the second, unless `reference` was given: the gradient of a
    rule that is wrong on purpose need not be the gradient of any function."""
    is_refuted = case.options.reference is None and not first.is_right
    side, w, scaled = case.wide, _weights(case), case.scaled
    leaves = list(map(as_double, side.subject.leaves))
    gradient = lambda at: _gradient(_loss(side.f, at.w), at.x)
    values = lambda *xs: side.one("gradient", gradient, At(xs, scaled, w))
    slope = outcome(directional, values, leaves, scaled, side.rounded_to)
    got = outcome(side.one, where, row, At(leaves, scaled, w))
    if isinstance(slope, Exception) or isinstance(got, Exception) or not slope.is_trusted:
        # Autodiff without the rule is another one to first order.
        return skipped("order", f"no reference for {where}") if is_refuted else finding
    is_rough = (finding.verdict == FAILED and is_refuted) or slope.is_rounded
    tolerance = max(10 * case.admitted(), _OF_SOLVERS if is_rough else 0.0)
    other = compare(
        "order", where, slope.tangents_out, got, case.names, tolerance, cause="",
        note="expected: differences of the gradient",
        scale=[10 * e / tolerance for e in slope.errors],
    )  # fmt: skip
    is_told = case.options.reference is not None
    is_right = other.verdict != FAILED and (
        is_refuted or not (is_told or first.is_wrong_nearby)
    )
    return other if finding.verdict != FAILED or is_right else finding


def _weights(case: Case) -> list[Any]:
    """The cotangents, so that both terms of the loss are about as large."""
    products = zip(case.derivative("f"), case.cotangents[0], strict=True)
    return [w / (1 + np.max(np.abs(x * w), initial=0)) for x, w in products]


def _loss(fn, weights):
    """The quadratic `sum(r + r**2 / 2)` with `r` the outputs times their weights, so that the
    cotangents of the outputs depend on the leaves as well."""

    def loss(*xs):
        rs = [(out * w).real for out, w in zip(fn(*xs), weights, strict=True)]
        return sum((r + r * r / 2).sum().astype(float) for r in rs)

    return loss


def _gradient(fn, xs):
    """With respect to every leaf, complex ones as JAX has it."""
    return list(jax.grad(fn, argnums=tuple(range(len(xs))))(*xs))


def _repeated(step, fn, at: At, n):
    for _ in range(n - 1):
        fn = step(fn, at.t)
    return fn


def _along(fn, t):
    return lambda *ys: jvp(fn, ys, t)


def _slope(scalar, t):
    terms = lambda ys: zip(_gradient(scalar, ys), t, strict=True)
    return lambda *ys: sum((g * t).real.sum().astype(float) for g, t in terms(ys))


def forward_over_reverse(fn, n, at: At):
    return _repeated(_along, lambda *xs: _gradient(_loss(fn, at.w), xs), at, n)(*at.x)


def reverse_over_reverse(fn, n, at: At):
    return _gradient(_repeated(_slope, _loss(fn, at.w), at, n), at.x)


def _reverse_over_forward(fn, n, at: At):
    return _gradient(_repeated(_along, _loss(fn, at.w), at, n), at.x)


_KINDS = {
    "forward over reverse": forward_over_reverse,
    "reverse over reverse": reverse_over_reverse,
    "reverse over forward": _reverse_over_forward,
}
