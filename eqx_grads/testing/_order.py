"""The check `order`: higher derivatives, in every order of the modes, as rows of a table."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ._case import are_finite, Case
from ._compare import as_double
from ._derivatives import judge, Mode
from ._differences import directional
from ._oracle import At
from ._outcome import outcome
from ._references import as_reference, jvp
from ._report import broke, compare, FAILED, failed, Finding, skipped
from ._table import NO_REVERSE


_ONLY_FIRST = "To check the first order only, as of a straight-through rule, pass `order=1`"
_FAILS = f"right to first order, fails at the next. {_ONLY_FIRST}"
_FIRST = (
    "right to first order, wrong at the next: does the rule return `f(*primals)` as the value, "
    f"and not a formula, which has no rule? {_ONLY_FIRST}"
)
_ONLY_HERE = (
    "the first derivative is right at these arguments, and wrong at others nearby, as if a "
    "factor is missing that is 1 here, or a term that is 0 here: check the rule at other "
    "arguments too"
)
_OF_SOLVERS = 1e-3  # the error of differences of a gradient that is admitted for a solver


def order(case: Case) -> Iterator[Finding]:
    """Derivatives of order 2 and more, of a scalar loss of the outputs."""
    options = case.options
    explicit = options.expected_tangent or options.expected_cotangent
    if options.expected_cotangent and options.nonlinear:
        yield skipped("order", "no reference for a non-linear `expected_cotangent`")
    elif options.reference is None and (explicit or options.nonlinear):
        yield skipped("order", "no reference: give `reference=` for higher derivatives")
    elif not case.has_reverse:
        yield skipped("order", NO_REVERSE if case.outputs else "no output has a derivative")
    elif options.order > 1:
        first = _First(case)
        orders = range(2, options.order + 1)
        findings = [finding for n in orders for finding in _one_order(case, n, first)]
        yield from findings
        is_refuted = any(f.verdict == FAILED for f in findings)
        if not is_refuted and first.is_right and first.is_wrong_nearby:
            # The odd functions are an example: `t_x` instead of `cos(x) * t_x`, at zero.
            text = "the first derivative is wrong at a point nearby"
            yield failed("order", "a point nearby", text, _ONLY_HERE)


class _First:
    """What is known of the first derivative of a rule."""

    def __init__(self, case: Case):
        self.case = case

    @ft.cached_property
    def is_right(self) -> bool:
        """Whether the modes that are offered agree with autodiff."""
        modes = ["reverse", *["forward"] * self.case.has_forward]
        found = [outcome(lambda m=m: judge(self.case, Mode(self.case, m))) for m in modes]
        agrees = lambda finding, number: number is not None and finding.verdict != FAILED
        return all(not isinstance(f, Exception) and agrees(*f) for f in found)

    @ft.cached_property
    def is_wrong_nearby(self) -> bool:
        """Where the arguments are zero, equal or symmetric, a wrong rule may be right to first
        order, and differences of its gradient agree with its wrong second derivative."""
        found = outcome(lambda: judge(near := self.case.nearby(), Mode(near, "reverse")))
        return not isinstance(found, Exception) and found[0].verdict == FAILED


def _one_order(case: Case, n: int, first: _First) -> Iterator[Finding]:
    side, loss = case.wide, _scaled_loss(case)
    at = At(side.subject.leaves, case.tangents[0], case.cotangents[0])
    reference, name = side.plain, "autodiff without the rule"
    if case.options.reference is not None:
        reference = as_reference(side.subject, case.options.reference)
        name = "autodiff of `reference`"
    rows: dict[str, Callable[[At], Any]] = {
        f"order {n}, {kind}": ft.partial(derive, side.f, loss, n)
        for kind, derive in _KINDS.items()
        if case.has_forward or kind != "reverse over forward"
    }
    expected = ft.partial(forward_over_reverse, reference, loss, n)
    *found, want = side.compute(rows | {f"expected {n}": expected}, at).values()
    for (where, row), got in zip(rows.items(), found, strict=True):
        if isinstance(got, Exception):
            # A `jax.custom_vjp` has no forward mode.
            if not (isinstance(got, TypeError) and "forward-mode" in str(got)):
                yield broke("order", where, got, _FAILS)
            continue
        finding = None
        if not isinstance(want, Exception) and are_finite(want):
            finding = compare("order", where, want, got, case.names, case.admitted(order=n),
                              reference=name, cause="")  # fmt: skip
        if finding is None or finding.verdict == FAILED:
            finding = _by_differences(case, where, row, n, finding, first)
        if finding.verdict == FAILED and first.is_right:
            cause = _ONLY_HERE if first.is_wrong_nearby else _FIRST
            finding = dataclasses.replace(finding, cause=cause)
        yield finding
        if finding.verdict == FAILED:
            return


def _by_differences(
    case: Case, where: str, row: Any, n: int, finding: Finding | None, first: _First
) -> Finding:
    """The check of the first derivative has its own reference, so differences of the rule's
    gradient are a reference for the second, unless `reference` was given: the gradient of a
    rule that is wrong on purpose need not be that of any function."""
    is_refuted = case.options.reference is None and not first.is_right
    steps = outcome(_differences_of_gradient, case, where, row) if n == 2 else ValueError()
    if isinstance(steps, Exception) or not steps[0].is_trusted:
        why = ": autodiff without the rule is another one to first order"
        unknown = skipped("order", f"no reference for {where}{why if finding else ''}")
        return unknown if finding is None or is_refuted else finding
    slope, got = steps
    tolerance = case.admitted(order=n)
    is_rough = (finding is not None and is_refuted) or slope.is_rounded
    tolerance = max(tolerance, _OF_SOLVERS) if is_rough else tolerance
    scale = [10 * e / tolerance for e in slope.errors]
    other = compare("order", where, slope.tangents_out, got, case.names, tolerance, scale=scale,
                    reference="differences of the gradient", cause="")  # fmt: skip
    is_right = other.verdict != FAILED and (is_refuted or not first.is_wrong_nearby)
    return other if finding is None or is_right else finding


def _differences_of_gradient(case: Case, where: str, row):
    """Differences of the rule's gradient, and the second derivative by the rule along them."""
    side, scaled, w = case.wide, case.scaled, case.cotangents[0]
    loss = _scaled_loss(case)
    gradient = lambda at: _gradient(loss(side.f, at.w), at.x)
    values = lambda *xs: side.one("gradient", gradient, At(xs, case.tangents[0], w))
    leaves = list(map(as_double, side.subject.leaves))
    steps = directional(values, leaves, scaled, side.rounded_to)
    return steps, side.one(where, row, At(side.subject.leaves, scaled, w))


def loss_of(fn, cotangents, scales: Sequence[float] = ()):
    """The quadratic `sum(r + r**2 / 2s)` with `r` the outputs weighted with the cotangents, so
    that the cotangents of the outputs depend on the leaves as well."""

    def loss(*xs):
        total = 0.0
        scale = scales or [1.0] * len(cotangents)
        for out, w, s in zip(fn(*xs), cotangents, scale, strict=True):
            r = (out * w).real
            total = total + (r + r * r / (2 * s)).sum().astype(float)
        return total

    return loss


def _scaled_loss(case: Case):
    """The same, with weights that make both terms about as large."""
    products = zip(case.wide.value(), case.cotangents[0], strict=True)
    scales = [float(1 + np.max(np.abs(x * w), initial=0)) for x, w in products]
    return lambda fn, cotangents: loss_of(fn, cotangents, scales)


def _gradient(fn, xs):
    """With respect to every leaf, complex ones as JAX has it."""
    return list(jax.grad(fn, argnums=tuple(range(len(xs))))(*xs))


def _repeated(step, fn, n, t):
    for _ in range(n - 1):
        fn = step(fn, t)
    return fn


def _along(fn, t):
    return lambda *ys: jvp(fn, ys, t)


def _slope(scalar, t):
    terms = lambda ys: zip(_gradient(scalar, ys), t, strict=True)
    return lambda *ys: sum((g * t).real.sum().astype(float) for g, t in terms(ys))


def forward_over_reverse(fn, loss, n, at: At):
    scalar = loss(fn, at.w)
    return _repeated(_along, lambda *ys: _gradient(scalar, ys), n, at.t)(*at.x)


def reverse_over_reverse(fn, loss, n, at: At):
    return _gradient(_repeated(_slope, loss(fn, at.w), n, at.t), at.x)


def _reverse_over_forward(fn, loss, n, at: At):
    return _gradient(_repeated(_along, loss(fn, at.w), n, at.t), at.x)


_KINDS = {
    "forward over reverse": forward_over_reverse,
    "reverse over reverse": reverse_over_reverse,
    "reverse over forward": _reverse_over_forward,
}
