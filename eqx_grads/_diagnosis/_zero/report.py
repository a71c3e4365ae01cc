"""What `explain_zero` returns: a record for each zero gradient, and how they are shown."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..report import AbstractReport
from ..source_lines import SourceLine


@dataclasses.dataclass(frozen=True)
class ZeroGradient:
    """A leaf of a model with a zero gradient, and one cause of it.

    - `leaf`: the path of the leaf in the model.
    - `kind`: the cause, such as `"rounding"`, `"never used"` or `"multiplied by zero"`.
    - `file, line, primitive`: the operation, on a line of the user's code. Empty, 0 and empty
        for a leaf that is never used.
    - `path`: the path of the layer that the operation is in.
    - `step`: the step of each loop around the operation, outermost first, if values were
        needed. Of several steps, it is the last one.
    - `detail`: what else is known: the factor that is zero, what a comparison decides.
    - `units, n_units`: for dead units, which ones and how many there are.
    - `by_structure`: whether the gradient is zero for all values of model and arguments.
    - `cure`: what to do.
    """

    leaf: str
    kind: str
    file: str
    line: int
    primitive: str
    path: str
    step: tuple[int, ...]
    detail: str
    units: tuple[int, ...]
    n_units: int
    by_structure: bool
    cure: str

    @property
    def cause(self) -> tuple[Any, ...]:
        """Equal for records that differ in the leaf only."""
        return dataclasses.astuple(dataclasses.replace(self, leaf=""))


class ZeroReport(AbstractReport):
    """Why gradients are zero. False if no leaf has a zero gradient.

    - `found`: a [`eqx_grads.ZeroGradient`][] for each leaf with a zero gradient and each cause.
    - `partly`: the same for leaves that have a gradient, but not for some units, which are dead
        for all examples.
    - `n_leaves`: how many leaves were looked at.
    - `remarks`: what could not be found out.
    """

    def __init__(
        self,
        found: Sequence[ZeroGradient],
        partly: Sequence[ZeroGradient],
        n_leaves: int,
        remarks: Sequence[str],
    ):
        self.found = tuple(found)
        self.partly = tuple(partly)
        self.n_leaves = n_leaves
        self.remarks = tuple(remarks)

    @property
    def headline(self) -> str:
        leaves = {record.leaf for record in self.found}
        if not leaves:
            return f"No leaf has a zero gradient: none of the {self.n_leaves} in the model."
        verb = "has" if len(leaves) == 1 else "have"
        return f"{len(leaves)} of {self.n_leaves} leaves {verb} a zero gradient."

    def rows(self):
        columns = ("leaf", "why", "where", "code", "layer", "step")
        return columns, [_row(records) for records in _by_cause(self.found)]

    def notes(self):
        cures = dict.fromkeys(f"{r.kind}: {r.cure}" for r in (*self.found, *self.partly))
        partly = [
            f"Partly zero: {_leaves(records)} ({_why(records[0])}, {_place(records[0])})."
            for records in _by_cause(self.partly)
        ]
        return [*partly, *cures, *self.remarks]


def _by_cause(records) -> list[list[ZeroGradient]]:
    groups: dict[Any, list[ZeroGradient]] = {}
    for record in records:
        groups.setdefault(record.cause, []).append(record)
    return list(groups.values())


def _row(records: Sequence[ZeroGradient]) -> tuple[str, ...]:
    record = records[0]
    step = ", ".join(map(str, record.step))
    where = _place(record) if record.file else ""
    return (
        _leaves(records),
        _why(record),
        where,
        SourceLine(record.file, record.line, "").code,
        record.path,
        step,
    )


def _leaves(records, most=4) -> str:
    names = [record.leaf for record in records]
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _why(record: ZeroGradient) -> str:
    why = record.kind
    if record.n_units:
        first = ", ".join(map(str, record.units[:8]))
        dots = ", ..." if len(record.units) > 8 else ""
        why += f": {len(record.units)} of {record.n_units} ({first}{dots})"
    # What "predicate of a while_loop" is used for need not be said again.
    is_said = record.detail.replace("`", "") == record.kind
    return f"{why}: {record.detail}" if record.detail and not is_said else why


def _place(record: ZeroGradient) -> str:
    place = SourceLine(record.file, record.line, "")
    return f"{record.primitive}, {place}"
