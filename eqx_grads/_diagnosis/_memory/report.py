"""The report of `explain_memory`: its records, its table, and its advice."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ..._errors import rule_error
from ..layers import group_of
from ..progress import doing, showing_progress
from ..report import AbstractRecord, AbstractReport, cells, COLUMNS, count, Table
from .plot import plot_memory
from .residuals import is_recomputable, Residual
from .show_bytes import show_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryAdvice(AbstractRecord):
    """Where a checkpoint saves memory, or a loss that does not hold all logits at a time.

    It has the fields of all records. `kind` is `"loop"`, `"layer"` or `"logits"`, and `cure`
    says what to write and where. Also:

    - `saves`: the temporary bytes of the gradient that it saves, as estimated.
    - `predicted`: the temporary bytes that are left, as estimated.
    - `measured`: those of the compiled gradient with the advice applied, or `None` before
        [`eqx_grads.MemoryReport.verify`][].
    - `is_undone`: whether the compiler of this platform computes nothing again here, so that
        nothing is saved. XLA does so on a CPU, before JAX 0.12, outside of loops.
    """

    saves: int
    predicted: int
    measured: int | None = None
    is_undone: bool = False

    def __str__(self) -> str:
        text = f"{self.cure} By the estimate, it saves {show_bytes(self.saves)}, "
        text += f"and {show_bytes(self.predicted)} are left"
        if self.measured is not None:
            text += f" (measured: {show_bytes(self.measured)})"
        if self.is_undone:
            text += ". Not on this platform: its compiler undoes checkpoints outside of loops"
        return text + "."


class MemoryReport(AbstractReport):
    """What a loss keeps for its backward pass; returned by [`eqx_grads.explain_memory`][].

    - `found`: a [`eqx_grads.Residual`][] for each array that the forward pass computes and
        keeps, largest first.
    - `inputs`: the arguments of the loss that are kept as they are, in the same form.
    - `total`: the bytes of `found`.
    - `estimated`: the temporary bytes of the gradient, from its program.
    - `compiled`: the temporary bytes of the compiled gradient, or `None` if there is none.
    - `advice`: a [`eqx_grads.MemoryAdvice`][] for each checkpoint that is worth it, and for
        logits that need not be held all at a time; the largest saving first: by the estimate
        (with a copy of the outputs of a loop of which a `vmap` is to be moved into the step),
        and after [`eqx_grads.MemoryReport.verify`][] as measured.
    - `remarks`: what else there is to know.

    Outside of loops, XLA may compute what is `"recomputable"` or `"constant"` again and not
    keep it: for three models on a CPU, about 83 %, 40 % and 36 % of its bytes.

    It is false if nothing is found.
    """

    found: Sequence[Residual]

    def __init__(
        self,
        residuals: Iterable[Residual],
        *,
        estimated: int,
        compiled: int | None,
        advice: Sequence[MemoryAdvice],
        measure: Sequence[Callable[[], int | None]],
        remarks: Sequence[str] = (),
        not_compiled: str = "",
    ):
        residuals = sorted(residuals, key=lambda r: -r.bytes)
        self.found = [r for r in residuals if r.kind != "input"]
        self.inputs = [r for r in residuals if r.kind == "input"]
        self.total = sum(r.bytes for r in self.found)
        self.estimated = estimated
        self.compiled = compiled
        self.advice = list(advice)
        self.remarks = [*remarks, not_compiled] if not_compiled else list(remarks)
        self._lasting_remarks = list(remarks)
        self._measure = list(measure)  # the gradient as it is, and then with each advice

    def by_path(self) -> dict[str, int]:
        """The bytes of `found` by the path of the layer, largest first; `""` is no layer."""
        return _sums((r.path, r.bytes) for r in self.found)

    def by_line(self) -> dict[tuple[str, int], int]:
        """The bytes of `found` by file and line, largest first."""
        return _sums(((r.file, r.line), r.bytes) for r in self.found)

    @showing_progress("verify")
    def verify(self) -> "MemoryReport":
        """A new report, in which all advice is measured, and what leaves the fewest bytes comes
        first; this one stays as it is.

        Each advice is applied to the program of the loss, and its gradient is compiled; so is
        the gradient as it is, if that was not done. Nothing is computed.
        """
        if not self._measure:
            raise rule_error(
                "`verify` was called of a copy of a report.",
                "the program of the loss can't be copied or pickled, and so is not",
                do="Call `verify` of the report that `explain_memory` returned, and copy or "
                "pickle what `verify` returns.",
            )
        measure_plain, *measures = self._measure
        doing("compiling the gradient")
        compiled = measure_plain() if self.compiled is None else self.compiled
        measured = []
        for i, measure in enumerate(measures):
            doing("compiling the gradient with checkpoint", i, len(measures))
            advice = dataclasses.replace(self.advice[i], measured=measure())
            measured.append((advice, measure))
        measured.sort(key=lambda pair: _needs(pair[0]))
        return MemoryReport(
            [*self.found, *self.inputs],
            estimated=self.estimated,
            compiled=compiled,
            advice=[advice for advice, _ in measured],
            measure=[measure_plain, *(measure for _, measure in measured)],
            remarks=self._lasting_remarks,
        )

    def __getstate__(self):
        return {**vars(self), "_measure": []}

    def plot(self, *, axes: Any = None) -> Any:
        """Draw the layers, lines and arrays in columns. The height of a box is its bytes.

        **Arguments:**

        - `axes`: the `matplotlib.axes.Axes` to draw in; by default, those of a new figure.

        **Returns:**

        The axes.

        **Raises:**

        `ModuleNotFoundError` if [Matplotlib](https://matplotlib.org), the extra `plot`, is
        not installed.
        """
        return plot_memory(self.found, axes=axes)

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
        largest = sorted(groups.values(), key=lambda group: -sum(r.bytes for r in group))
        rows = [self._row(group) for group in largest[:_MOST_LINES]]
        others = [r for group in largest[_MOST_LINES:] for r in group]
        if others:
            nothing = AbstractRecord(kind="", primitive=f"{len(others)} others")
            rows.append((*cells(nothing), *self._sizes(others)))
        return [Table((*COLUMNS, "steps", "per step", "bytes", "share"), rows)]

    def _row(self, group: Sequence[Residual]) -> tuple[str, ...]:
        first = group[0]
        one = dataclasses.replace(
            first,
            path=first.path if len({r.path for r in group}) == 1 else group_of(first.path),
            primitive=_operations(group),
        )
        return (
            *cells(one, kind=", ".join(dict.fromkeys(r.kind for r in group))),
            *self._sizes(group),
        )

    def _sizes(self, group: Sequence[Residual]) -> tuple[str, ...]:
        size = sum(r.bytes for r in group)
        n_steps = {r.n_steps for r in group}
        in_loop = len(n_steps) == 1 and n_steps != {1}
        return (
            str(group[0].n_steps) if in_loop else "",
            show_bytes(sum(r.bytes_per_step for r in group)) if in_loop else "",
            show_bytes(size),
            f"{size / max(self.total, 1):.0%}",
        )

    def notes(self):
        if not self.found:
            return []
        text = f"The gradient needs about {show_bytes(self.estimated)} by an estimate"
        if self.compiled is not None:
            text += f"; compiled, {show_bytes(self.compiled)}"
        text += "."
        if self.compiled and not 1 / _MUCH < self.estimated / self.compiled < _MUCH:
            text += (
                " The compiled figure is that of the program that XLA runs here, which keeps "
                "other arrays than JAX does."
            )
        notes = [("temporary memory", text)]
        fused = sum(r.bytes for r in self.found if is_recomputable(r) and r.n_steps == 1)
        if fused:
            text = (
                f"Of what is kept outside of loops, {show_bytes(fused)} are constant or "
                "elementwise from the rest: XLA may compute these again."
            )
            notes.append(("recomputable", text))
        if not self.advice:
            nothing = (
                "No checkpoint" if not self._lasting_remarks else "Nothing but what is noted"
            )
            text = (
                f"{nothing} saves a tenth of it. If the loss is the mean of many, of tokens or "
                "of examples, `eqg.losses.chunked` computes a few of them at a time."
            )
            return [*notes, ("checkpoint", text)]
        return [*notes, *map(_note, self.advice)]


def _needs(advice: MemoryAdvice) -> tuple[float, int]:
    """The measured bytes, and among equals how much there is to do."""
    return math.inf if advice.measured is None else advice.measured, len(advice.cure)


def _note(advice: MemoryAdvice) -> tuple[str, str]:
    return "logits" if advice.kind == "logits" else "checkpoint", str(advice)


_MOST_LINES = 10
_MUCH = 1.25  # by which the estimate and the compiled program differ


def _sums(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    sums: Counter[Any] = Counter()
    for key, size in pairs:
        sums[key] += size
    return dict(sums.most_common())


def _operations(group: Sequence[Residual]) -> str:
    """Such as `3 logistic, tanh, carry`."""
    names = Counter("carry" if r.kind == "carry" else r.primitive for r in group)
    parts = [name if n == 1 else f"{n} {name}" for name, n in names.most_common(3)]
    return ", ".join(parts) + (", ..." if len(names) > 3 else "")
