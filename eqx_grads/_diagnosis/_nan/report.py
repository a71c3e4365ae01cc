"""What `explain_nan` returns: a record for each place, and how they are shown."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..report import (
    AbstractRecord,
    AbstractReport,
    cells,
    COLUMNS,
    count,
    cures_of,
    rows_by_leaf,
    show_list,
    show_place,
    Table,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinite(AbstractRecord):
    """A place where a value or a cotangent becomes non-finite, or exceeds the threshold.

    It has the fields of all records; `step` is the first step in the order of the backward
    pass. Also:

    - `caller`: if the loss runs `line` for several calls of the function around it, the line of
        your code that makes this call, such as "model.py:12, in `loss`".
    - `count`: in how many steps it happens.
    - `mask`: for a dead branch, the operation that does not select it, such as `"where"`.
        `mask_file`, `mask_line`: where that operation is.
    - `rule`: the line of the rule, for a function with your own rule.
    - `is_forward`: whether it is a value, and not a cotangent.
    - `index`: the first bad element of the array.
    """

    caller: str = ""
    count: int = 1
    mask: str = ""
    mask_file: str = ""
    mask_line: int = 0
    rule: str = ""
    is_forward: bool = False
    index: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class NaNReport(AbstractReport):
    """The findings of [`eqx_grads.explain_nan`][]. False if the loss and its gradient are
    finite, even when compiled.

    - `found`: a [`eqx_grads.NonFinite`][] for each place. The places in the loss come first,
        then those in the gradient, in the order in which it is computed.
    - `loss`: its value.
    - `bad_leaves`: the paths of the leaves with a bad gradient, of `n_leaves`.
    - `remarks`: further notes.
    """

    found: Sequence[NonFinite]
    loss: float
    bad_leaves: Sequence[str]
    n_leaves: int
    threshold: float | None
    remarks: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.found or self.bad_leaves or not np.isfinite(self.loss))

    @property
    def headline(self) -> str:
        limit = "" if self.threshold is None else f"{self.threshold:g}"
        if not self.bad_leaves and np.isfinite(self.loss):
            return f"The loss and its gradient are finite{limit and f' and at most {limit}'}."
        causes = count(len(self.found), "cause")
        if not self.bad_leaves:
            return f"The loss is {self.loss:.6g}, and its gradient is finite: {causes}."
        bad = f"not finite{limit and f' or exceeds {limit}'}"
        where = f"in {len(self.bad_leaves)} of {self.n_leaves} leaves"
        return f"The loss is {self.loss:.6g}, and its gradient is {bad} {where}: {causes}."

    def tables(self):
        return [Table(_COLUMNS, rows_by_leaf(map(_row, self.found)))]

    def notes(self):
        notes = cures_of(self.found)
        if self.bad_leaves and self.n_leaves > 1:
            notes.append(("leaves", f"The gradient is bad in {show_list(self.bad_leaves, 8)}."))
        return notes


_COLUMNS = (*COLUMNS, "called from", "rule")


def _row(record: NonFinite) -> tuple[str, ...]:
    step = ", ".join(map(str, record.step))
    step += f" and {record.count - 1} more" * (record.step != () and record.count > 1)
    return *cells(record, kind=_describe(record), step=step), record.caller, record.rule


def _describe(record: NonFinite) -> str:
    """The kind, and what makes the cotangent zero."""
    kind = f"{record.kind} (forward pass)" if record.is_forward else record.kind
    if not record.mask:
        return kind
    same_line = (record.mask_file, record.mask_line) == (record.file, record.line)
    place = "" if same_line else f" at {show_place(record.mask_file, record.mask_line)}"
    return f"{kind}: {record.mask}{place}"
