"""A mode of differentiation, with the directions along which a rule is compared."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._case import Case
from ._compare import as_real, norm, pairing
from ._mistakes import Mistake
from ._oracle import Side
from ._outcome import outcome
from ._random_tangents import basis, basis_names, only
from ._subject import fitted


_Arrays = list[Any]
_Derivative = Callable[[Sequence[Any]], _Arrays]
_FULL_JACOBIAN = 16  # the number of entries up to which every unit vector is a direction
_RANDOM = 2  # random directions; one of each leaf, beside unit vectors
_LEAVES = 12  # above this, all leaves are perturbed together, and all outputs
_TRANSPOSED = "transposed: a Jacobian and its transpose were confused"


class Mode:
    """One mode, with the directions along which it is compared.

    - `row`: the row of a `Side` with the derivative by the rule.
    - `references`: the expected derivatives; their rows are `row` with their number.
    - `groups`: the directions, by their names, in groups: those that perturb one leaf.
    - `names`, `directions`, `primals`: for each array of `stack`, what it is called, what its
        directions are called, and the values that it is a cotangent of.
    """

    def __init__(self, case: Case, check: str):
        self.check, self.case = check, case
        self.is_forward = check == "forward"
        self.row = "jvp" if self.is_forward else "vjp"
        self.along = "tangent" if self.is_forward else "cotangent"
        self.references = case.wide.references[not self.is_forward]
        self.names_out = case.output_names if self.is_forward else case.names
        self.drawn = case.tangents if self.is_forward else case.cotangents
        self.primals: _Arrays | None = None
        if self.is_forward:
            self.groups = _by_leaf(case)
            self.names = _of_each_output(case, list(self.groups))
            groups = self.groups.values()
            self.directions = [list(ts) for ts in groups for _ in case.output_names]
        else:
            ws = _cotangents(case)
            self.groups = {"": ws}
            self.names = case.names
            self.directions = [list(ws)] * len(self.names)
            spread = lambda x: np.broadcast_to(np.asarray(x), (len(ws), *np.shape(x)))
            self.primals = list(map(spread, case.subject.leaves))

    def by(self, side: Side, number: int | None = None) -> _Derivative:
        """The derivative by the rule, or by a reference."""
        row = self.row if number is None else f"{self.row} {number}"
        return lambda direction: self.case.derivative(side, row, direction)

    def stack(self, derivative: _Derivative) -> _Arrays:
        """A derivative along all directions, stacked."""
        found = []
        for group in self.groups.values():
            rows = [derivative(direction) for direction in group.values()]
            found += [np.stack(column) for column in zip(*rows, strict=True)]
        return found

    def mistakes(self, want: _Arrays) -> list[Mistake]:
        """What known mistakes would give."""
        case = self.case
        found = [
            Mistake(f"it is what belongs to {name}", array)
            for name, array in zip(self.names, want, strict=True)
        ]
        transposed = outcome(self._transposed)
        found += [] if isinstance(transposed, Exception) else transposed
        if any(map(jnp.iscomplexobj, case.subject.leaves)):
            conjugated = self.stack(lambda v: self.by(case.wide, 0)([np.conj(x) for x in v]))
            for x in conjugated:
                found.append(Mistake(f"the {self.along} was conjugated", x))
                found.append(
                    Mistake(f"what multiplies the {self.along} was conjugated", x.conj())
                )
        return found

    def _transposed(self) -> list[Mistake]:
        """The results of the other mode for these directions, where the spaces are the same."""
        case, found = self.case, []
        outs = [(x.shape, x.dtype) for x in case.outputs]
        zeros = [np.zeros(x.shape, x.dtype) for x in case.subject.leaves]
        for i, leaf in enumerate(case.subject.leaves):
            if [(leaf.shape, leaf.dtype)] != outs:
                continue
            if self.is_forward:
                ts = self.groups.get(case.names[i], {}).values()
                rows = [case.derivative(case.wide, "vjp 0", [t[i]])[i] for t in ts]
            else:
                ts = [[*zeros[:i], w[0], *zeros[i + 1 :]] for w in self.groups[""].values()]
                rows = [case.derivative(case.wide, "jvp 0", t)[0] for t in ts]
            found += [Mistake(_TRANSPOSED, np.stack(rows))] if rows else []
        return found

    def in_numbers(self, derivative: _Derivative) -> _Arrays:
        """A derivative in a form that differences can be brought into: along their directions,
        and in reverse mode `<v, J' w>`."""
        if self.is_forward:
            return [x for _, t, _ in self.case.differences for x in derivative(t)]
        pulled = [derivative(w) for w in self._weights.values()]
        found = self.case.differences
        return [np.stack([pairing(ct, t) for ct in pulled]) for _, t, _ in found]

    @property
    def _weights(self) -> dict[str, _Arrays]:
        """Random cotangents; of a few outputs, one of each of them alone."""
        case, w = self.case, self.case.cotangents[2]
        if 1 < len(w) <= _LEAVES:
            return {name: only(w, [i]) for i, name in enumerate(case.output_names)}
        return {"random 1": w, "random 2": case.cotangents[3]}

    def differences(self) -> tuple[_Arrays, list[str], list[Sequence[str]], list[float]]:
        """What differences give, the names of these arrays and of their directions, and their
        errors."""
        found = self.case.differences
        if self.is_forward:
            want = [x for _, _, d in found for x in d.tangents_out]
            names = _of_each_output(self.case, [name for name, *_ in found])
            errors = [error for _, _, d in found for error in d.errors]
            return want, names, [()] * len(want), errors
        ws = self._weights
        want = [np.stack([pairing(d.tangents_out, w) for w in ws.values()]) for *_, d in found]
        sizes = [norm(as_real(x)) for x in self.case.cotangents[2]]
        errors = [float(np.dot(d.errors, sizes)) for *_, d in found]
        return want, [name for name, *_ in found], [list(ws)] * len(want), errors


def _of_each_output(case: Case, names: Sequence[str]) -> list[str]:
    """What is along each name, for each output: it is said which one, if there are several."""
    outs = case.output_names
    return [f"{name} (in {out})" if len(outs) > 1 else name for name in names for out in outs]


def _units(arrays: Sequence[Any], names: Sequence[str]) -> dict[str, _Arrays]:
    """All unit vectors; none if there are many."""
    units = basis(arrays, _FULL_JACOBIAN)
    return dict(zip(basis_names(arrays, names), units, strict=True)) if units else {}


def _cotangents(case: Case) -> dict[str, _Arrays]:
    found = _units(case.outputs, case.output_names)
    # Unit vectors are exact in every precision, so they do not show where some is lost.
    found |= {f"random {k + 1}": case.cotangents[k] for k in range(_RANDOM)}
    if case.options.cotangents is not None:
        outputs = case.own.named_outputs
        given = case.subject.by_output("cotangents", case.options.cotangents, outputs)
        found["as given"] = list(map(np.asarray, given))
    return found


def _by_leaf(case: Case) -> dict[str, dict[str, _Arrays]]:
    leaves, given = case.subject.leaves, {}
    if case.options.tangents is not None:
        given = {"as given": _given(case, case.options.tangents)}
    if len(leaves) > _LEAVES:
        randoms = {f"random {k + 1}": case.tangents[k] for k in range(_RANDOM)}
        return {"all leaves": {**randoms, **given}}
    units, groups = basis(leaves, _FULL_JACOBIAN), {}
    for i, name in enumerate(case.names):
        if leaves[i].size:
            mine = [u for u in units or () if np.any(u[i])]
            names = basis_names(leaves[i : i + 1], [name]) if mine else []
            group = dict(zip(names, mine, strict=True))
            randoms = range(1 if mine else _RANDOM)
            group |= {f"random {k + 1}": only(case.tangents[k], [i]) for k in randoms}
            groups[name] = group
    return groups | ({"the tangents given": given} if given else {})


def _given(case: Case, tangents) -> _Arrays:
    leaves = [t for t in jax.tree.leaves(tangents) if t is not None]
    if len(leaves) != len(case.subject.leaves):
        raise ValueError(
            f"`tangents` holds {len(leaves)} arrays, and {len(case.subject.leaves)} leaves "
            f"can be perturbed: {', '.join(case.names)}. Give one for each."
        )
    given = fitted("tangents", leaves, case.subject.leaves, case.names)
    return list(map(np.asarray, given))
