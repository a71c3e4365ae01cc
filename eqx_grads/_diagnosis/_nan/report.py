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
    show_list,
    show_place,
    Table,
)
from .causes import Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinite(AbstractRecord):
    """A place where a value or a cotangent becomes non-finite, or exceeds the threshold.

    It has the fields of all records; `step` is the first step in the order of the backward
    pass. Also:

    - `caller`: the line of your code that calls the function that `line` is in, such as
        "model.py:12, in `loss`", if the loss runs this line for several calls.
    - `derivative_of`: the operation on the line that is differentiated, such as `"sqrt"`, if
        known. For an operation of a derivative that the loss takes itself, such as a force.
    - `count`: in how many steps it happens.
    - `mask`: for a dead branch, the operation that does not select it, such as `"where"`.
        `mask_file`, `mask_line`: where that operation is.
    - `rule`: the line of the rule, for a function with your own rule.
    - `is_forward`: whether it is a value, and not a cotangent.
    - `index`: the first bad element of the array, and `shape`, the shape of the array. `n_bad`:
        how many of its elements are bad, in that step.
    """

    caller: str = ""
    derivative_of: str = ""
    count: int = 1
    mask: str = ""
    mask_file: str = ""
    mask_line: int = 0
    rule: str = ""
    is_forward: bool = False
    index: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    n_bad: int = 1


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class NaNReport(AbstractReport):
    """The findings of [`eqx_grads.explain_nan`][]. False if the loss and its gradient are
    finite, even when compiled.

    - `found`: a [`eqx_grads.NonFinite`][] for each place: first the places in the loss, then
        the places in the gradient, in the order in which it is computed.
    - `loss`: its value.
    - `bad_leaves`: the paths of the leaves with a bad gradient, of `n_leaves`.
    - `is_reverse`: false if the loss has forward mode only.
    - `raises`: whether the gradient raises an error, for example in a solver that gets a NaN.
        The error is in `remarks`.
    - `dropped`: the records of the terms that [`eqx_grads.zero_safe`][] drops.
    - `remarks`: further notes.
    """

    found: Sequence[NonFinite]
    loss: float
    bad_leaves: Sequence[str]
    n_leaves: int
    is_reverse: bool
    threshold: float | None
    raises: bool = False
    dropped: Sequence[NonFinite] = ()
    remarks: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.found or self.bad_leaves or not np.isfinite(self.loss))

    @property
    def headline(self) -> str:
        limit = "" if self.threshold is None else f"{self.threshold:g}"
        if not self.bad_leaves and np.isfinite(self.loss):
            return f"The loss and its gradient are finite{limit and f' and at most {limit}'}."
        bad = f"not finite{limit and f' or exceeds {limit}'}"
        if not self.bad_leaves:
            what = "its gradient is finite"
        elif self.raises:
            what = "its gradient raises an error"
        elif self.is_reverse:
            where = f"in {len(self.bad_leaves)} of {self.n_leaves} leaves"
            what = f"its gradient is {bad} {where}"
        else:
            what = f"its derivative in forward mode is {bad}"
        return f"The loss is {self.loss:.6g}, and {what}: {count(len(self.found), 'cause')}."

    def tables(self):
        title = "`zero_safe` drops these, where the gradient of the function is not finite."
        return [
            Table(_COLUMNS, _rows(self.found)),
            Table(_COLUMNS, _rows(self.dropped), title, "dropped"),
        ]

    def notes(self):
        notes = cures_of(self.found)
        if self.bad_leaves and self.n_leaves > 1:
            notes.append(("leaves", f"The gradient is bad in {show_list(self.bad_leaves, 8)}."))
        if not self.is_reverse:
            notes.append(("note", _FORWARD))
        return notes


_FORWARD = (
    "The loss has a `while_loop` and so no gradient in reverse mode. This is its derivative in "
    "forward mode."
)
_COLUMNS = (*COLUMNS, "called from", "rule")


def _rows(records: Sequence[NonFinite]) -> list[tuple[str, ...]]:
    """One row for all that look the same, as the operations of a derivative in the loss may."""
    return list(dict.fromkeys(map(_row, records)))


def _row(record: NonFinite) -> tuple[str, ...]:
    if record.derivative_of:
        operation = f"{record.primitive}, in the derivative of {record.derivative_of}"
        record = dataclasses.replace(record, primitive=operation)
    step = ", ".join(map(str, record.step))
    step += f" and {record.count - 1} more" * (record.step != () and record.count > 1)
    return *cells(record, kind=_describe(record), step=step), record.caller, record.rule


def _describe(record: NonFinite) -> str:
    """The kind, and its details."""
    if record.mask:
        same_line = (record.mask_file, record.mask_line) == (record.file, record.line)
        place = "" if same_line else f" at {show_place(record.mask_file, record.mask_line)}"
        if record.kind == Kind.DEAD_BRANCH:
            article = "an" if record.mask[0] in "aeiou" else "a"
            return f"{record.kind} of {article} `{record.mask}`{place}"
        return f"{record.kind}: {record.mask}{place}"
    return f"{record.kind} (forward pass)" if record.is_forward else record.kind
