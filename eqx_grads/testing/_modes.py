"""The two modes of a rule, with the directions along which derivatives are compared."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ._case import Case, DirectionalDerivative
from ._compare import as_real, norm, pairing
from ._expected import Witness, witnesses
from ._findings import failed
from ._flat_function import fitted
from ._likely_cause import Hypothesis
from ._precision import Precision
from ._random_tangents import basis, basis_names, only
from ._report import Finding


_FULL_JACOBIAN = 16  # the number of entries up to which every unit vector is a direction
_RANDOM = 2  # directions for each leaf above it
_LEAVES = 12  # above this, all leaves are perturbed together
_OUTPUTS = 12  # above this, all outputs have a cotangent together

_Arrays = list[Any]


class AbstractMode(abc.ABC):
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
    def differences(self) -> "Differences":
        """Finite differences, in a form that derivatives of this mode can be brought into."""

    @abc.abstractmethod
    def wrong_dtypes(self, derivative: _Arrays) -> list[Finding]:
        """Failures for arrays that do not have the dtype of their space."""


class Differences(NamedTuple):
    """Finite differences along some directions.

    - `want`, `names`: the arrays and their names.
    - `error`: the largest estimated relative error.
    - `rounding`: for each array, its estimated error if the function is rounded, or zero.
    - `in_form`: brings `rule` or `expected` of a mode into the same form.
    - `directions`: for each array, the names of its directions if it is a stack along them.
    """

    want: _Arrays
    names: list[str]
    error: float
    rounding: list[float]
    in_form: Callable[[Callable[..., _Arrays]], _Arrays]
    directions: Sequence[Sequence[str]] = ()


class ForwardMode(AbstractMode):
    check, along = "forward", "tangent"

    def __init__(self, case: Case):
        (self.witness, *_) = witnesses("forward", case.options)
        self.case, self.precision, self.primals = case, case.precision, None
        self._by_leaf = _tangents_by_leaf(case)
        self.names = _of_each_output(case, [part.name for part in self._by_leaf])
        outputs = case.output_names
        self.directions = [list(part.tangents) for part in self._by_leaf for _ in outputs]
        self.names_out = outputs

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

    def differences(self) -> Differences:
        """Finite differences as they are."""
        parts, p = self.case.finite_differences, self.precision

        def in_form(derivative):
            return [d for part in parts for d in derivative(p, p.like_leaves(part.tangents))]

        found = [part.by_differences for part in parts]
        want = [d for by_differences in found for d in by_differences.tangents_out]
        rounding = [error for by_differences in found for error in by_differences.rounding]
        names = _of_each_output(self.case, [part.name for part in parts])
        return Differences(want, names, _largest_error(parts), rounding, in_form)

    def wrong_dtypes(self, derivative: _Arrays) -> list[Finding]:
        return []  # JAX itself checks the dtypes of tangents


class ReverseMode(AbstractMode):
    check, along = "reverse", "cotangent"

    def __init__(self, case: Case):
        (self.witness, *_) = witnesses("reverse", case.options)
        self.case, self.precision = case, case.precision
        self._cotangents = _named_basis(case.own.outputs, case.output_names)
        # Unit vectors are exact in every precision, so they do not show where some is lost.
        for number in range(1, _RANDOM + 1):
            self._cotangents[f"random {number}"] = case.cotangents()
        if case.options.cotangents is not None:
            outputs = case.own.named_outputs
            given = case.subject.by_output("cotangents", case.options.cotangents, outputs)
            self._cotangents["as given"] = list(map(np.asarray, given))
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

    def differences(self) -> Differences:
        """`<J v, w>`, to be compared with `<v, J' w>`: one random `w`, and the `v` of each
        finite difference. Of a few outputs, `w` is that of each of them alone."""
        parts, p = self.case.finite_differences, self.precision
        w, outputs = p.like_outputs(self.case.cotangents()), self.case.output_names
        alone = 1 < len(outputs) <= _OUTPUTS
        ws = [only(w, [i]) for i in range(len(w))] if alone else [w]

        def in_form(derivative):
            cts = [derivative(p, w) for w in ws]
            of_parts = [p.like_leaves(part.tangents) for part in parts]
            return [np.stack([pairing(ct, t) for ct in cts]) for t in of_parts]

        found = [part.by_differences for part in parts]
        want = [np.stack([pairing(d.tangents_out, w) for w in ws]) for d in found]
        sizes = [norm(as_real(x)) for x in w]
        rounding = [float(np.dot(d.rounding, sizes)) for d in found]
        names = [part.name for part in parts]
        directions = [outputs if alone else ["random"]] * len(parts)
        return Differences(want, names, _largest_error(parts), rounding, in_form, directions)

    def wrong_dtypes(self, derivative: _Arrays) -> list[Finding]:
        """JAX accepts a backward rule that returns another dtype, and fails where the cotangent
        is added to one of the right dtype."""
        findings = []
        for name, x, ct in zip(self.names, self.case.subject.leaves, derivative, strict=True):
            if ct.dtype != x.dtype:
                text = f"the cotangent of {name} has dtype {ct.dtype}, {name} has {x.dtype}"
                findings.append(failed("reverse", name, text))
        return findings


def _of_each_output(case: Case, names: Sequence[str]) -> list[str]:
    """What is along each name, for each output: it is said which one, if there are several."""
    outputs = case.output_names
    if len(outputs) < 2:
        return [name for name in names for _ in outputs]
    return [f"{name} (in {out})" for name in names for out in outputs]


def _largest_error(parts: Sequence[DirectionalDerivative]) -> float:
    return max((part.by_differences.error for part in parts), default=0.0)


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
    given = fitted("tangents", leaves, case.subject.leaves, case.names)
    return list(map(np.asarray, given))


_TRANSPOSED = "transposed: a Jacobian and its transpose were confused"


def _swapped(names: Sequence[str], want: _Arrays) -> list[Hypothesis]:
    return [
        Hypothesis(f"it is what belongs to {name}", array)
        for name, array in zip(names, want, strict=True)
    ]


def _same_space(xs, ys) -> bool:
    return [(x.shape, x.dtype) for x in xs] == [(y.shape, y.dtype) for y in ys]
