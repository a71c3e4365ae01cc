"""The result of `check_gradients`: a verdict for each leaf, and what was found."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from .._diagnosis.report import (
    AbstractRecord,
    AbstractReport,
    cells,
    COLUMNS,
    count,
    cures_of,
    show_list,
    Table,
)


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here

RIGHT, WRONG, DEAD, KINK, FLAT = "right", "WRONG", "zero", "kink", "flat"
STOPPED, UNMEASURED, SKIPPED = "stopped", "not measured", "skipped"


@dataclasses.dataclass(frozen=True)
class LeafVerdict:
    """The verdict on the gradient of one leaf.

    - `leaf`: its path in the model.
    - `verdict`: `"right"`, `"WRONG"`, `"zero"` (the loss does not depend on the leaf, and the
        gradient is zero), `"flat"` (the same for short steps, as on a staircase), `"kink"` (the
        loss has no derivative here), `"stopped"` (right, if what a `stop_gradient` returns is
        held), `"not measured"` or `"skipped"`.
    - `reverse`, `forward`: the derivative along one random direction in both modes; `None` for
        a mode that does not work.
    - `differences`, `error`: the same by finite differences, and its estimated error.
    - `relative_error`: how far the gradient is from the differences, relative to them or to
        the typical slope of the leaf, whichever is larger.
    - `left`, `right`: at a kink, the slopes on its two sides. They are with respect to an entry
        that has a kink, or along that direction if no single entry has one.
    """

    leaf: str
    verdict: str = UNMEASURED
    reverse: float | None = None
    forward: float | None = None
    differences: float | None = None
    error: float = 0.0
    relative_error: float = 0.0
    left: float | None = None
    right: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientFault(AbstractRecord):
    """A fault of the gradient that [`eqx_grads.testing.check_gradients`][] found.

    It has the fields of all records; `step` is empty. `primitive` is the function at fault:
    without its rule, the gradient is right. `file, line` is where it is called, and `path` the
    layer that it is called in. If no function is known, `path` is the layer of the leaf. The
    kinds are `"wrong"`, `"cut"` (the gradient is zero, and the differences are not), `"not a
    derivative"` (the differences are zero, and the gradient is not), `"not finite"`, `"modes
    disagree"` and `"random"`. Also:

    - `detail`: what the numbers look like: a factor, a transposed array, one wrong entry.
    """

    detail: str = ""


class GradientCheckError(AssertionError):
    """A gradient failed `check_gradients`. The message is the printed report."""


@dataclasses.dataclass(eq=False, repr=False)
class GradientReport(AbstractReport):
    """The result of [`eqx_grads.testing.check_gradients`][].

    It is false if the gradient is right. A printed report is a table of what is wrong, followed
    by a description of each fault.

    - `found`: a [`eqx_grads.testing.GradientFault`][] for each fault.
    - `leaves`: a [`eqx_grads.testing.LeafVerdict`][] for each leaf; `report["a.b"]` is the
        verdict of the leaf `a.b`.
    - `numbers`: a dictionary with the `"seed"`, the number of `"evaluations"` of the loss and
        the `"precision"` of the gradient.
    - `remarks`: further notes.
    """

    name: str
    leaves: Sequence[LeafVerdict]
    found: Sequence[GradientFault]
    numbers: dict[str, object]
    remarks: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether no fault was found."""
        return not self.found

    def __getitem__(self, path: str) -> LeafVerdict:
        """The verdict of one leaf."""
        return {leaf.leaf: leaf for leaf in self.leaves}[path]

    def raise_if_failed(self) -> None:
        """Raise a `GradientCheckError` with the whole report if a fault was found."""
        if not self.passed:
            raise GradientCheckError(str(self))

    @property
    def headline(self) -> str:
        status = "passed" if self.passed else "FAILED"
        kinds = {fault.leaf: fault.kind for fault in self.found}
        counts = Counter(kinds.get(leaf.leaf, leaf.verdict) for leaf in self.leaves)
        parts = ", ".join(f"{n} {kind}" for kind, n in counts.items())
        text = f"The gradient of `{self.name}`: {status} (seed {self.numbers.get('seed')})"
        text += f", {count(len(self.leaves), 'leaf', 'leaves')}: {parts}"
        return f"{text}; the loss: {kinds['']}." if "" in kinds else f"{text}."

    def tables(self):
        columns = (*COLUMNS, "slope", "expected")
        return [Table(columns, list(map(self._row, self.found)))]

    def _row(self, fault: GradientFault) -> tuple[str, ...]:
        leaf = self[fault.leaf] if fault.leaf else LeafVerdict("")
        have = leaf.forward if leaf.reverse is None else leaf.reverse
        numbers = ("" if x is None else f"{x:.3g}" for x in (have, leaf.differences))
        return (*cells(fault), *numbers)

    def notes(self):
        leaves: dict[str, list[str]] = {}  # by what is said of them
        for fault in self.found:
            leaves.setdefault(fault.detail, []).append(fault.leaf or "loss")
        notes = [(show_list(names, 4), text) for text, names in leaves.items() if text]
        rest = len(notes) - _MOST_DETAILS
        notes = notes[:_MOST_DETAILS] + [("note", f"{rest} more: see `found`.")] * (rest > 0)
        notes += cures_of(self.found)
        for verdict, text in _LISTS.items():
            shown = [_with_sides(leaf) for leaf in self.leaves if leaf.verdict == verdict]
            notes += [(verdict, f"{text}: {show_list(shown, 8)}.")] * bool(shown)
        return notes


def _with_sides(leaf: LeafVerdict) -> str:
    if leaf.left is None:
        return leaf.leaf
    return f"{leaf.leaf} (the slopes of its sides are {leaf.left:.3g} and {leaf.right:.3g})"


_MOST_DETAILS = 6
_LISTS = {
    DEAD: "The loss does not depend on these leaves here, and their gradient is zero",
    FLAT: "The loss is flat here, and changes over longer steps, as on a staircase",
    STOPPED: "The gradient leaves out what a `stop_gradient` holds. The rest is right",
    KINK: "The loss has a kink here, and the gradient is between the slopes of its sides",
    UNMEASURED: "The differences are too small or too noisy to judge the gradient",
    SKIPPED: "These leaves were not checked",
}
