"""What `explain_zero` returns: a record for each zero gradient, and how they are shown."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..report import (
    AbstractRecord,
    AbstractReport,
    cells,
    COLUMNS,
    count,
    cures_of,
    show_list,
    Table,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroGradient(AbstractRecord):
    """A leaf of a model with a zero gradient, and one cause.

    It has the fields of all records; `step` is the last step, if there are several. The kinds
    are `"never used"`, `"argmax"`, `"rounding"`, `"multiplied by zero"`, `"dead units"` and
    others, which the documentation lists. Also:

    - `detail`: the factor that is zero, or the layer before dead units, if known.
    - `by_structure`: whether the gradient is zero for all values of model and arguments.
    - `elsewhere`: what the loss does at a kink, on the other side, or over longer steps.
    """

    detail: str = ""
    by_structure: bool = False
    elsewhere: str = ""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ZeroReport(AbstractReport):
    """Why gradients are zero. False if no leaf has a zero gradient.

    - `found`: a [`eqx_grads.ZeroGradient`][] for each leaf with a zero gradient and each cause.
    - `n_leaves`: how many leaves were inspected.
    - `noise`: the leaves whose gradient is not exactly zero, but a rounding error; each with
        the largest element of its gradient.
    - `not_finite`: the leaves whose gradient is not finite.
    - `remarks`: further notes, such as questions that stayed open.
    """

    found: Sequence[ZeroGradient]
    n_leaves: int
    remarks: Sequence[str] = ()
    noise: Mapping[str, float] = dataclasses.field(default_factory=dict)
    not_finite: Sequence[str] = ()

    @property
    def headline(self) -> str:
        n = len({record.leaf for record in self.found})
        if not n:
            return f"No leaf has a zero gradient, of {self.n_leaves} in the model."
        causes = count(len(_by_cause(self.found)), "cause")
        return f"The gradient is zero in {n} of {self.n_leaves} leaves: {causes}."

    def tables(self):
        rows = [
            cells(
                group[0],
                leaf=show_list([record.leaf for record in group], 4),
                kind=_describe(group[0]),
            )
            for group in _by_cause(self.found)
        ]
        return [Table(COLUMNS, rows)]

    def notes(self):
        groups = _by_cause([r for r in self.found if r.elsewhere])
        elsewhere = [(group[0].leaf, group[0].elsewhere) for group in groups]
        return [*cures_of(self.found), *elsewhere]


def _by_cause(records: Sequence[ZeroGradient]) -> list[list[ZeroGradient]]:
    """The records in groups that differ in the leaf only."""
    groups: dict[Any, list[ZeroGradient]] = {}
    for record in records:
        groups.setdefault(dataclasses.replace(record, leaf="", elsewhere=""), []).append(record)
    return list(groups.values())


def _describe(record: ZeroGradient) -> str:
    """The kind, and its details."""
    return f"{record.kind}: {record.detail}" if record.detail else record.kind
