"""The check `order`: higher derivatives, in every order of the modes, as rows of a table."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# Public, if little known: the pass with which JAX itself drops dead equations.
from ._case import are_finite, Case
from ._compare import as_double, as_real, difference, norm, pairing
from ._differences import directional
from ._oracle import At
from ._outcome import outcome
from ._references import as_reference, jvp, with_self
from ._report import broke, compare, FAILED, failed, Finding, skipped
from ._table import NO_REVERSE


_FIRST = "right to first order, {} at the next; to check the first order only, as of a "
_FIRST += "straight-through rule, pass `order=1`"
_ONLY_HERE = (
    "the first derivative is right at these arguments, and wrong at others nearby, as if a "
    "factor is missing that is 1 here, or a term that is 0 here: check the rule at other "
    "arguments too"
)
_BY_FORMULA = (
    "right to first order, wrong at the next, but not for a loss that is linear in the output: "
    "the rule returns its value by a formula instead of calling the function, and so the value "
    "has no rule at the next order; return `f(*primals)` as the value"
)
_OF_SOLVERS = 1e-3  # the error of differences of a gradient that is admitted for a solver
_NEARBY = 0.125  # how far away the first derivative is looked at once more


def order(case: Case) -> Iterator[Finding]:
    """Derivatives of order 2 and more, of a scalar loss of the outputs."""
    options = case.options
    explicit = options.expected_tangent or options.expected_cotangent
    if options.expected_cotangent and options.nonlinear:
        yield skipped("order", "no reference for a non-linear `expected_cotangent`")
    elif options.reference is None and (explicit or options.nonlinear):
        yield skipped("order", "no reference: give `reference=` for higher derivatives")
    elif not case.outputs:
        yield skipped("order", "no output has a derivative")
    elif not case.has_reverse:
        yield skipped("order", NO_REVERSE)
    else:
        captures = options.order > 1 and case.own.hold_second_order()
        is_refuted = False
        for n in range(2, options.order + 1):
            for finding in _one_order(case, n, captures):
                is_refuted |= finding.verdict == FAILED
                yield finding
        is_right = not is_refuted and options.order > 1 and _is_right_to_first_order(case)
        if is_right and _is_wrong_nearby(case, case.cotangents[0]):
            # The odd functions are an example: `t_x` instead of `cos(x) * t_x`, at zero.
            text = "the first derivative is wrong at a point nearby"
            yield failed("order", "a point nearby", text, _ONLY_HERE)


def _one_order(case: Case, n: int, captures: bool) -> Iterator[Finding]:
    side, at = case.wide, At(case.wide.subject.leaves, case.tangents[0], case.cotangents[0])
    reference = side.plain
    if case.options.reference is not None:
        reference = as_reference(side.subject, with_self(side.subject, case.options.reference))
    loss = _scaled_loss(case)
    kinds = {k: d for k, d in _KINDS.items() if case.has_forward or k != "reverse over forward"}
    rows: dict[str, Callable[[At], Any]] = {
        f"order {n}, {kind}": ft.partial(derive, side.f, loss, n)
        for kind, derive in kinds.items()
    }
    expected = {f"expected {n}": ft.partial(forward_over_reverse, reference, loss, n)}
    found = side.compute(rows | expected, at)
    if captures and any(isinstance(x, Exception) for x in found.values()):
        # The captured arrays have the types of the user's precision.
        yield from _one_order(case.in_own_types(), n, False)
        return
    derivative = found.pop(f"expected {n}")
    want = [] if isinstance(derivative, Exception) else derivative
    is_known = bool(want) and are_finite(want)
    name = "autodiff of `reference`" if case.options.reference else "autodiff without the rule"
    tolerance = case.admitted(side, order=n)
    for where, got in found.items():
        if isinstance(got, Exception):
            if not (isinstance(got, TypeError) and "forward-mode" in str(got)):
                yield broke("order", where, got, _FIRST.format("fails"))
            continue  # a `jax.custom_vjp` has no forward mode
        finding = None
        if is_known:
            finding = compare("order", where, want, got, case.names, tolerance, reference=name,
                              cause="")  # fmt: skip
        if finding is None or finding.verdict == FAILED:
            finding = _by_differences(case, where, n, finding)
        yield finding or skipped("order", f"no reference for {where}")
        if finding is not None and finding.verdict == FAILED:
            return


def _by_differences(case: Case, where: str, n: int, finding: Finding | None) -> Finding | None:
    """The check of the first derivative has its own reference, so differences of the rule's
    gradient are a reference for the second, unless `reference` was given: the gradient of a
    rule that is wrong on purpose need not be that of any function."""
    side, w = case.wide, case.cotangents[0]
    is_right = _is_right_to_first_order(case)
    is_refuted = finding is not None and case.options.reference is None and not is_right
    steps = _differences_of_gradient(case, where) if n == 2 else None
    if steps is not None:
        want, got, error, is_exact = steps
        tolerance = case.admitted(side, order=n)
        tolerance = max(tolerance, _OF_SOLVERS) if is_refuted or not is_exact else tolerance
        scale = [10 * e / tolerance for e in error]
        other = compare("order", where, want, got, case.names, tolerance, scale=scale, cause="",
                        reference="differences of the gradient")  # fmt: skip
        if finding is None or is_refuted:
            return other if finding is None or other.verdict != FAILED else finding
        if other.verdict != FAILED and not _is_wrong_nearby(case, w):
            return other
    elif is_refuted:
        why = "autodiff without the rule is another one to first order"
        return skipped("order", f"no reference for {where}: {why}")
    if finding is None:
        return None
    if not is_right:
        return finding
    if _is_wrong_nearby(case, w):
        return dataclasses.replace(finding, cause=_ONLY_HERE)
    by_formula = _is_right_for_linear_loss(case, n)
    return dataclasses.replace(
        finding, cause=_BY_FORMULA if by_formula else _FIRST.format("wrong")
    )


def _differences_of_gradient(case: Case, where: str):
    """Differences of the rule's gradient, the second derivative by the rule, the error, and
    whether the values are those of float64. `None` where they are no reference."""
    side, scaled, w = case.wide, case.scaled, case.cotangents[0]
    leaves = [as_double(x) for x in side.subject.leaves]
    loss = _scaled_loss(case)
    gradient = lambda at: _gradient(loss(side.f, at.w), at.x)
    values = lambda *xs: side.one("gradient", gradient, At(xs, case.tangents[0], w))
    steps = outcome(directional, values, leaves, scaled, side.rounded_to)
    if isinstance(steps, Exception) or not steps.is_trusted:
        return None
    row = ft.partial(_KINDS[where.partition(", ")[2]], side.f, loss, 2)
    got = outcome(side.one, where, row, At(side.subject.leaves, scaled, w))
    is_ok = not isinstance(got, Exception)
    return (steps.tangents_out, got, steps.errors, not steps.is_rounded) if is_ok else None


def _is_wrong_nearby(case: Case, w) -> bool:
    """Whether the first derivative of the rule is wrong at a point nearby. Where the arguments
    are zero, equal or symmetric, a wrong rule may be right to first order, and differences of
    its gradient agree with its wrong second derivative."""
    side, scaled = case.wide, case.scaled
    leaves = [as_double(x) for x in side.subject.leaves]
    moved = [x + _NEARBY * t for x, t in zip(leaves, scaled, strict=True)]
    got, want = (outcome(case.derivative, side, row, w, moved) for row in ("vjp", "vjp 0"))
    if isinstance(got, Exception):
        return False
    admitted = 10 * case.admitted(side)
    if not isinstance(want, Exception) and are_finite(want):
        if difference(want, got, case.names).error <= admitted:
            return False
    if case.options.reference is not None:
        names, have, error = case.names, got, 0.0
    else:  # autodiff may be wrong: that of a solver, and that of a `stop_gradient`
        steps = outcome(case.along, scaled, moved)
        if isinstance(steps, Exception) or not steps.is_trusted:
            return False
        want, have = (
            [np.asarray(pairing(steps.tangents_out, w))],
            [np.asarray(pairing(got, scaled))],
        )
        error = float(np.dot(steps.errors, [norm(as_real(x)) for x in w]))
        names = ["all leaves"]
    if isinstance(want, Exception) or not are_finite(want):
        return False
    scale = 10 * error / case.admitted(side)
    return difference(want, have, names, scale=scale).error > admitted


def _is_right_for_linear_loss(case: Case, n: int) -> bool:
    side, at = case.wide, At(case.wide.subject.leaves, case.tangents[0], case.cotangents[0])
    derive = lambda fn: ft.partial(forward_over_reverse, fn, _linear_loss, n)
    rows: Mapping[str, Any] = {
        f"linear expected {n}": derive(side.plain),
        f"linear {n}": derive(side.f),
    }
    want, got = side.compute(rows, at).values()
    if isinstance(want, Exception) or isinstance(got, Exception):
        return False
    return difference(want, got, case.names).error <= case.admitted(side, order=n)


def _is_right_to_first_order(case: Case) -> bool:
    """Whether the modes that are offered agree with autodiff of the reference."""
    pairs = [("vjp", case.cotangents[0], case.names)]
    pairs += [("jvp", case.tangents[0], case.output_names)] if case.has_forward else []
    for row, direction, names in pairs:
        runs = [
            lambda r=r, d=direction: case.derivative(case.wide, r, d) for r in (row, f"{row} 0")
        ]
        got, want = map(outcome, runs)
        if isinstance(got, Exception) or isinstance(want, Exception):
            return False
        if not difference(want, got, names).error <= case.admitted(case.wide):
            return False
    return True


def loss_of(fn, cotangents, scales: Sequence[float] = ()):
    """The quadratic `sum(r + r**2 / 2s)` with `r` the outputs weighted with the cotangents, so
    that the cotangents of the outputs depend on the leaves as well."""

    def loss(*xs):
        total = 0.0
        scale = scales or [1.0] * len(cotangents)
        for out, w, s in zip(fn(*xs), cotangents, scale, strict=True):
            r = (out * w).real
            total = total + (r + r * r / (2 * s)).sum()
        return total

    return loss


def _scaled_loss(case: Case):
    """The same, with weights that make both terms about as large."""
    products = zip(case.wide.value(), case.cotangents[0], strict=True)
    scales = [float(1 + np.max(np.abs(x * w), initial=0)) for x, w in products]
    return lambda fn, cotangents: loss_of(fn, cotangents, scales)


def _linear_loss(fn, cotangents):
    pairs = lambda xs: zip(fn(*xs), cotangents, strict=True)
    return lambda *xs: sum((x * w).real.sum() for x, w in pairs(xs))


def _gradient(fn, xs):
    """With respect to every leaf, complex ones as JAX has it."""
    return list(jax.grad(fn, argnums=tuple(range(len(xs))))(*xs))


def _along(fn, t):
    return lambda *ys: jvp(fn, ys, t)


def forward_over_reverse(fn, loss, n, at: At):
    scalar = loss(fn, at.w)
    gradient = lambda *ys: _gradient(scalar, ys)
    for _ in range(n - 1):
        gradient = _along(gradient, at.t)
    return gradient(*at.x)


def reverse_over_reverse(fn, loss, n, at: At):
    def slope_of(scalar):
        def slope(*ys):
            terms = zip(_gradient(scalar, ys), at.t, strict=True)
            return sum((g * t).real.sum() for g, t in terms)

        return slope

    scalar = loss(fn, at.w)
    for _ in range(n - 1):
        scalar = slope_of(scalar)
    return _gradient(scalar, at.x)


def _reverse_over_forward(fn, loss, n, at: At):
    scalar = loss(fn, at.w)
    for _ in range(n - 1):
        scalar = _along(scalar, at.t)
    return _gradient(scalar, at.x)


_KINDS = {
    "forward over reverse": forward_over_reverse,
    "reverse over reverse": reverse_over_reverse,
    "reverse over forward": _reverse_over_forward,
}
