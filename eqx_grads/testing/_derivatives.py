"""The checks `forward` and `reverse`: the first derivative against a reference.

The reference is what is expected: autodiff of the function without its rule, of `reference`,
or a formula. If a rule disagrees with plain autodiff, finite differences decide who is right:
plain autodiff stops at a `stop_gradient`, and may be NaN. The rule is judged in float64. In the
user's precision, it is compared with itself, as only rounding is left to look at.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import equations
from .._rules.custom_vjp import ReverseRules
from ._case import are_finite, Case
from ._compare import as_real, difference, norm, pairing, SMALL_IN_FLOAT64
from ._differences import FailsNearby
from ._mistakes import Mistake
from ._outcome import in_one_line, outcome
from ._random_tangents import only
from ._report import broke, compare, FAILED, failed, Finding, NO_REFERENCE, PASSED, skipped
from ._subject import fitted


_Arrays = list[Any]
_RANDOM = 3  # directions
_ALONE = 12  # with more leaves, all are perturbed together; so it is with outputs
_LARGE = 2.0**12  # cotangents are so much larger than those that are drawn


def forward(case: Case) -> Iterator[Finding]:
    """Forward mode against its reference."""
    if why := case.why_no_forward():
        yield skipped("forward", why)
    elif case.outputs:
        yield from _check(case, Mode(case, "forward"))


def reverse(case: Case) -> Iterator[Finding]:
    """Reverse mode against its reference."""
    if case.has_reverse:
        yield from _check(case, Mode(case, "reverse"))
    elif case.outputs:
        why = "JAX says that this function has no reverse mode"
        do = 'where that is meant, say `skip=("reverse",)`'
        yield failed("reverse", "reverse mode", f"{why}; {do}")


class Mode:
    """One mode of differentiation.

    - `row`: the row of a `Side` with the derivative by the rule.
    - `references`: the expected derivatives; their rows are `row` with their number.
    - `directions`: those that it is compared along, each with the name of the leaf that is
        perturbed, or of the output that is used. Of a number, all directions are the same one.
    """

    def __init__(self, case: Case, check: str):
        self.check, self.case, options = check, case, case.options
        self.is_forward = check == "forward"
        self.row = "jvp" if self.is_forward else "vjp"
        self.references = case.wide.references[not self.is_forward]
        self.drawn = case.tangents if self.is_forward else case.cotangents
        names, values = case.names, case.subject.leaves
        if not self.is_forward:
            names, values = case.output_names, case.outputs
        self.directions = [("all", d) for d in self.drawn[:_RANDOM]]
        if len(names) <= _ALONE:
            self.directions = [
                (name, only(self.drawn[k], [i])) for k in range(_RANDOM)
                for i, name in enumerate(names) if k < values[i].size
            ]  # fmt: skip
        option = "tangents" if self.is_forward else "cotangents"
        if (given := getattr(options, option)) is not None:
            given = fitted(option, given, values, names)
            self.directions.append((f"the {option} given", given))
        # Where the cotangent that was asked for need not be linear in the one that comes in, a
        # bound may lie far from those that are drawn.
        is_bounded = options.expected_cotangent or (options.nonlinear and options.reference)
        self.factors = (_LARGE, 1 / _LARGE) if is_bounded and not self.is_forward else ()

    def labels(self, names: Iterable[str], leaves: Sequence[str] = ()) -> list[str]:
        """What derivatives along directions with these names are called: by the leaf, and by
        the output if there are several."""
        outs, leaves = self.case.output_names, leaves or self.case.names
        if self.is_forward:
            pairs = [(name, out) for name in names for out in outs]
        else:
            pairs = [(leaf, name) for name in names for leaf in leaves]
        return [f"{leaf} (in {out})" if len(outs) > 1 else leaf for leaf, out in pairs]

    def along(self, directions: Iterable[_Arrays], number: int | None = None) -> _Arrays:
        """The derivative by the rule, or by a reference, in float64."""
        row = self.row if number is None else f"{self.row} {number}"
        return [x for d in directions for x in self.case.derivative(row, d)]

    def compare(self, number: int, factor: float = 1) -> Finding:
        """With a reference. `factor`: multiplies the directions."""
        case, reference = self.case, self.references[number]
        directions = [[(x * factor).astype(x.dtype) for x in d] for _, d in self.directions]
        names = self.labels(name for name, _ in self.directions)
        want, got = (self.along(directions, k) for k in (number, None))
        wider = lambda: case.measured(case.noise(f"{self.row} {number}", self.drawn[0]))
        tolerance = case.admitted(exact=reference.is_autodiff)
        return compare(
            self.check, "" if factor == 1 else f"of {factor:g} times the cotangent", want, got,
            names, tolerance,
            cause=None if factor == 1 else "as if a bound were missing or had another value",
            wider=wider if reference.is_autodiff and case.own is case.wide else None,
            mistakes=lambda: self._mistakes(directions, names, want), reference=reference.name,
            primals=None if self.is_forward else case.subject.leaves * len(directions),
            note=_note(case, tolerance), small=SMALL_IN_FLOAT64,
        )  # fmt: skip

    def _mistakes(self, directions: list[_Arrays], names, want: _Arrays) -> Iterator[Mistake]:
        """What known mistakes would give."""
        case = self.case
        for name, array in zip(names, want, strict=True):
            yield Mistake(f"it is what belongs to {name}", array)
        # The results of the other mode for these directions, where the spaces are the same.
        zeros = only(case.subject.leaves, [])
        for i, leaf in enumerate(case.subject.leaves):
            if [(x.shape, x.dtype) for x in case.outputs] != [(leaf.shape, leaf.dtype)]:
                continue
            for d in directions:
                x = (
                    case.derivative("vjp 0", [d[i]])[i] if self.is_forward
                    else case.derivative("jvp 0", [*zeros[:i], d[0], *zeros[i + 1 :]])[0]
                )  # fmt: skip
                yield Mistake("transposed: a Jacobian and its transpose were confused", x)

    def differences(self) -> tuple[_Arrays, list[float], list[str], Callable[..., _Arrays]]:
        """What differences give, their errors, the names of these arrays, and a function that
        returns a derivative in the same form: along the directions of differences, and in
        reverse mode `<v, J' w>`."""
        found = self.case.differences
        leaves = [name for name, *_ in found]
        if self.is_forward:
            want = [x for *_, d in found for x in d.tangents_out]
            errors = [error for *_, d in found for error in d.errors]
            of = lambda number: [x for _, t, _ in found for x in self.along([t], number)]
            return want, errors, self.labels(leaves), of
        ws = [w for _, w in self.directions]
        sizes = lambda w: [norm(as_real(x)) for x in w]
        pair = lambda xs, ys: np.asarray(pairing(xs, ys))
        want = [pair(d.tangents_out, w) for w in ws for *_, d in found]
        errors = [float(np.dot(d.errors, sizes(w))) for w in ws for *_, d in found]
        of = lambda number: [
            pair(cts, t) for w in ws for cts in [self.along([w], number)] for _, t, _ in found
        ]  # fmt: skip
        return want, errors, self.labels((name for name, _ in self.directions), leaves), of


# ---------------------------------------------------------------- in float64


def _check(case: Case, mode: Mode) -> Iterator[Finding]:
    finding, number = judge(case, mode)
    yield dataclasses.replace(finding, where=finding.where or case.wide.where_rounded)
    if finding.verdict != FAILED:
        others = _in_own_precision(case, mode, number)
        yield from (f for f in others if finding.verdict == PASSED or f.verdict == FAILED)


def _note(case: Case, tolerance: float) -> str:
    """What a tolerance is that of, if it is not that of float64."""
    text = case.wide.where_rounded
    return f"{text}, compared with a tolerance of {tolerance:.0e}" if text else ""


def judge(case: Case, mode: Mode) -> tuple[Finding, int | None]:
    """The verdict, and the number of the reference that the rule agrees with."""
    options, failures, autodiff, error = case.options, [], None, None
    is_given = mode.check == "reverse" and _has_given_transpose(case)
    for number, reference in enumerate(mode.references):
        found = outcome(mode.compare, number)
        for factor in mode.factors:
            if getattr(found, "verdict", "") == PASSED:
                found = outcome(mode.compare, number, factor)
        if isinstance(found, Exception):
            error = found  # or a formula that can't be transposed
        elif found.verdict == PASSED and not is_given:
            return found, number
        else:
            failures += [found] if reference.is_binding else []
            autodiff = found
    if not options.is_wrong_on_purpose:
        return _against_differences(case, mode, autodiff, error)
    option = "expected_tangent" if mode.is_forward else "expected_cotangent"
    is_asked_for = options.reference is not None or getattr(options, option) is not None
    if failures:
        is_of_function = is_asked_for and mode.is_forward and forward_is_of_function(case)
        cause = (
            "forward mode is the derivative of the function, as of every `custom_vjp`\n"
            "  without a `def_jvp`. Give it one, or skip what has forward mode:\n"
            '  `skip=("forward", "adjoint", "order")`'
        )
        first = failures[0]
        return dataclasses.replace(first, cause=cause) if is_of_function else first, None
    if is_asked_for and error is not None:
        return broke(mode.check, "the derivative that is expected", error), None
    return skipped(mode.check, f"nothing was said about this mode: pass `{option}=` too"), None


def _against_differences(
    case: Case, mode: Mode, autodiff: Finding | None, error: Exception | None
) -> tuple[Finding, int | None]:
    """The verdict where a rule disagrees with autodiff, or there is none. If differences agree
    with autodiff, the rule is wrong. If not, it has to agree with differences.

    - `autodiff`: the verdict of autodiff; `None` if it raises `error`.
    """
    steps = outcome(mode.differences)
    is_zero = autodiff is not None and not any(map(np.any, mode.along(mode.drawn[:1], 0)))
    is_error = isinstance(steps, Exception)
    why = [f"autodiff without the rule raises {type(error).__name__}"] if error else []
    if is_error or not all(d.is_trusted for *_, d in case.differences):
        # A derivative of zero may be that of a `stop_gradient`, as of a solver.
        if autodiff is not None and not is_zero:
            return autodiff, 0
        if isinstance(steps, FailsNearby):
            why = [str(steps)]
        elif is_error:
            why += [f"finite differences raise {in_one_line(steps)}"]
        else:
            why += [d.why for *_, d in case.differences if not d.is_trusted][:1]
        return skipped(mode.check, f"{NO_REFERENCE}: {', and '.join(why)}"), None
    want, errors, names, derivative = steps
    # Along one direction, a few entries may be off by more than all of them are.
    tolerance = case.admitted() * (1 if autodiff is None else 3)
    scale = [10 * error / tolerance for error in errors]
    if autodiff is not None:
        found = difference(want, derivative(0), names, entrywise=False, scale=scale)
        if found.error <= tolerance:
            return autodiff, 0
    have = derivative(None)
    is_rounded = any(d.is_rounded for *_, d in case.differences)
    of = f"of values in {case.wide.rounded_to or 'float32'}" if is_rounded else "in float64"
    finding = compare(
        mode.check, "", want, have, names, tolerance, reference=f"finite differences {of}",
        scale=scale, note=_note(case, tolerance),
        cause=_cause_of_a_stop(want, have) if is_zero else None,
    )  # fmt: skip
    return finding, None


def _cause_of_a_stop(want: _Arrays, have: _Arrays) -> str | None:
    """Where the function changes and plain autodiff is zero: it is a solver, or rounds."""
    is_missing = any(not np.any(h) and np.any(w) for w, h in zip(want, have, strict=True))
    return (
        None
        if is_missing
        else (
            "plain autodiff is zero, and the function changes: a solver that stops at a tolerance\n"
            "  (take one near rounding), or the residual of `eqg.implicit` is\n"
            "  another equation (is it zero at the solution?), or give the meant `reference=`"
        )
    )


def _has_given_transpose(case: Case) -> bool:
    """Whether there are linear maps in it with a transpose that the user wrote, which can't be
    removed: those of `linear_host_function` and of `jax.custom_derivatives.linear_call`."""
    program = outcome(jax.make_jaxpr(case.own.plain), *case.subject.leaves)
    found = equations(program) if isinstance(program, ClosedJaxpr) else ()
    return any(e.primitive.name in ("eqg_linear", "linear_call") for e in found)


def forward_is_of_function(case: Case) -> bool:
    """Whether the rule is for reverse mode, and forward mode is autodiff of the function."""
    rules = getattr(getattr(case.subject.fn, "__func__", case.subject.fn), "_rules", None)
    return isinstance(rules, ReverseRules) and rules.jvp_rule is None


# ---------------------------------------------------------------- in the user's precision


def _in_own_precision(case: Case, mode: Mode, number: int | None) -> Iterator[Finding]:
    """The derivative by the rule along a few directions, with that in float64. Rounding may
    change it by what it changes the reference."""
    own, directions = case.own, mode.drawn[:_RANDOM]
    have = [x for d in directions for x in case.derivative(mode.row, d, side=own)]
    if not mode.is_forward:  # JAX itself checks the dtypes of tangents
        for name, x, ct in zip(case.names, case.subject.leaves, have, strict=False):
            if ct.dtype != x.dtype:
                text = f"the cotangent of {name} has dtype {ct.dtype}, {name} has {x.dtype}"
                yield failed("reverse", name, text)
    if own is case.wide:
        return
    want = mode.along(directions)
    if not are_finite(want):
        yield skipped(mode.check, "no reference in your own precision")
        return
    row = mode.row if number is None else f"{mode.row} {number}"
    names = case.output_names if mode.is_forward else case.names
    noise = ft.cache(lambda: max(case.noise(row, d) for d in directions))
    finding = compare(
        mode.check, "in your own precision", want, have, names * len(directions), own.tolerance,
        wider=lambda: case.measured(noise()),
        note=f"right in float64, wrong in {case.subject.leaves[0].dtype}",
    )  # fmt: skip
    is_noise = number is not None and (finding.error or np.inf) <= 10 * noise()
    if finding.verdict == FAILED and is_noise:
        why = f"rounding changes plain autodiff by {noise():.0e} of its size"
        finding = skipped(mode.check, f"not compared in your own precision: {why}")
    yield finding
