"""What `explain_nan` returns: a record for each place, and how they are shown."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..report import AbstractReport, text_table


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A place where a value or a cotangent becomes non-finite, or exceeds the threshold.

    - `file`, `line`: the line of your code. `library`: the place in an installed package that
        it called, or empty. `rule`: the line of the rule, for a function with a rule of yours.
    - `primitive`: the operation of the loss. `path`: the path of the layer that it is in.
    - `step`: the first step of each enclosing loop, outermost first. `count`: in how many steps
        in all.
    - `kind`: why. `mask`: for a dead branch, the line that does not select it.
    - `is_forward`: whether it is a value, and not a cotangent.
    - `index`: the element, and `shape` of what. `is_batched`: whether it is under `vmap`, so
        that one of the axes is that of the batch.
    - `operands`: what the element depends on, in the operation or its derivative.
        `cotangent`: what arrived there.
    - `cure`: what to do.
    """

    file: str
    line: int
    primitive: str
    path: str
    step: tuple[int, ...]
    kind: str
    cure: str
    mask: str = ""
    library: str = ""
    rule: str = ""
    is_forward: bool = False
    index: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    is_batched: bool = False
    operands: tuple[float, ...] = ()
    cotangent: float | None = None
    count: int = 1


@dataclasses.dataclass(frozen=True, repr=False)
class NaNReport(AbstractReport):
    """What [`eqx_grads.explain_nan`][] found. False if the loss and its gradient are finite.

    `found` are the records, in the order in which the gradient is computed, after those of the
    loss itself. `loss` is its value. `bad_leaves` are the paths of the leaves with a bad
    gradient. `error`: the error that the gradient raises, if it does, for example in a solver
    that is given a NaN. `dropped` are the records of what [`eqx_grads.zero_safe`][] drops.
    """

    found: Sequence[NonFinite]
    loss: float
    bad_leaves: Sequence[str]
    n_leaves: int
    is_reverse: bool
    threshold: float | None
    error: str = ""
    dropped: Sequence[NonFinite] = ()

    @property
    def headline(self) -> str:
        bad = "not finite" if self.threshold is None else "not finite or too large"
        if not self.bad_leaves and np.isfinite(self.loss):
            return "The loss and its gradient are finite" + (
                "." if self.threshold is None else f" and at most {self.threshold:g}."
            )
        what = f"The loss is {self.loss:.6g}"
        if not self.bad_leaves:
            return f"{what}, and its gradient is finite."
        n = len(self.found)
        causes = f"{n} cause{'s' * (n != 1)}:"
        if self.error:
            return f"{what}, and its gradient raises an error. {causes}"
        if not self.is_reverse:
            return f"{what}, and its derivative in forward mode is {bad}. {causes}"
        where = f"in {len(self.bad_leaves)} of {self.n_leaves} leaves"
        return f"{what}, and its gradient is {bad} {where}. {causes}"

    def rows(self):
        return _COLUMNS, [_row(i, record) for i, record in enumerate(self.found, 1)]

    def notes(self):
        notes = []
        for cure in dict.fromkeys(record.cure for record in self.found):
            of = [str(i) for i, record in enumerate(self.found, 1) if record.cure == cure]
            notes.append(f"{', '.join(of)}: {cure}.")
        if self.bad_leaves and self.n_leaves > 1:
            names, more = self.bad_leaves[:8], len(self.bad_leaves) - 8
            notes.append(f"Leaves: {', '.join(names)}{f' and {more} more' * (more > 0)}.")
        if self.error:
            notes.append(f"The error: {self.error}")
        if self.dropped:
            notes.append("`zero_safe` drops, where the gradient of the function is not finite:")
            columns, rows = _COLUMNS, [_row(i, r) for i, r in enumerate(self.dropped, 1)]
            notes.append(text_table(columns, rows))
        if self.found and not self.is_reverse:
            notes.append(
                "The loss has a `while_loop` and so no gradient in reverse mode. This is its "
                "derivative in forward mode, along ones."
            )
        if not self.found and (self.bad_leaves or not np.isfinite(self.loss)):
            notes.append(
                "Evaluated operation by operation, no place was found. A compiled program "
                "fuses operations, and rounds differently."
            )
        return notes


_COLUMNS = (
    "", "line", "operation", "layer", "step", "kind", "element", "operands", "cotangent"
)  # fmt: skip


def _row(i: int, record: NonFinite) -> tuple[str, ...]:
    kind = record.kind + (f" of {record.mask}" if record.mask else "")
    index = f"[{', '.join(map(str, record.index))}]" if record.index else ""
    return (
        str(i),
        _place(record),
        record.primitive + (" (value)" if record.is_forward else ""),
        record.path,
        ", ".join(map(str, record.step)) + (f" ({record.count} in all)" * (record.count > 1)),
        kind,
        index + " under vmap" * record.is_batched,
        ", ".join(f"{x:.3g}" for x in record.operands),
        "" if record.cotangent is None else f"{record.cotangent:.3g}",
    )


def _place(record: NonFinite) -> str:
    places = [f"{_basename(record.file)}:{record.line}"] if record.file else []
    places += [f"rule: {record.rule}"] if record.rule else []
    places += [record.library] if record.library else []
    return " ".join(places)


def _basename(file: str) -> str:
    return file.replace("\\", "/").rpartition("/")[2]
