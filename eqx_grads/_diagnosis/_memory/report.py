"""The report of `explain_memory`: its records, its table, and its advice."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ..layers import group_of
from ..report import AbstractReport
from .plot import plot_memory
from .residuals import is_recomputable, Residual
from .show_bytes import show_bytes


@dataclasses.dataclass(frozen=True)
class MemoryAdvice:
    """Where a checkpoint saves memory.

    - `do`: what to write, and where.
    - `saves`: the temporary bytes of the gradient that it saves, as estimated.
    - `predicted`: the temporary bytes that are left, as estimated.
    - `measured`: those of the compiled gradient with the advice applied, or `None` before
        [`eqx_grads.MemoryReport.verify`][].
    - `is_undone`: whether the compiler of this platform computes nothing again here, so that
        nothing is saved. XLA does so on a CPU, before JAX 0.12, outside of loops.
    """

    do: str
    saves: int
    predicted: int
    measured: int | None = None
    is_undone: bool = False

    def __str__(self) -> str:
        text = f"{self.do}: saves about {show_bytes(self.saves)}, {show_bytes(self.predicted)}"
        text += " are left"
        if self.measured is not None:
            text += f" (measured: {show_bytes(self.measured)})"
        if self.is_undone:
            text += ". Not on this platform: its compiler undoes checkpoints outside of loops"
        return text + "."


class MemoryReport(AbstractReport):
    """What a loss keeps for its backward pass; returned by [`eqx_grads.explain_memory`][].

    - `found`: the arrays that the forward pass computes and keeps, largest first. Each has
        `bytes` and `bytes_per_step`, `steps`, `shape` and `dtype` (of one step), `primitive`,
        `path` (of the layer), `file`, `line` and `code`, `kind`, and `cure`.
    - `inputs`: the arguments of the loss that are kept as they are, in the same form.
    - `total`: the bytes of `found`.
    - `estimated`: the temporary bytes of the gradient, from its program.
    - `compiled`: the temporary bytes of the compiled gradient, or `None`.
    - `advice`: what to checkpoint, the largest saving first. Each has `do`, `saves`,
        `predicted` and `measured`.

    The `kind` of an array is `"computed"`; `"carry"`, which enters a step of a loop; `"rule"`,
    kept by a function with a derivative of its own; `"recomputable"`, which follows by
    elementwise operations from inputs and other arrays that are kept; or `"constant"`, which
    depends on no input. Outside of loops, XLA may compute the last two again and not keep them:
    for three models on a CPU, about 83 %, 40 % and 36 % of their bytes.

    It is false if nothing is found.
    """

    def __init__(
        self,
        residuals: Iterable[Residual],
        *,
        estimated: int,
        compiled: int | None,
        advice: Sequence[MemoryAdvice],
        measure: Sequence[Callable[[], int | None]],
    ):
        residuals = sorted(residuals, key=lambda r: -r.bytes)
        self.found = [r for r in residuals if r.kind != "input"]
        self.inputs = [r for r in residuals if r.kind == "input"]
        self.total = sum(r.bytes for r in self.found)
        self.estimated = estimated
        self.compiled = compiled
        self.advice = list(advice)
        self._measure = list(measure)

    def by_path(self) -> dict[str, int]:
        """The bytes of `found` by the path of the layer, largest first; `""` is no layer."""
        return _sums((r.path, r.bytes) for r in self.found)

    def by_line(self) -> dict[tuple[str, int], int]:
        """The bytes of `found` by file and line, largest first."""
        return _sums(((r.file, r.line), r.bytes) for r in self.found)

    def verify(self) -> "MemoryReport":
        """The same report, in which all advice is measured.

        Each advice is applied to the program of the loss, and its gradient is compiled. Nothing
        is computed.
        """
        advice = [
            dataclasses.replace(advice, measured=measure())
            for advice, measure in zip(self.advice, self._measure, strict=True)
        ]
        return MemoryReport(
            [*self.found, *self.inputs],
            estimated=self.estimated,
            compiled=self.compiled,
            advice=advice,
            measure=self._measure,
        )

    def plot(self, *, axes: Any = None) -> Any:
        """Draw the layers, lines and arrays in columns. The height of a box is its bytes.

        **Arguments:**

        - `axes`: the `matplotlib.axes.Axes` to draw in; by default, those of a new figure.

        **Returns:**

        The axes.

        **Raises:**

        `ImportError` if [Matplotlib](https://matplotlib.org) is not installed.
        """
        return plot_memory(self.found, axes=axes)

    @property
    def headline(self) -> str:
        inputs = show_bytes(sum(r.bytes for r in self.inputs))
        if not self.found:
            return f"Nothing is kept for the backward pass but inputs of the loss ({inputs})."
        arrays = "1 array" if len(self.found) == 1 else f"{len(self.found)} arrays"
        return (
            f"{show_bytes(self.total)} are kept for the backward pass, in {arrays}. "
            f"{inputs} of inputs are kept as they are."
        )

    def rows(self):
        columns = ("bytes", "share", "steps", "per step", "layer", "line", "arrays", "code")
        groups: dict[Hashable, list[Residual]] = {}
        for r in self.found:
            groups.setdefault((group_of(r.path), r.file, r.line, r.steps), []).append(r)
        largest = sorted(groups.values(), key=lambda group: -sum(r.bytes for r in group))
        rows = [self._row(group) for group in largest[:10]]
        others = [r for group in largest[10:] for r in group]
        if others:
            row = self._row(others)
            rows.append((*row[:2], "", "", "", "", f"{len(others)} others", ""))
        return columns, rows

    def _row(self, group: Sequence[Residual]) -> tuple[str, ...]:
        size, first = sum(r.bytes for r in group), group[0]
        in_loop = first.steps > 1
        code = first.code if len(first.code) <= 32 else first.code[:29] + "..."
        return (
            show_bytes(size),
            f"{size / max(self.total, 1):.0%}",
            str(first.steps) if in_loop else "",
            show_bytes(sum(r.bytes_per_step for r in group)) if in_loop else "",
            first.path if len({r.path for r in group}) == 1 else group_of(first.path),
            f"{os.path.basename(first.file)}:{first.line}" if first.file else "unknown",
            _list(group),
            code,
        )

    def notes(self) -> list[str]:
        if not self.found:
            return []
        text = f"The gradient needs about {show_bytes(self.estimated)} of temporary memory"
        if self.compiled is not None:
            text += f"; compiled, {show_bytes(self.compiled)}"
        text += "."
        fused = sum(r.bytes for r in self.found if is_recomputable(r) and r.steps == 1)
        if fused:
            text += (
                f" Of what is kept outside of loops, {show_bytes(fused)} are constant or "
                "elementwise from the rest: XLA may compute these again."
            )
        advice = [f"{i + 1}. {advice}" for i, advice in enumerate(self.advice)]
        return [text, "\n".join(advice) or "No checkpoint saves a tenth of it."]


def _sums(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    sums: Counter[Any] = Counter()
    for key, size in pairs:
        sums[key] += size
    return dict(sums.most_common())


def _list(group: Sequence[Residual]) -> str:
    """Such as `3 logistic, tanh, carry`."""
    names = Counter("carry" if r.kind == "carry" else r.primitive for r in group)
    parts = [name if n == 1 else f"{n} {name}" for name, n in names.most_common(4)]
    return ", ".join(parts) + (", ..." if len(names) > 4 else "")
