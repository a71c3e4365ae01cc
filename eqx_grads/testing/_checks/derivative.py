"""The checks `forward` and `reverse`: the first derivative against two references.

The references are plain autodiff of the function without its rule, which is exact, and finite
differences, which use no rule. Where these two disagree (a `stop_gradient` in the function, a
NaN of plain autodiff), the rule has to agree with one of them.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._case import Case, DirectionalDerivative, Precision
from .._compare import as_real, difference, pairing
from .._expected import is_given, Witness, witnesses
from .._findings import broke, compare, failed, skipped
from .._likely_cause import Hypothesis
from .._random_tangents import basis, basis_names, only
from .._report import FAILED, Finding, PASSED, SKIPPED


_FULL_JACOBIAN = 16  # the number of entries up to which every unit vector is a direction
_RANDOM = 2  # directions for each leaf above it
_LEAVES = 12  # above this, all leaves are perturbed together
_TRUSTED = 1e-3  # the largest estimated error of finite differences that are a reference

_Arrays = list[Any]


def forward(case: Case) -> Iterator[Finding]:
    """Forward mode against both references."""
    if not case.own.outputs:
        yield skipped("forward", "no output has a derivative")
    elif not case.offers_forward:
        why = "reverse mode only, as of every `jax.custom_vjp`"
        yield skipped("forward", f"{why}; `eqx_grads.custom_vjp` has both modes")
    else:
        yield from _check(_Forward(case))


def reverse(case: Case) -> Iterator[Finding]:
    """Reverse mode against both references."""
    if not case.own.outputs:
        yield skipped("reverse", "no output has a derivative")
    elif not case.offers_reverse:
        why = "JAX says that this function has no reverse mode"
        do = 'where that is meant, say `skip=("reverse",)`'
        yield failed("reverse", "reverse mode", f"{why}; {do}")
    else:
        yield from _check(_Reverse(case))


# ---------------------------------------------------------------- the two modes


class _AbstractMode(abc.ABC):
    """One mode of differentiation, with the directions along which it is compared.

    - `names`: what the arrays of `along_directions` are called.
    - `names_out`: what the arrays of one derivative are called.
    - `directions`: for each array of `along_directions`, what its directions are called.
    - `primals`: for each array of `along_directions`, the values that it is a cotangent of.
    """

    check: str
    case: Case
    precision: Precision
    names: Sequence[str]
    names_out: Sequence[str]
    along: str
    directions: Sequence[Sequence[str]]
    primals: _Arrays | None
    witness: Witness
    # The rule agreed with finite differences, and autodiff of the function with neither.
    autodiff_is_refuted: bool = False

    def expected(self, precision: Precision, direction: _Arrays) -> _Arrays:
        """The expected derivative."""
        return self.witness.derivative(precision, direction)

    @abc.abstractmethod
    def rule(self, precision: Precision, direction: _Arrays) -> _Arrays:
        """The derivative that the rule gives."""

    @abc.abstractmethod
    def autodiff_at(self, leaves: _Arrays) -> _Arrays:
        """Autodiff of the reference at other leaves, along some direction."""

    @abc.abstractmethod
    def along_directions(self, derivative: Callable[[_Arrays], _Arrays]) -> _Arrays:
        """A derivative along all directions, stacked."""

    @abc.abstractmethod
    def hypotheses(self, want: _Arrays) -> list[Hypothesis]:
        """What known mistakes would give in the place of `want`."""

    @abc.abstractmethod
    def random_direction(self) -> _Arrays:
        """A direction in the user's precision."""

    @abc.abstractmethod
    def convert(self, precision: Precision, direction: _Arrays) -> _Arrays:
        """A direction in another precision."""

    @abc.abstractmethod
    def differences(self) -> "_Differences":
        """Finite differences, in a form that derivatives of this mode can be brought into."""

    @abc.abstractmethod
    def wrong_dtypes(self, derivative: _Arrays) -> list[Finding]:
        """Failures for arrays that do not have the dtype of their space."""


class _Differences(NamedTuple):
    """Finite differences along some directions.

    - `want`, `names`: the arrays and their names.
    - `error`: the largest estimated relative error.
    - `in_form`: brings `rule` or `expected` of a mode into the same form.
    """

    want: _Arrays
    names: list[str]
    error: float
    in_form: Callable[[Callable[..., _Arrays]], _Arrays]


class _Forward(_AbstractMode):
    check, along = "forward", "tangent"

    def __init__(self, case: Case):
        (self.witness, *_) = witnesses("forward", case.options)
        self.case, self.precision, self.primals = case, case.precision, None
        self._by_leaf = _tangents_by_leaf(case)
        outputs = case.output_names
        self.names = [part.name for part in self._by_leaf for _ in outputs]
        self.directions = [list(part.tangents) for part in self._by_leaf for _ in outputs]
        if len(outputs) > 1:
            pairs = [(part.name, out) for part in self._by_leaf for out in outputs]
            self.names = [f"{name} (in {out})" for name, out in pairs]
        self.names_out = case.output_names

    def rule(self, precision: Precision, direction: _Arrays) -> _Arrays:
        return precision.rule.jvp(direction)

    def autodiff_at(self, leaves: _Arrays) -> _Arrays:
        tangents = self.precision.like_leaves(self.case.eager.tangents)
        return self.precision.reference.jvp(tangents, leaves)

    def along_directions(self, derivative: Callable[[_Arrays], _Arrays]) -> _Arrays:
        """For each leaf and each output, the derivatives along the tangents of the leaf."""
        columns = []
        for part in self._by_leaf:
            tangents = part.tangents.values()
            outs = [derivative(self.precision.like_leaves(t)) for t in tangents]
            columns += [np.stack(column) for column in zip(*outs, strict=True)]
        return columns

    def hypotheses(self, want: _Arrays) -> list[Hypothesis]:
        conjugated = self.along_directions(self._expected_of_conjugate)
        cause = "the tangent was conjugated"
        return [
            *_swapped(self.names, want),
            *self._transposed(),
            *(Hypothesis(cause, array) for array in conjugated),
        ]

    def _expected_of_conjugate(self, tangents: _Arrays) -> _Arrays:
        return self.expected(self.precision, [np.conj(t) for t in tangents])

    def _transposed(self) -> list[Hypothesis]:
        """The results of reverse mode for these directions, where the spaces are the same."""
        case, p = self.case, self.precision
        leaves = case.subject.leaves
        if len(self._by_leaf) != len(leaves):
            return []
        (pull, *_) = witnesses("reverse", case.options)
        found = []
        for i, (leaf, part) in enumerate(zip(leaves, self._by_leaf, strict=True)):
            tangents = part.tangents.values()
            if _same_space([leaf], case.own.outputs):
                rows = [pull.derivative(p, p.like_outputs([t[i]]))[i] for t in tangents]
                found.append(Hypothesis(_TRANSPOSED, np.stack(rows)))
        return found

    def random_direction(self) -> _Arrays:
        return self.case.tangents()

    def convert(self, precision: Precision, direction: _Arrays) -> _Arrays:
        return precision.like_leaves(direction)

    def differences(self) -> _Differences:
        """Finite differences as they are."""
        parts, p = self.case.finite_differences, self.precision

        def in_form(derivative):
            return [d for part in parts for d in derivative(p, p.like_leaves(part.tangents))]

        want = [d for part in parts for d in part.tangents_out]
        names = [part.name for part in parts for _ in part.tangents_out]
        return _Differences(want, names, _largest_error(parts), in_form)

    def wrong_dtypes(self, derivative: _Arrays) -> list[Finding]:
        return []  # JAX itself checks the dtypes of tangents


class _Reverse(_AbstractMode):
    check, along = "reverse", "cotangent"

    def __init__(self, case: Case):
        (self.witness, *_) = witnesses("reverse", case.options)
        self.case, self.precision = case, case.precision
        self._cotangents = _named_basis(case.own.outputs, case.output_names)
        # Unit vectors are exact in every precision, so they do not show where some is lost.
        for number in range(1, _RANDOM + 1):
            self._cotangents[f"random {number}"] = case.cotangents()
        if case.options.cotangents is not None:
            given = [np.asarray(w) for w in jax.tree.leaves(case.options.cotangents)]
            self._cotangents["as given"] = given
        self.names = self.names_out = case.names
        self.directions = [list(self._cotangents)] * len(self.names)
        n = len(self._cotangents)
        self.primals = [
            np.broadcast_to(np.asarray(x), (n, *np.shape(x))) for x in case.subject.leaves
        ]

    def rule(self, precision: Precision, direction: _Arrays) -> _Arrays:
        return precision.rule.vjp(direction)

    def autodiff_at(self, leaves: _Arrays) -> _Arrays:
        cotangents = self.precision.like_outputs(self.case.eager.cotangents)
        return self.precision.reference.vjp(cotangents, leaves)

    def along_directions(self, derivative: Callable[[_Arrays], _Arrays]) -> _Arrays:
        """For each leaf, its cotangents for all cotangents of the outputs."""
        cotangents = self._cotangents.values()
        rows = [derivative(self.precision.like_outputs(w)) for w in cotangents]
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def hypotheses(self, want: _Arrays) -> list[Hypothesis]:
        return [*_swapped(self.names, want), *self._transposed()]

    def _transposed(self) -> list[Hypothesis]:
        """The results of forward mode for these directions, where the spaces are the same."""
        case, p = self.case, self.precision
        leaves = case.subject.leaves
        zeros = [np.zeros(x.shape, x.dtype) for x in leaves]
        (push, *_) = witnesses("forward", case.options)
        found = []
        for i, leaf in enumerate(leaves):
            if _same_space([leaf], case.own.outputs):
                pushed = [w[0] for w in self._cotangents.values()]
                tangents = [[*zeros[:i], t, *zeros[i + 1 :]] for t in pushed]
                rows = [push.derivative(p, p.like_leaves(t))[0] for t in tangents]
                found.append(Hypothesis(_TRANSPOSED, np.stack(rows)))
        return found

    def random_direction(self) -> _Arrays:
        return self.case.cotangents()

    def convert(self, precision: Precision, direction: _Arrays) -> _Arrays:
        return precision.like_outputs(direction)

    def differences(self) -> _Differences:
        """`<J v, w>`, to be compared with `<v, J' w>`: one random `w`, and the `v` of each
        finite difference."""
        parts, p = self.case.finite_differences, self.precision
        w = p.like_outputs(self.case.cotangents())

        def in_form(derivative):
            cts = derivative(p, w)
            return [np.asarray(pairing(cts, p.like_leaves(part.tangents))) for part in parts]

        want = [np.asarray(pairing(part.tangents_out, w)) for part in parts]
        return _Differences(want, [part.name for part in parts], _largest_error(parts), in_form)

    def wrong_dtypes(self, derivative: _Arrays) -> list[Finding]:
        """JAX accepts a backward rule that returns another dtype, and fails where the cotangent
        is added to one of the right dtype."""
        findings = []
        for name, x, ct in zip(self.names, self.case.subject.leaves, derivative, strict=True):
            if ct.dtype != x.dtype:
                text = f"the cotangent of {name} has dtype {ct.dtype}, {name} has {x.dtype}"
                findings.append(failed("reverse", name, text))
        return findings


def _largest_error(parts: Sequence[DirectionalDerivative]) -> float:
    return max((part.error for part in parts), default=0.0)


# ---------------------------------------------------------------- directions


class _TangentsOfLeaf(NamedTuple):
    """The name of a leaf, and tangents that perturb this leaf only, by their names."""

    name: str
    tangents: dict[str, _Arrays]


def _named_basis(arrays: Sequence[Any], names: Sequence[str]) -> dict[str, _Arrays]:
    """All unit vectors; none if there are many."""
    units = basis(arrays, _FULL_JACOBIAN)
    return dict(zip(basis_names(arrays, names), units, strict=True)) if units else {}


def _tangents_by_leaf(case: Case) -> list[_TangentsOfLeaf]:
    leaves = case.subject.leaves
    units = basis(leaves, _FULL_JACOBIAN)
    given = {}
    if case.options.tangents is not None:
        given = {"as given": _given(case, case.options.tangents)}
    if len(leaves) > _LEAVES:
        randoms = {f"random {number}": case.tangents() for number in range(1, _RANDOM + 1)}
        return [_TangentsOfLeaf("all leaves", {**randoms, **given})]
    by_leaf = []
    for i, name in enumerate(case.names):
        if leaves[i].size == 0:
            continue
        mine = {}
        if units is not None:
            names = basis_names(leaves[i : i + 1], [name])
            mine = dict(zip(names, [u for u in units if np.any(u[i])], strict=True))
        for number in range(1, (_RANDOM if units is None else 1) + 1):
            mine[f"random {number}"] = only(case.tangents(), [i])
        by_leaf.append(_TangentsOfLeaf(name, mine))
    if given:
        by_leaf.append(_TangentsOfLeaf("the tangents given", given))
    return by_leaf


def _given(case: Case, tangents) -> _Arrays:
    leaves = [t for t in jax.tree.leaves(tangents) if t is not None]
    if len(leaves) != len(case.subject.leaves):
        raise ValueError(
            f"`tangents` holds {len(leaves)} arrays, and {len(case.subject.leaves)} leaves "
            f"can be perturbed: {', '.join(case.names)}. Give one for each."
        )
    return [np.asarray(t) for t in leaves]


_TRANSPOSED = "transposed: a Jacobian and its transpose were confused"


def _swapped(names: Sequence[str], want: _Arrays) -> list[Hypothesis]:
    return [
        Hypothesis(f"it is what belongs to {name}", array)
        for name, array in zip(names, want, strict=True)
    ]


def _same_space(xs, ys) -> bool:
    return [(x.shape, x.dtype) for x in xs] == [(y.shape, y.dtype) for y in ys]


def _check(mode: _AbstractMode) -> Iterator[Finding]:
    """In the better precision first; if that passes, in the user's own."""
    got = mode.along_directions(lambda direction: mode.rule(mode.precision, direction))
    finding = _against_references(mode, got)
    yield finding
    is_unknown = finding.verdict == SKIPPED and mode.case.is_wrong_on_purpose
    if mode.precision is mode.case.own or finding.verdict == FAILED or is_unknown:
        return
    direction = mode.random_direction()
    have = mode.rule(mode.case.own, direction)
    yield from mode.wrong_dtypes(have)
    yield _in_own_precision(mode, direction, have)


def _against_references(mode: _AbstractMode, got: _Arrays) -> Finding:
    case, p = mode.case, mode.precision
    expected = lambda direction: mode.expected(p, direction)
    if case.is_wrong_on_purpose:
        return _against_what_was_asked_for(mode, got)
    by_autodiff, why = None, ""
    try:
        exact = mode.along_directions(expected)
    except Exception as e:
        why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:100]
    else:
        by_autodiff = _compare(mode, exact, got)
        if by_autodiff.verdict == FAILED and not any(map(np.any, exact)):
            by_autodiff = _of_steps(case, by_autodiff)
    try:
        steps = mode.differences()
        have = steps.in_form(mode.rule)
    except Exception as e:
        steps, have = None, []
        why += f"; finite differences: {type(e).__name__}"
    if steps is None or steps.error > _TRUSTED:
        why = f"no reference for the derivative ({why or 'not smooth here'})"
        return by_autodiff or skipped(mode.check, why)
    loose = max(case.tolerance(p), 10 * steps.error)
    by_differences = compare(
        mode.check, "", steps.want, have, steps.names, loose,
        reference="finite differences in float64",
    )  # fmt: skip
    if by_autodiff is None:
        return by_differences
    if by_autodiff.verdict == by_differences.verdict:
        return by_autodiff
    # One of them passed. If the references disagree, that is enough. If they agree, the failure
    # is in entries that only one of them compared.
    exact = steps.in_form(mode.expected)
    agree = difference(steps.want, exact, steps.names, entrywise=False).error <= loose
    wanted = FAILED if agree else PASSED
    mode.autodiff_is_refuted = not agree and by_autodiff.verdict == FAILED
    return by_autodiff if by_autodiff.verdict == wanted else by_differences


def _against_what_was_asked_for(mode: _AbstractMode, got: _Arrays) -> Finding:
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
        if witness.is_binding:
            failures.append(finding)
    return failures[0] if failures else skipped(mode.check, "nothing was said about this mode")


def _of_steps(case: Case, finding: Finding) -> Finding:
    """A failure where plain autodiff is zero, with another cause if the function changes."""
    if not case.changes_at_a_distance():
        return finding
    text = (
        "  likely cause: plain autodiff is zero, but the function changes: it is piecewise\n"
        "  constant, as rounding is, and a solver that stops at a tolerance. Give the derivative\n"
        "  that is meant (`reference=`), or check the solver with a tolerance near rounding"
    )
    return dataclasses.replace(finding, text=text)


def _compare(mode: _AbstractMode, want: _Arrays, got: _Arrays) -> Finding:
    case, p = mode.case, mode.precision
    tolerance = case.tolerance(p), None
    if mode.witness.is_autodiff:
        tolerance = case.strict_tolerance(p, mode.autodiff_at)
    return compare(
        mode.check, "", want, got, mode.names, *tolerance, reference=mode.witness.name,
        along=mode.along, directions=mode.directions, primals=mode.primals,
        hypotheses=lambda: mode.hypotheses(want),
    )  # fmt: skip


def _in_own_precision(mode: _AbstractMode, direction: _Arrays, have: _Arrays) -> Finding:
    """Compare with the best of three references.

    Autodiff in float64 is exact, but draws other random numbers than the user's precision;
    autodiff in the user's precision has rounding errors; without autodiff, or where finite
    differences refuted it, as they do that of a solver, the rule in float64 is a reference, as
    it has been checked.
    """
    case, wide = mode.case, mode.precision
    by_autodiff = (
        lambda: mode.expected(wide, mode.convert(wide, direction)),
        lambda: mode.expected(case.own, direction),
    )
    by_rule = lambda: mode.rule(wide, mode.convert(wide, direction))
    references = (*(() if mode.autodiff_is_refuted else by_autodiff), by_rule)
    tolerance = case.tolerance_with_rounding()
    cause = f"right in float64, wrong in {case.subject.leaves[0].dtype}"
    failure = None
    for reference in references:
        needed = reference is not by_rule or failure is None
        want = _finite(reference) if needed else None
        if want is None:
            continue
        finding = compare(
            mode.check, "in your own precision", want, have, mode.names_out, *tolerance,
            cause=cause,
        )  # fmt: skip
        if finding.verdict == PASSED:
            return finding
        failure = failure or finding
    return failure or skipped(mode.check, "no reference in your own precision")


def _finite(derivative: Callable[[], _Arrays]) -> _Arrays | None:
    """`None` where there is no such derivative, or where it is not finite."""
    try:
        arrays = derivative()
    except Exception:
        return None
    return arrays if all(np.all(np.isfinite(as_real(x))) for x in arrays) else None
