"""The report of `explain_memory`: its records, its table, and its advice."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ..layers import group_of
from ..report import AbstractRecord, AbstractReport, cells, COLUMNS, count, show_bytes, Table
from .residuals import Residual


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryAdvice(AbstractRecord):
    """A place where you can compute values twice instead of keeping them.

    It has the fields of all records. `kind` is `"loop"`, `"layer"` or `"map"`, and `cure` says
    what to write and where. Also:

    - `saves`: an estimate of the kept bytes that it frees at one time, from the shapes of the
        residuals.
    """

    saves: int = 0

    def __str__(self) -> str:
        return f"{self.cure} It saves about {show_bytes(self.saves)}."


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class MemoryReport(AbstractReport):
    """The values that a loss keeps for its backward pass; returned by
    [`eqx_grads.explain_memory`][].

    - `found`: a [`eqx_grads.Residual`][] for each array that the forward pass computes and
        keeps, largest first.
    - `inputs`: the arguments of the loss that are kept unchanged, in the same form.
    - `total`: the bytes of `found`.
    - `compiled`: the temporary bytes of the compiled gradient, or `None` if it was not
        compiled.
    - `advice`: a [`eqx_grads.MemoryAdvice`][] for each place that is worth it, largest saving
        first. `print` shows the first.
    - `remarks`: further notes.

    It is false if nothing is found.
    """

    found: Sequence[Residual]
    inputs: Sequence[Residual]
    compiled: int | None
    advice: Sequence[MemoryAdvice]
    remarks: Sequence[str] = ()

    @property
    def total(self) -> int:
        return sum(r.bytes for r in self.found)

    def by_path(self) -> dict[str, int]:
        """The bytes of `found` by the path of the layer, largest first; `""` is outside of any
        layer."""
        return self._sums(lambda r: r.path)

    def by_line(self) -> dict[tuple[str, int], int]:
        """The bytes of `found` by file and line, largest first."""
        return self._sums(lambda r: (r.file, r.line))

    def _sums(self, key: Callable[[Residual], Any]) -> dict[Any, int]:
        sums: Counter[Any] = Counter()
        for r in self.found:
            sums[key(r)] += r.bytes
        return dict(sums.most_common())

    @property
    def headline(self) -> str:
        inputs = show_bytes(sum(r.bytes for r in self.inputs))
        if not self.found:
            return f"Nothing is kept for the backward pass but inputs of the loss ({inputs})."
        return (
            f"{show_bytes(self.total)} are kept for the backward pass, in "
            f"{count(len(self.found), 'array')}, besides {inputs} of inputs of the loss."
        )

    def tables(self):
        groups: dict[Hashable, list[Residual]] = {}
        for r in self.found:
            groups.setdefault((group_of(r.path), r.file, r.line, r.n_steps), []).append(r)
        rows = sorted(map(self._row, groups.values()), key=lambda row: -row[0])
        columns = (*COLUMNS, "steps", "bytes", "share")
        return [Table(columns, [cells for _, cells in rows], source="by_line()")]

    def _row(self, group: Sequence[Residual]) -> tuple[int, tuple[str, ...]]:
        """The bytes of residuals of one line, and the cells."""
        first, size = group[0], sum(r.bytes for r in group)
        names = dict.fromkeys("carry" if r.kind == "carry" else r.primitive for r in group)
        path = first.path if len({r.path for r in group}) == 1 else group_of(first.path)
        name = ", ".join([*names][:2]) + ", ..." * (len(names) > 2)
        shown = dataclasses.replace(first, kind="", path=path, primitive=name)
        steps = str(first.n_steps) if first.n_steps > 1 else ""
        share = f"{size / max(self.total, 1):.0%}"
        return size, (*cells(shown), steps, show_bytes(size), share)

    def notes(self):
        if not self.found:
            return []
        compiled = f"The compiled gradient needs {show_bytes(self.compiled or 0)}."
        notes = [("temporary memory", compiled)] if self.compiled is not None else []
        first = self.advice[0] if self.advice else "No checkpoint saves a tenth of it."
        return [*notes, ("advice", str(first))]
