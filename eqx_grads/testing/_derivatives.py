"""The checks `forward` and `reverse`: the first derivative against a reference.

The reference is what is expected: autodiff of the function without its rule, of `reference`,
or a formula. If a rule disagrees with plain autodiff, finite differences decide who is right:
plain autodiff stops at a `stop_gradient`, and may be NaN. The rule is judged in float64. In the
user's precision, it is compared with itself, as only rounding is left to look at.
"""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._errors import first_line, rule_error, unlike
from .._jaxprs.operands import fill
from .._jaxprs.structure import holds
from ._case import Case
from ._compare import are_finite, as_double, difference, norm, pairing, SMALL_IN_FLOAT64
from ._differences import Samples
from ._mistakes import Mistake
from ._oracle import At
from ._outcome import outcome
from ._random_tangents import only
from ._report import broke, compare, FAILED, failed, Finding, NO_REFERENCE, PASSED, skipped


_Arrays = list[Any]
_RANDOM = 3  # directions
_ALONE = 12  # with more leaves, all are perturbed together; so it is with outputs
_MOST_AT_KINK = 24  # entries of all leaves
_LARGE = 2.0**12  # cotangents are so much larger than those that are drawn


def forward(case: Case, check: str = "forward") -> Iterator[Finding]:
    """One mode against its reference."""
    finding, is_expected = judge(case, check)
    yield finding
    if finding.verdict != FAILED:
        others = _in_own_precision(case, _Mode(case, check), is_expected)
        yield from (f for f in others if finding.verdict == PASSED or f.verdict == FAILED)


def reverse(case: Case) -> Iterator[Finding]:
    if case.has_reverse:
        yield from forward(case, "reverse")
    else:
        why = "JAX says that this function has no reverse mode"
        do = 'where that is meant, say `skip=("reverse",)`'
        yield failed("reverse mode", f"{why}; {do}")


class _Mode:
    """One mode of differentiation.

    - `row`: the row of a `Side` with the derivative by the rule.
    - `expected`: the row with the derivative that is expected.
    - `directions`: the directions that it is compared along, each with the name of the leaf
        that is perturbed, or of the output that is used. A number has only one direction.
    """

    def __init__(self, case: Case, check: str):
        self.case, self.is_forward = case, check == "forward"
        option = "tangents" if self.is_forward else "cotangents"
        self.row = "jvp" if self.is_forward else "vjp"
        self.expected = f"{self.row} expected"
        ends = (case.names, case.subject.leaves), (case.output_names, case.outputs)
        (names, values), (self.to, _) = ends if self.is_forward else ends[::-1]
        self.drawn = getattr(case, option)[:_RANDOM]
        self.directions = [("all", d) for d in self.drawn]
        if len(names) <= _ALONE:
            self.directions = [
                (name, only(drawn, [i]))
                for k, drawn in enumerate(self.drawn)
                for i, name in enumerate(names)
                if k < values[i].size
            ]
        if (given := getattr(case.options, option)) is not None:
            given = list(map(np.asarray, jax.tree.leaves(given)))
            text = "the value is {}, the array {}"
            if where := unlike(list(values), given, option, text, np.shape):
                do = "Give an array for each value, with a number for each entry."
                raise rule_error(f"`{option}` does not fit the values.", *where, do=do)
            self.directions.append((f"the {option} given", given))

    def labels(self, pairs: Iterable[tuple[str, str]]) -> list[str]:
        """The names of derivatives: the leaf, and the output if there are several."""
        is_one = len(self.case.outputs) == 1
        return [leaf if is_one else f"{leaf} (in {out})" for leaf, out in pairs]

    def along(self, directions: Iterable[_Arrays], row: str = "") -> _Arrays:
        """The derivative by the rule, or another row, in float64."""
        return [x for d in directions for x in self.case.derivative(row or self.row, d)]

    def compare(self, factor: float = 1) -> Finding:
        """With what is expected. `factor`: multiplies the directions."""
        case = self.case
        directions = [[x * factor for x in d] for _, d in self.directions]
        ends = itertools.product([name for name, _ in self.directions], self.to)
        names = self.labels(ends if self.is_forward else ((b, a) for a, b in ends))
        want, got = (self.along(directions, row) for row in (self.expected, self.row))
        tolerance = case.admitted(exact=True)
        if case.own is case.wide:
            tolerance += case.measured(self.expected, self.drawn[:1])
        return compare(
            "" if factor == 1 else f"of {factor:g} times the cotangent", want, got,
            names, tolerance,
            cause=None if factor == 1 else "as if a bound were missing or had another value",
            mistakes=lambda: self._mistakes(directions, names, want),
            note=case.reference,
            primals=None if self.is_forward else case.subject.leaves * len(directions),
            small=SMALL_IN_FLOAT64,
        )  # fmt: skip

    def _mistakes(self, directions: list[_Arrays], names, want: _Arrays) -> Iterator[Mistake]:
        """What known mistakes would give."""
        case = self.case
        for name, array in zip(names, want, strict=True):
            yield Mistake(f"it is what belongs to {name}", array)
        if any(map(np.iscomplexobj, case.subject.leaves)):
            along = "tangent" if self.is_forward else "cotangent"
            for x in self.along([[np.conj(x) for x in d] for d in directions], self.expected):
                yield Mistake(f"the {along} was conjugated", x)
                yield Mistake(f"what multiplies the {along} was conjugated", x.conj())
        # The results of the other mode for these directions, where the spaces are the same.
        space = lambda xs: [(x.shape, x.dtype) for x in xs]
        leaves, outputs = case.subject.leaves, space(case.outputs)
        same = [i for i, x in enumerate(leaves) if space([x]) == outputs]
        for i, d in itertools.product(same, directions):
            if self.is_forward:
                x = case.derivative("vjp expected", [d[i]])[i]
            else:
                tangents = fill(only(case.subject.leaves, []), [i], [d[0]])
                x = case.derivative("jvp expected", tangents)[0]
            yield Mistake("transposed: a Jacobian and its transpose were confused", x)

    def differences(self) -> tuple[_Arrays, list[float], list[str], Callable[[str], _Arrays]]:
        """`<w, J t>` by differences, for the cotangents `w` of reverse mode and the directions
        `t` of differences: the numbers, their errors, their names, and the numbers of a row."""
        found, ways = self.case.differences, _Mode(self.case, "reverse").directions
        terms = [(w, t, d) for _, w in ways for _, t, d in found]
        pair = lambda xs, ys: np.asarray(pairing(xs, ys))
        want = [pair(d.tangents_out, w) for w, _, d in terms]
        errors = [float(np.dot(d.errors, list(map(norm, w)))) for w, _, d in terms]
        names = self.labels((leaf, out) for out, _ in ways for leaf, *_ in found)
        ends = [(t, w) if self.is_forward else (w, t) for w, t, _ in terms]
        return want, errors, names, lambda row: [pair(self.along([a], row), b) for a, b in ends]


# ---------------------------------------------------------------- in float64


def judge(case: Case, check: str) -> tuple[Finding, bool]:
    """The verdict, and whether the rule agrees with autodiff of what is expected."""
    mode, options = _Mode(case, check), case.options
    # A bound of an expected cotangent may lie far from the cotangents that are drawn.
    is_bounded = options.nonlinear and options.reference is not None and not mode.is_forward
    found: Any = None
    is_passed = False
    for factor in (1, _LARGE, 1 / _LARGE) if is_bounded else (1,):
        found = outcome(mode.compare, factor)
        is_passed = getattr(found, "verdict", "") == PASSED
        if not is_passed:
            break
    if is_passed and (mode.is_forward or not _has_given_transpose(case)):
        return found, True
    if options.reference is None:
        finding, is_expected = _against_differences(case, mode, found)
        if finding.verdict == FAILED and outcome(_is_at_kink, case, mode) is True:
            return Finding("", PASSED, "at a kink"), False
        return finding, is_expected
    if isinstance(found, Exception):
        if f"{check}-mode" in str(found):
            return skipped(f"`reference` has no {check} mode"), False
        return broke("the derivative that is expected", found), False
    if mode.is_forward and case.forward_is_of_function:
        found = dataclasses.replace(found, cause=_OF_FUNCTION)
    return found, is_passed


def _is_at_kink(case: Case, mode: _Mode) -> bool:
    """Whether the rule is between the slopes of both sides along each entry. Along all entries
    together, shifted or scaled, a tie moves as a whole and may have one slope: then that.

    Of few real entries only: each one is looked at.
    """
    x, side = list(map(as_double, case.x)), case.wide
    n = sum(leaf.size for leaf in x)
    if n > _MOST_AT_KINK or side.rounded_to is not None or any(map(np.iscomplexobj, x)):
        return False
    if not any(d.bends for *_, d in case.differences):
        return False
    flat, kinks = np.concatenate([leaf.ravel() for leaf in x]), 0
    ends = np.cumsum([leaf.size for leaf in x])[:-1]
    for number, way in enumerate((*np.eye(n), np.ones(n), flat)):
        parts = zip(np.split(way, ends), x, strict=True)
        t = [part.reshape(leaf.shape) for part, leaf in parts]
        moved = lambda h, t=t: [leaf + h * part for leaf, part in zip(x, t, strict=True)]
        values = ft.cache(lambda h, at=moved: side.one("value", side.rows["f"], At(at(h))))
        for _, w in _Mode(case, "reverse").directions:
            sides = Samples(lambda h, w=w, at=values: pairing(at(h), w)).sides
            along, other = (t, w) if mode.is_forward else (w, t)
            is_right = sides.admits(pairing(mode.along([along]), other))
            if not is_right and (number < n or not sides.is_kink):
                return False
            kinks += sides.is_kink
    return kinks > 0


_OF_FUNCTION = """forward mode is the derivative of the function, as of every `custom_vjp`
  without a `def_jvp`. Give it one, or skip what has forward mode:
  `skip=("forward", "adjoint", "order")`"""


def _against_differences(
    case: Case, mode: _Mode, found: Finding | Exception
) -> tuple[Finding, bool]:
    """The verdict where a rule disagrees with autodiff, or autodiff does not work. If
    differences agree with autodiff, the rule is wrong. If not, it has to agree with
    differences.

    - `found`: the verdict of autodiff, or what it raises.
    """
    autodiff = None if isinstance(found, Exception) else found
    steps = outcome(mode.differences)
    # A derivative of zero may come from a `stop_gradient`, as in a solver.
    of_autodiff = [] if autodiff is None else mode.along(mode.drawn[:1], mode.expected)
    is_zero = autodiff is not None and not any(map(np.any, of_autodiff))
    known = [] if isinstance(steps, Exception) else [d for *_, d in case.differences]
    doubts = [d.why for d in known if d.why]
    if doubts or not known:
        if autodiff is not None and not is_zero:
            return autodiff, True
        why = doubts[0] if doubts else first_line(steps)
        return skipped(f"{NO_REFERENCE}: {why}"), False
    assert not isinstance(steps, Exception)
    want, errors, names, derivative = steps
    # Along one direction, a few entries may be off by more than all of them are.
    tolerance = case.admitted() * (1 if autodiff is None else 3)
    scale = [10 * error / tolerance for error in errors]
    have = derivative(mode.row)
    if autodiff is not None:
        expected = derivative(mode.expected)

        def agree(a, b, i=slice(None)):
            options = {"entrywise": False, "scale": scale[i]}
            return difference(a[i], b[i], names[i], **options).error <= tolerance

        if agree(want, expected):
            return autodiff, True
        # Beside another fault, what is as in autodiff is none: it may be stopped on purpose.
        every = [slice(i, i + 1) for i in range(len(names))]
        stopped = [i for i in every if agree(expected, have, i)]
        if not all(i in stopped or agree(want, have, i) for i in every):
            for i in stopped:
                have[i] = want[i]
    is_rounded = any(d.is_rounded for d in known)
    of = f"of values in {case.wide.rounded_to or 'float32'}" if is_rounded else "in float64"
    is_missing = any(w and not h for w, h in zip(want, have, strict=True))
    cause = _OF_A_STOP if is_zero and not is_missing else None
    note = f"expected: finite differences {of}"
    return compare("", want, have, names, tolerance, note=note, scale=scale,
                   cause=cause), False  # fmt: skip


# Where the function changes and plain autodiff is zero: it is a solver, or rounds.
_OF_A_STOP = (
    "plain autodiff is zero, and the function changes: a solver that stops at a tolerance\n"
    "  (take one near rounding), or the residual of `eqg.implicit` is\n"
    "  another equation (is it zero at the solution?), or give the meant `reference=`"
)


def _has_given_transpose(case: Case) -> bool:
    """Whether there are linear maps in it with a transpose that the user wrote, which can't be
    removed: from `linear_host_function` and `jax.custom_derivatives.linear_call`."""
    program = outcome(jax.make_jaxpr(case.own.plain), *case.subject.leaves)
    return isinstance(program, ClosedJaxpr) and holds(program, "eqg_linear", "linear_call")


# ---------------------------------------------------------------- in the user's precision


def _in_own_precision(case: Case, mode: _Mode, is_expected: bool) -> Iterator[Finding]:
    """The derivative by the rule along a few directions, compared with float64. Rounding may
    change it by as much as it changes the reference."""
    own, directions = case.own, mode.drawn
    have = [x for d in directions for x in case.derivative(mode.row, d, side=own)]
    if not mode.is_forward:  # JAX itself checks the dtypes of tangents
        for name, x, ct in zip(case.names, case.subject.leaves, have, strict=False):
            if ct.dtype != x.dtype:
                text = f"the cotangent of {name} has dtype {ct.dtype}, {name} has {x.dtype}"
                yield failed(name, text)
    if own is case.wide or not are_finite(want := mode.along(directions)):
        return
    rounding = 10 * case.noise(mode.expected, directions) if is_expected else 0.0
    yield compare(
        "in your own precision", want, have, mode.to * len(directions),
        own.tolerance + (rounding or case.measured(mode.row, directions)),
        note=f"right in float64, wrong in {case.subject.leaves[0].dtype}",
    )  # fmt: skip
