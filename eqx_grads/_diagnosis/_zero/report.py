"""What `explain_zero` returns: a record for each zero gradient, and how they are shown."""

import dataclasses
from collections.abc import Mapping, Sequence

from ..report import (
    AbstractRecord,
    AbstractReport,
    cells,
    COLUMNS,
    count,
    cures_of,
    rows_by_leaf,
    Table,
    with_detail,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroGradient(AbstractRecord):
    """A leaf of a model with a zero gradient, and one cause.

    It has the fields of all records; `step` is the last step, if there are several. The kinds
    are `"never used"`, `"argmax"`, `"rounding"`, `"multiplied by zero"`, `"dead units"` and
    others, which the documentation lists. Also:

    - `detail`: the factor that is zero, or the layer before dead units, if known.
    - `by_structure`: whether the gradient is zero for all values of model and arguments.
    """

    detail: str = ""
    by_structure: bool = False


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
        causes = count(len(self._rows()), "cause")
        return f"The gradient is zero in {n} of {self.n_leaves} leaves: {causes}."

    def _rows(self):
        return rows_by_leaf(cells(record, kind=with_detail(record)) for record in self.found)

    def tables(self):
        return [Table(COLUMNS, self._rows())]

    def notes(self):
        return cures_of(self.found)
