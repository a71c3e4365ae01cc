"""The checks `forward` and `reverse`: the first derivative against two references.

The references are plain autodiff of the function without its rule, which is exact, and finite
differences, which use no rule. Where these two disagree (a `stop_gradient` in the function, a
NaN of plain autodiff), the rule has to agree with one of them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._case import Case
from .._compare import as_real, difference, norm
from .._expected import is_given, witnesses
from .._findings import as_seen, broke, compare, failed, in_one_line, skipped
from .._finite_differences import FailsNearby
from .._likely_cause import MISSING, NO_INFLUENCE
from .._modes import AbstractMode, Differences, ForwardMode, ReverseMode
from .._precision import Precision
from .._report import FAILED, Finding, NO_REFERENCE, PASSED, SKIPPED


_TRUSTED = 1e-3  # the largest estimated error of finite differences that are a reference
_DRAWN = 3  # directions that are compared in the user's precision
_MUCH_LARGER = 12  # two to this power: cotangents much larger than those that are drawn

_Arrays = list[Any]


def forward(case: Case) -> Iterator[Finding]:
    """Forward mode against both references."""
    if not case.own.outputs:
        yield skipped("forward", "no output has a derivative")
    elif case.has_costly_forward:
        why = "it takes more calls of the backward rule than `max_rule_calls`"
        yield skipped("forward", why)
    elif not case.offers_forward:
        why = "reverse mode only, as of every `jax.custom_vjp`"
        yield skipped("forward", f"{why}; `eqx_grads.custom_vjp` has both modes")
    else:
        yield from _check(ForwardMode(case))


def reverse(case: Case) -> Iterator[Finding]:
    """Reverse mode against both references."""
    if not case.own.outputs:
        yield skipped("reverse", "no output has a derivative")
    elif not case.offers_reverse:
        why = "JAX says that this function has no reverse mode"
        do = 'where that is meant, say `skip=("reverse",)`'
        yield failed("reverse", "reverse mode", f"{why}; {do}")
    else:
        yield from _check(ReverseMode(case))


def _check(mode: AbstractMode) -> Iterator[Finding]:
    """In the better precision first; if that passes, in the user's own."""
    got = mode.along_directions(lambda direction: mode.rule(mode.precision, direction))
    finding = _against_references(mode, got)
    if finding.verdict == PASSED and mode.case.is_another_in_float64:
        dtype = mode.case.subject.leaves[0].dtype
        where = f"in {dtype}: in float64 it is another function"
        finding = dataclasses.replace(finding, where=where)
    elif finding.verdict == PASSED and mode.case.wide is None and mode.case.captures_numpy:
        dtype = mode.case.subject.leaves[0].dtype
        where = f"in {dtype}: it captures NumPy arrays (`jnp.asarray` of them runs in float64)"
        finding = dataclasses.replace(finding, where=where)
    elif finding.verdict == PASSED and mode.case.wide is not None:
        where = finding.where or mode.precision.where_rounded
        finding = dataclasses.replace(finding, where=where)
    yield finding
    is_unknown = finding.verdict == SKIPPED and mode.case.is_wrong_on_purpose
    if finding.verdict == FAILED or is_unknown:
        return
    of_sizes = _at_other_sizes(mode)
    yield from of_sizes
    is_wrong = any(finding.verdict == FAILED for finding in of_sizes)
    is_own = mode.precision is mode.case.own
    if is_wrong or (is_own and not mode.case.is_another_in_float64):
        return
    drawn = [mode.random_direction() for _ in range(_DRAWN)]
    found = [mode.rule(mode.case.own, direction) for direction in drawn]
    yield from mode.wrong_dtypes(found[0])
    if is_own:
        return
    for direction, have, scale in zip(drawn, found, _scales(found), strict=False):
        in_own = _in_own_precision(mode, direction, have, scale)
        # The rule in float64 is no reference if nothing has been compared with it.
        if finding.verdict != SKIPPED or in_own.verdict == FAILED:
            yield in_own
        if in_own.verdict != PASSED:
            return


def _scales(found: Sequence[_Arrays]) -> list[list[float]]:
    """For derivatives along a few directions, what is added to the norm of each array, so that
    its error is relative to the largest of them: the rounding error of a sum that cancels along
    one direction is a large part of it."""
    sizes = np.array([[norm(as_real(x)) for x in arrays] for arrays in found])
    if not np.all(np.isfinite(sizes)):  # an overflow: each direction is one more
        return [[0.0] * sizes.shape[1]]
    return (np.max(sizes, axis=0) - sizes).tolist()


def _against_references(mode: AbstractMode, got: _Arrays) -> Finding:
    case, p = mode.case, mode.precision
    expected = lambda direction: mode.expected(p, direction)
    if case.is_wrong_on_purpose:
        return _against_what_was_asked_for(mode, got)
    by_autodiff, exact, why = None, None, []
    try:
        exact = mode.along_directions(expected)
    except Exception as e:
        why.append(f"autodiff without the rule raises {type(e).__name__}")
    else:
        by_autodiff = _compare(mode, exact, got)
    # A derivative of zero may be that of a `stop_gradient`, as of a solver.
    is_zero = exact is not None and not any(map(np.any, exact))
    if by_autodiff is not None and by_autodiff.verdict == FAILED and is_zero:
        by_autodiff = _of_steps(case, by_autodiff)
    try:
        steps = mode.differences()
        have = steps.in_form(mode.rule)
    except FailsNearby as e:
        if by_autodiff is None or (is_zero and by_autodiff.verdict == FAILED):
            return skipped(mode.check, f"{NO_REFERENCE}: {e}")
        return by_autodiff
    except Exception as e:
        steps, have = None, []
        why.append(f"finite differences raise {in_one_line(e)}")
    else:
        why.append(_why_not_trusted(steps))
    if steps is None or steps.error > _TRUSTED:
        return by_autodiff or skipped(mode.check, f"{NO_REFERENCE}: {', and '.join(why)}")
    # The error of differences of a rounded function is a number for each array.
    is_rounded = any(steps.rounding)
    loose = max(case.tolerance_of_derivative(p), 0.0 if is_rounded else 10 * steps.error)
    scale = [10 * error / loose for error in steps.rounding]
    wider = None
    if case.is_another_in_float64:
        rounding, widened = case.tolerance_with_rounding()
        wider = lambda: loose + widened() - rounding
    reference = "finite differences in float64"
    if is_rounded:
        reference = f"finite differences of values in {p.rounded_to or 'float32'}"
    is_undifferentiated = is_zero and case.is_solver
    by_differences = compare(
        mode.check, "", steps.want, have, steps.names, loose, wider,
        reference=reference, scale=scale, remark=_remark(p, loose),
        along="cotangent", directions=steps.directions,
        refine=_of_a_solver if is_undifferentiated else as_seen,
    )  # fmt: skip
    if by_autodiff is None:
        return by_differences
    if by_autodiff.verdict == by_differences.verdict:
        shows_more = exact is not None and not _are_finite(exact) and _are_finite(steps.want)
        return by_differences if is_undifferentiated or shows_more else by_autodiff
    # One of them passed. If the references disagree, that is enough. If they agree, the failure
    # is in entries that only one of them compared.
    exact = steps.in_form(mode.expected)
    gap = difference(steps.want, exact, steps.names, entrywise=False, scale=scale)
    agree = gap.error <= loose
    wanted = FAILED if agree else PASSED
    mode.autodiff_is_refuted = not agree and by_autodiff.verdict == FAILED
    if not agree and mode.check == "reverse" and case.has_given_transpose:
        return by_differences  # autodiff transposes as it was told to
    return by_autodiff if by_autodiff.verdict == wanted else by_differences


# No larger error of a derivative is that of a solver which stops at a tolerance.
_OF_TOLERANCE = 0.1


def _of_a_solver(seen: str, error: float) -> str:
    """The likely cause, of the derivative of a solution by its residual.

    - `seen`: the one that the numbers show.
    - `error`: the relative error.
    """
    if MISSING in seen:
        return f"{seen} in the residual of `eqg.implicit`"
    residual = "the residual of `eqg.implicit` {} another equation: is it zero at the solution?"
    if NO_INFLUENCE in seen or error <= _OF_TOLERANCE:
        return (
            "a solver that stops at a tolerance, which differences show: check it with a\n"
            f"  tolerance near rounding, or give `reference=`; or\n  {residual.format('is')}"
        )
    return f"{seen},\n  as if {residual.format('were')}" if seen else residual.format("is")


def _why_not_trusted(steps: Differences) -> str:
    if not _are_finite(steps.want):
        return "the function is not finite at arguments close by"
    return "the function is not smooth here, or too rough for finite differences"


def _against_what_was_asked_for(mode: AbstractMode, got: _Arrays) -> Finding:
    """Where a derivative was asked for, for this mode or for the other one."""
    is_asked_for = is_given(mode.check, mode.case.options)
    failures = []
    for witness in witnesses(mode.check, mode.case.options):
        mode.witness = witness
        try:
            want = mode.along_directions(lambda w: mode.expected(mode.precision, w))
        except Exception as e:
            if is_asked_for:
                return broke(mode.check, "the derivative that is expected", e)
            continue  # a formula that can't be transposed
        finding = _compare(mode, want, got)
        if finding.verdict == PASSED:
            return finding
        if is_asked_for and _is_of_the_function(mode, got):
            cause = (
                "forward mode is the derivative of the function, as of every `custom_vjp`\n"
                "  without a `def_jvp`. Give it one, or skip what has forward mode:\n"
                '  `skip=("forward", "adjoint", "order")`'
            )
            finding = _compare(mode, want, got, cause)
        if witness.is_binding:
            failures.append(finding)
    if failures:
        return failures[0]
    option = "expected_tangent" if mode.check == "forward" else "expected_cotangent"
    return skipped(mode.check, f"nothing was said about this mode: pass `{option}=` too")


def _is_of_the_function(mode: AbstractMode, got: _Arrays) -> bool:
    """Whether forward mode of a rule is autodiff of the function without it, and reverse mode
    is not."""
    case, p = mode.case, mode.precision
    if mode.check != "forward":
        return False
    cotangents = p.like_outputs(case.eager.cotangents)
    try:
        plain = mode.along_directions(p.plain.jvp)
        pulled = p.plain.vjp(cotangents)
        have = p.rule.vjp(cotangents)
    except Exception:  # the function has none
        return False
    error = difference(plain, got, mode.names, entrywise=False).error
    gap = difference(pulled, have, case.names, entrywise=False).error
    return error <= case.tolerance(p) < gap


def _at_other_sizes(mode: AbstractMode) -> list[Finding]:
    """Where the cotangent that was asked for need not be linear in the one that comes in: at
    much larger and much smaller ones, as a bound may lie far from those that are drawn."""
    p, options = mode.precision, mode.case.options
    is_formula = options.expected_cotangent is not None
    is_declared = options.nonlinear and options.reference is not None
    if mode.check != "reverse" or not (is_formula or is_declared):
        return []
    # Their squares stay in the range of float16, too: a rule may compute a norm.
    exponents = [int(jnp.finfo(x.dtype).maxexp) // 2 - 4 for x in p.outputs]
    larger = 2.0 ** min(_MUCH_LARGER, *exponents)
    return [
        *_at_another_size(mode, larger, f"{larger:g} times larger"),
        *_at_another_size(mode, 1 / larger, f"{larger:g} times smaller"),
    ]


def _at_another_size(mode: AbstractMode, factor: float, size: str) -> Iterator[Finding]:
    p = mode.precision
    scaled = lambda w: [(x * factor).astype(x.dtype) for x in w]
    want = mode.along_directions(lambda w: mode.expected(p, scaled(w)))
    if not _are_finite(want):
        return
    have = mode.along_directions(lambda w: mode.rule(p, scaled(w)))
    cause = (
        f"right for cotangents near one, wrong for {size} ones,\n"
        "  as if a bound were missing or had another value"
    )
    yield compare(
        mode.check, f"of {factor:g} times the cotangent", want, have, mode.names,
        mode.case.tolerance(p), cause=cause, reference=mode.witness.name,
        along=mode.along, directions=mode.directions, primals=mode.primals,
    )  # fmt: skip


def _of_steps(case: Case, finding: Finding) -> Finding:
    """A failure where plain autodiff is zero, with another cause if the function changes."""
    if not case.changes_at_a_distance():
        return finding
    text = (
        "  likely cause: the derivative without the rule is zero, but the function changes:\n"
        "  it is piecewise constant, as rounding is; or a solver that stops at a tolerance,\n"
        "  which `eqg.implicit` does not differentiate; or the residual of `eqg.implicit` is\n"
        "  that of another equation: is it zero at the solution?\n"
        "  Give the derivative that is meant (`reference=`), or check the solver with a\n"
        "  tolerance near rounding"
    )
    return dataclasses.replace(finding, text=text)


def _compare(mode: AbstractMode, want: _Arrays, got: _Arrays, cause: str = "") -> Finding:
    """`cause`: a likely cause that is known, in place of one that is looked for."""
    case, p = mode.case, mode.precision
    tolerance = case.tolerance_of_derivative(p), None
    if mode.witness.is_autodiff and not p.is_unrounded:
        tolerance = case.strict_tolerance(p, mode.autodiff_at)
    return compare(
        mode.check, "", want, got, mode.names, *tolerance, reference=mode.witness.name,
        along=mode.along, directions=mode.directions, primals=mode.primals,
        hypotheses=lambda: mode.hypotheses(want), cause=cause, diagnose=not cause,
        remark=_remark(p, tolerance[0]),
    )  # fmt: skip


def _remark(p: Precision, tolerance: float) -> str:
    """What a tolerance is that of, if it is not that of float64."""
    text = p.where_rounded
    return f"{text}, compared with a tolerance of {tolerance:.0e}" if text else ""


def _in_own_precision(
    mode: AbstractMode, direction: _Arrays, have: _Arrays, scale: Sequence[float]
) -> Finding:
    """Compare with the best of three references.

    Autodiff in float64 is exact; that in the user's precision has the rounding errors that a
    rule may have, too; without autodiff, or where finite differences refuted it, as they do
    that of a solver, the rule in float64 is a reference, as it has been checked.
    """
    case, wide = mode.case, mode.precision
    by_autodiff = (
        lambda: mode.expected(wide, mode.convert(wide, direction)),
        lambda: mode.expected(case.own, direction),
    )
    by_rule = lambda: mode.rule(wide, mode.convert(wide, direction))
    references = (*(() if mode.autodiff_is_refuted else by_autodiff), by_rule)
    known, widened = case.tolerance_with_rounding()
    least = case.tolerance_of_derivative(case.own)
    tolerance = least, lambda: least + max(widened() - known, _rounding(mode, direction, scale))
    cause = f"right in float64, wrong in {case.subject.leaves[0].dtype}"
    failure = None
    size = norm(np.array([norm(as_real(x)) for x in direction]))
    for reference in references:
        needed = reference is not by_rule or failure is None
        want = _finite(reference) if needed else None
        if want is None:
            continue
        # A derivative of zero may be a rounding error of the direction.
        zero = float(jnp.finfo(have[0].dtype).eps) * size / least
        scales = [s if np.any(x) else s + zero for s, x in zip(scale, want, strict=True)]
        finding = compare(
            mode.check, "in your own precision", want, have, mode.names_out, *tolerance,
            cause=cause, scale=scales,
        )  # fmt: skip
        if finding.verdict == PASSED:
            return finding
        failure = failure or finding
    if failure is None:
        return skipped(mode.check, "no reference in your own precision")
    if failure.error is not None and case.is_rounding(failure.error):
        why = f"rounding changes plain autodiff by {case.noise:.0e} of its size"
        return skipped(mode.check, f"not compared in your own precision: {why}")
    return _along_the_same_direction(mode, direction) or failure


def _rounding(mode: AbstractMode, direction: _Arrays, scale: Sequence[float]) -> float:
    """What rounding explains along this direction, from that of plain autodiff."""
    case, wide = mode.case, mode.precision
    if case.options.tolerance is not None or mode.autodiff_is_refuted:
        return 0.0
    exact = _finite(lambda: mode.expected(wide, mode.convert(wide, direction)))
    rounded = _finite(lambda: mode.expected(case.own, direction))
    if exact is None or rounded is None:
        return 0.0
    error = difference(exact, rounded, mode.names_out, entrywise=False, scale=scale).error
    return case.explained_by_rounding(error)


def _along_the_same_direction(mode: AbstractMode, direction: _Arrays) -> Finding | None:
    """The failure in float64, if there is one along this direction too: then the mistake has
    nothing to do with the precision, and the other directions did not show it."""
    wide = mode.precision
    along = mode.convert(wide, direction)
    want = None if mode.autodiff_is_refuted else _finite(lambda: mode.expected(wide, along))
    if want is None:
        return None
    finding = compare(
        mode.check, "of another direction", want, mode.rule(wide, along), mode.names_out,
        mode.case.tolerance_of_derivative(wide), reference=mode.witness.name,
    )  # fmt: skip
    return finding if finding.verdict == FAILED else None


def _finite(derivative: Callable[[], _Arrays]) -> _Arrays | None:
    """`None` where there is no such derivative, or where it is not finite."""
    try:
        arrays = derivative()
    except Exception:
        return None
    return arrays if _are_finite(arrays) else None


def _are_finite(arrays: _Arrays) -> bool:
    return all(np.all(np.isfinite(as_real(x))) for x in arrays)
