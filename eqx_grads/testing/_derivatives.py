"""The checks `forward` and `reverse`: the first derivative against two references.

The references are what is expected (autodiff of the function without its rule, of `reference`,
or a formula), and finite differences. Where autodiff and differences disagree (a
`stop_gradient` in the function, a NaN of plain autodiff), the rule has to agree with one of
them. A rule that is right in float64 is then compared in the user's precision.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxprs.structure import equations
from ._case import are_finite, Case
from ._compare import as_real, difference, norm
from ._differences import FailsNearby
from ._modes import Mode
from ._outcome import in_one_line, outcome
from ._report import broke, compare, FAILED, failed, Finding, NO_REFERENCE, PASSED, skipped


_Arrays = list[Any]
_MUCH_LARGER = 12  # two to this power: cotangents much larger than those that are drawn
_LOW = 3  # directions that are compared in the user's precision


def forward(case: Case) -> Iterator[Finding]:
    """Forward mode against both references."""
    if not case.outputs:
        yield skipped("forward", "no output has a derivative")
    elif why := case.why_no_forward():
        yield skipped("forward", why)
    else:
        yield from _check(case, Mode(case, "forward"))


def reverse(case: Case) -> Iterator[Finding]:
    """Reverse mode against both references."""
    if not case.outputs:
        yield skipped("reverse", "no output has a derivative")
    elif not case.has_reverse:
        why = "JAX says that this function has no reverse mode"
        do = 'where that is meant, say `skip=("reverse",)`'
        yield failed("reverse", "reverse mode", f"{why}; {do}")
    else:
        yield from _check(case, Mode(case, "reverse"))


# ---------------------------------------------------------------- in float64


def _check(case: Case, mode: Mode) -> Iterator[Finding]:
    got = mode.stack(mode.by(case.wide))
    if case.options.is_wrong_on_purpose:
        finding, number = _against_what_was_asked_for(case, mode, got)
    else:
        finding, number = _against_references(case, mode, got)
    where = finding.where or (case.wide.where_rounded if case.wide is not case.own else "")
    yield dataclasses.replace(finding, where=where)
    if finding.verdict == FAILED:
        return
    if finding.verdict == PASSED and number is not None:
        for other in _at_other_sizes(case, mode, number):
            yield other
            if other.verdict == FAILED:
                return
    yield from _in_own_precision(case, mode, number, finding.verdict == PASSED)


def _compare(
    case: Case, mode: Mode, number: int, got: _Arrays, want: _Arrays, **more
) -> Finding:
    """With a reference in float64."""
    reference = mode.references[number]
    tolerance = case.admitted(case.wide, exact=reference.is_autodiff)
    row, names = f"{mode.row} {number}", mode.names_out
    is_exact = reference.is_autodiff and case.own is case.wide
    wider = lambda: case.measured(row, mode.drawn[0], names) if is_exact else 0.0
    return compare(
        mode.check, "", want, got, mode.names, tolerance, wider=wider,
        mistakes=lambda: mode.mistakes(want), primals=mode.primals, reference=reference.name,
        along=mode.along, directions=mode.directions, note=_note(case, tolerance), **more,
    )  # fmt: skip


def _note(case: Case, tolerance: float) -> str:
    """What a tolerance is that of, if it is not that of float64."""
    text = case.wide.where_rounded
    return f"{text}, compared with a tolerance of {tolerance:.0e}" if text else ""


def _against_references(case: Case, mode: Mode, got: _Arrays) -> tuple[Finding, int | None]:
    """The verdict of autodiff and of differences, and the number of the reference that may be
    held against the rule in the user's precision: none if differences refuted it."""
    found = outcome(mode.stack, mode.by(case.wide, 0))
    want: _Arrays | None = None if isinstance(found, Exception) else found
    by_autodiff = None if want is None else _compare(case, mode, 0, got, want)
    why = (
        [] if want is not None else [f"autodiff without the rule raises {type(found).__name__}"]
    )
    steps = outcome(mode.differences)
    if isinstance(steps, Exception):
        why = [str(steps)] if isinstance(steps, FailsNearby) else [
            *why, f"finite differences raise {in_one_line(steps)}"
        ]  # fmt: skip
    else:
        why += [d.why for *_, d in case.differences if not d.is_trusted][:1]
    if isinstance(steps, Exception) or not all(d.is_trusted for *_, d in case.differences):
        # A derivative of zero may be that of a `stop_gradient`, as of a solver.
        is_stopped = isinstance(steps, FailsNearby) and not any(map(np.any, want or ()))
        if by_autodiff is not None and not (is_stopped and by_autodiff.verdict == FAILED):
            return by_autodiff, 0
        return skipped(mode.check, f"{NO_REFERENCE}: {', and '.join(why)}"), None
    by_differences, error = _by_differences(case, mode, steps, want)
    if by_autodiff is None or want is None:
        return by_differences, None
    if by_autodiff.verdict == by_differences.verdict:
        shows_more = any(map(np.any, steps[0]))
        shows_more &= not any(map(np.any, want)) or not are_finite(want)
        shows_more = shows_more and by_autodiff.verdict == FAILED
        return (by_differences, None) if shows_more else (by_autodiff, 0)
    # One of them passed. If the references disagree, that is enough. If they agree, the failure
    # is in entries that only one of them compared.
    if mode.check == "reverse" and _has_given_transpose(case):
        return by_differences, None  # autodiff transposes as it was told to
    agree = error(mode.in_numbers(mode.by(case.wide, 0))) <= 1
    wanted = FAILED if agree else PASSED
    if by_autodiff.verdict == wanted:
        return by_autodiff, 0
    return by_differences, 0 if agree else None


def _by_differences(case: Case, mode: Mode, steps, exact):
    """The verdict of differences, and the error of another derivative, relative to that which
    is admitted."""
    want, names, directions, errors = steps
    # Along one direction, a few entries may be off by more than all of them are.
    is_second = exact is not None
    tolerance = case.admitted(case.wide) * (3 if is_second else 1)
    scale = [10 * error / tolerance for error in errors]
    is_rounded = any(d.is_rounded for *_, d in case.differences)
    of = f"of values in {case.wide.rounded_to or 'float32'}" if is_rounded else "in float64"
    cause, have = None, mode.in_numbers(mode.by(case.wide))
    if is_second and not any(map(np.any, exact)):
        cause = _cause_of_a_stop(want, have, names)
    finding = compare(
        mode.check, "", want, have, names, tolerance, reference=f"finite differences {of}",
        scale=scale, note=_note(case, tolerance), along="cotangent", directions=directions,
        cause=cause,
    )  # fmt: skip
    relative = lambda other: (
        difference(want, other, names, entrywise=False, scale=scale).error / tolerance
    )
    return finding, relative


def _cause_of_a_stop(want: _Arrays, have: _Arrays, names: Sequence[str]) -> str | None:
    """Where the function changes and plain autodiff is zero: it is a solver, or rounds."""
    if any(not np.any(h) and np.any(w) for w, h in zip(want, have, strict=True)):
        return None  # a term is missing
    return (
        "plain autodiff is zero, and the function changes: a solver that stops at a tolerance\n"
        "  (take one near rounding), or the residual of `eqg.implicit` is\n"
        "  another equation (is it zero at the solution?), or give the meant `reference=`"
    )


def _has_given_transpose(case: Case) -> bool:
    """Whether there are linear maps in it with a transpose that the user wrote, which can't be
    removed: those of `linear_host_function` and of `jax.custom_derivatives.linear_call`."""
    program = jax.make_jaxpr(case.own.plain)(*case.subject.leaves)
    return any(e.primitive.name in ("eqg_linear", "linear_call") for e in equations(program))


def _against_what_was_asked_for(case: Case, mode: Mode, got: _Arrays):
    """Where a derivative was asked for, for this mode or for the other one."""
    failures = []
    options = case.options
    given = options.expected_tangent if mode.is_forward else options.expected_cotangent
    is_asked_for = given is not None or options.reference is not None
    for number, reference in enumerate(mode.references):
        want = outcome(mode.stack, mode.by(case.wide, number))
        if isinstance(want, Exception):
            if is_asked_for:
                return broke(mode.check, "the derivative that is expected", want), None
            continue  # a formula that can't be transposed
        finding = _compare(case, mode, number, got, want)
        if finding.verdict == PASSED:
            return finding, number
        if is_asked_for and mode.is_forward and _is_of_the_function(case, mode, got):
            cause = (
                "forward mode is the derivative of the function, as of every `custom_vjp`\n"
                "  without a `def_jvp`. Give it one, or skip what has forward mode:\n"
                '  `skip=("forward", "adjoint", "order")`'
            )
            finding = dataclasses.replace(finding, cause=cause)
        failures += [finding] if reference.is_binding else []
    if failures:
        return failures[0], None
    option = "expected_tangent" if mode.is_forward else "expected_cotangent"
    return skipped(mode.check, f"nothing was said about this mode: pass `{option}=` too"), None


def _is_of_the_function(case: Case, mode: Mode, got: _Arrays) -> bool:
    """Whether forward mode of a rule is autodiff of the function without it, and reverse mode
    is not."""
    side, w = case.wide, case.cotangents[0]
    ahead = outcome(mode.stack, lambda t: case.derivative(side, "jvp plain", t))
    back, pulled = (outcome(case.derivative, side, row, w) for row in ("vjp plain", "vjp"))
    if any(isinstance(x, Exception) for x in (ahead, back, pulled)):
        return False
    tolerance = case.admitted(side)
    error = difference(ahead, got, mode.names, entrywise=False).error
    return error <= tolerance < difference(back, pulled, case.names, entrywise=False).error


def _at_other_sizes(case: Case, mode: Mode, number: int) -> Iterator[Finding]:
    """Where the cotangent that was asked for need not be linear in the one that comes in: at
    much larger and much smaller ones, as a bound may lie far from those that are drawn."""
    options, side = case.options, case.wide
    is_declared = options.nonlinear and options.reference is not None
    if mode.is_forward or not (options.expected_cotangent is not None or is_declared):
        return
    # Their squares stay in the range of float16, too: a rule may compute a norm.
    exponents = [int(jnp.finfo(x.dtype).maxexp) // 2 - 4 for x in side.outputs]
    larger = 2.0 ** min(_MUCH_LARGER, *exponents)
    for factor, size in (
        (larger, f"{larger:g} times larger"),
        (1 / larger, f"{larger:g} times smaller"),
    ):
        scaled = lambda d, f=factor: lambda w: d([(x * f).astype(x.dtype) for x in w])
        want = mode.stack(scaled(mode.by(side, number)))
        if not are_finite(want):
            continue
        cause = (
            f"right for cotangents near one, wrong for {size} ones,\n"
            "  as if a bound were missing or had another value"
        )
        yield compare(
            mode.check, f"of {factor:g} times the cotangent", want,
            mode.stack(scaled(mode.by(side))), mode.names, case.admitted(side), cause=cause,
            reference=mode.references[number].name, along=mode.along,
            directions=mode.directions,
        )  # fmt: skip


# ---------------------------------------------------------------- in the user's precision


def _in_own_precision(case: Case, mode: Mode, number: int | None, is_known: bool):
    """Along a few directions, with the best of three references: what is expected in float64 is
    exact; in the user's precision it has the rounding errors that a rule may have, too; without
    these, the rule in float64 is a reference, as it has been checked."""
    own, wide = case.own, case.wide
    found = [mode.by(own)(d) for d in mode.drawn[:_LOW]]
    if not mode.is_forward:  # JAX itself checks the dtypes of tangents
        for name, x, ct in zip(case.names, case.subject.leaves, found[0], strict=True):
            if ct.dtype != x.dtype:
                text = f"the cotangent of {name} has dtype {ct.dtype}, {name} has {x.dtype}"
                yield failed("reverse", name, text)
    if own is wide:
        return
    sizes = np.array([[norm(as_real(x)) for x in arrays] for arrays in found])
    is_finite = bool(np.all(np.isfinite(sizes)))
    scales = (np.max(sizes, axis=0) - sizes).tolist() if is_finite else [[0.0] * sizes.shape[1]]
    tolerance = case.admitted(own)
    for direction, have, scale in zip(mode.drawn, found, scales, strict=False):
        ways = [mode.by(wide, number), mode.by(own, number)] if number is not None else []
        ways += [] if ways else [mode.by(wide)]
        row = mode.row if number is None else f"{mode.row} {number}"
        wider = lambda d=direction, row=row: max(
            case.measured(row, v, mode.names_out) for v in (d, *mode.drawn[:_LOW])
        )
        findings = []
        for way in ways:
            want = outcome(way, direction)
            if isinstance(want, Exception) or not are_finite(want):
                continue
            # A derivative of zero may be a rounding error of the direction.
            size = norm(np.array([norm(as_real(x)) for x in direction]))
            zero = float(jnp.finfo(have[0].dtype).eps) * size / max(tolerance, 1e-30)
            more = [s if np.any(x) else s + zero for s, x in zip(scale, want, strict=True)]
            findings.append(compare(
                mode.check, "in your own precision", want, have, mode.names_out, tolerance,
                wider=wider, cause=f"right in float64, wrong in {case.subject.leaves[0].dtype}",
                scale=more,
            ))  # fmt: skip
            if findings[-1].verdict == PASSED:
                break
        if not findings:
            yield skipped(mode.check, "no reference in your own precision")
            return
        finding = findings[-1] if findings[-1].verdict == PASSED else findings[0]
        if finding.verdict == FAILED:
            finding = _explained(case, mode, number, direction, finding)
        if is_known or finding.verdict == FAILED:
            yield finding
        if finding.verdict != PASSED:
            return


def _explained(case: Case, mode: Mode, number, direction, finding: Finding) -> Finding:
    """The failure in float64 along this direction, if there is one: then the mistake has
    nothing to do with the precision. Or none, if rounding changes plain autodiff as much."""
    if number is None:
        return finding
    wide, own = (outcome(mode.by(side, number), direction) for side in (case.wide, case.own))
    if isinstance(wide, Exception):
        return finding
    got = outcome(mode.by(case.wide), direction)
    other = compare(
        mode.check, "of another direction", wide, got, mode.names_out,
        case.admitted(case.wide), reference=mode.references[number].name,
    )  # fmt: skip
    if other.verdict == FAILED:
        return other
    if not isinstance(own, Exception) and finding.error is not None:
        noise = difference(wide, own, mode.names_out, entrywise=False).error
        if 0.05 < finding.error <= 10 * noise:
            why = f"rounding changes plain autodiff by {noise:.0e} of its size"
            return skipped(mode.check, f"not compared in your own precision: {why}")
    return finding
