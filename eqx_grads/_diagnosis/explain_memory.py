"""`explain_memory`: what a loss keeps for its backward pass, and what to checkpoint."""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from .._jaxprs.evaluate import evaluate
from .memory_advice import Candidate, candidates, with_checkpoints
from .origins import NumberedLoss
from .plot_memory import plot_memory
from .report import AbstractReport
from .residuals import Forward, Residual, total
from .traced_loss import trace_loss, TracedLoss


# The candidates for which the forward pass is traced once more.
_MOST_CANDIDATES = 4
# Advice that saves less is not worth the recomputation.
_LEAST_SAVING = 0.1


@dataclasses.dataclass(frozen=True)
class MemoryAdvice:
    """Where a checkpoint saves memory.

    - `do`: what to write, and where.
    - `saves`: the bytes that it is predicted to save.
    - `predicted`: the temporary bytes of the compiled gradient with it; `None` if the report
      was made with `compile=False`.
    - `measured`: the same, measured; `None` before `MemoryReport.verify`.
    """

    do: str
    saves: int
    predicted: int | None
    measured: int | None = None
    _candidate: Candidate | None = dataclasses.field(default=None, repr=False)


class MemoryReport(AbstractReport):
    """What a loss keeps for its backward pass; see [`eqx_grads.explain_memory`][].

    - `found`: the arrays that are computed in the forward pass and kept, largest first.
    - `inputs`: the arguments of the loss that are kept as they are.
    - `total`: the bytes of `found`.
    - `compiled`: the temporary bytes of the compiled gradient, or `None`.
    - `advice`: what to checkpoint, the largest saving first.
    """

    def __init__(
        self,
        residuals: Sequence[Residual],
        advice: Sequence[MemoryAdvice],
        compiled: int | None,
        traced: TracedLoss,
    ):
        self.found = [r for r in residuals if r.kind != "input"]
        self.inputs = [r for r in residuals if r.kind == "input"]
        self.total = total(self.found)
        self.advice = list(advice)
        self.compiled = compiled
        self._traced = traced

    def by_path(self) -> dict[str, int]:
        """The bytes of `found` by the path of the layer, largest first; `""` for none."""
        return _sums((r.path, r.bytes) for r in self.found)

    def by_line(self) -> dict[tuple[str, int], int]:
        """The bytes of `found` by file and line, largest first."""
        return _sums(((r.file, r.line), r.bytes) for r in self.found)

    def verify(self) -> "MemoryReport":
        """The same report, with all advice measured.

        Compiles the gradient once for each advice, with the advice applied to the traced
        program. Nothing is computed.
        """
        advice = [
            dataclasses.replace(
                advice,
                measured=_temporary_bytes(
                    with_checkpoints(self._traced, advice._candidate), self._traced
                ),
            )
            for advice in self.advice
        ]
        return MemoryReport([*self.found, *self.inputs], advice, self.compiled, self._traced)

    def plot(self, *, axes: Any = None) -> Any:
        """Draw the bytes by layer, line and array, from left to right; the height of a box is
        its share of all bytes.

        **Arguments:**

        - `axes`: the `matplotlib.axes.Axes` to draw in; by default, those of a new figure.

        **Returns:**

        The axes.
        """
        return plot_memory(self.found, axes=axes)

    @property
    def headline(self) -> str:
        inputs = show_bytes(total_of(self.inputs))
        if not self.found:
            return f"Nothing is kept for the backward pass but inputs of the loss ({inputs})."
        return (
            f"{show_bytes(self.total)} are kept for the backward pass, in "
            f"{len(self.found)} arrays, and {inputs} of inputs as they are."
        )

    def rows(self):
        columns = ("bytes", "share", "steps", "per step", "layer", "line", "what", "kind")
        groups = _grouped(self.found)
        rows = [_row(group, self.total) for group in groups[:10]]
        rest = [r for group in groups[10:] for r in group]
        if rest:
            size = sum(r.bytes for r in rest)
            share = f"{size / self.total:.0%}"
            rows.append((show_bytes(size), share, "", "", "", "", f"{len(rest)} others", ""))
        return columns, rows

    def notes(self):
        notes = []
        if self.compiled is not None and self.found:
            notes.append(self._about_the_compiled())
        for i, advice in enumerate(self.advice):
            notes.append(f"{i + 1}. {advice.do}{_measurement(advice)}")
        return notes

    def _about_the_compiled(self) -> str:
        fused = sum(r.bytes for r in self.found if not r.is_kept_by_compiler)
        text = f"The compiled gradient takes {show_bytes(self.compiled)} of temporary memory."
        if fused:
            text += (
                f" It need not keep the {show_bytes(fused)} that are constant, or elementwise "
                "from what is kept: XLA computes these once more where they are used."
            )
        return text


def explain_memory(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    compile: bool = True,
    **kwargs: Any,
) -> MemoryReport:
    numbered = NumberedLoss(
        trace_loss("explain_memory", loss, model, args, kwargs, steps_are_visible=False)
    )
    traced = numbered.traced
    forward = Forward(numbered, numbered)
    pairs = list(zip(forward.sources(), forward.records(), strict=True))
    compiled = None
    if compile:
        compiled = _temporary_bytes(lambda *values: evaluate(traced.program, values)[0], traced)
    before = _kept_by_compiler(r for _, r in pairs)
    advice = []
    for candidate in candidates(numbered, pairs, _MOST_CANDIDATES):
        after = Forward(with_checkpoints(traced, candidate), numbered).records()
        saves = before - _kept_by_compiler(after) - candidate.recomputed
        if saves > _LEAST_SAVING * before:
            predicted = None if compiled is None else compiled - saves
            advice.append(MemoryAdvice(_text(candidate, saves, before), saves, predicted, None, candidate))
    advice.sort(key=lambda a: -a.saves)
    residuals = sorted((r for _, r in pairs), key=lambda r: -r.bytes)
    return MemoryReport(residuals, advice, compiled, traced)


def _kept_by_compiler(residuals) -> int:
    return sum(r.bytes for r in residuals if r.is_kept_by_compiler)


def _temporary_bytes(fn: Callable[..., Any], traced: TracedLoss) -> int | None:
    """What the compiled gradient of a function of the inputs allocates, and gives back."""
    n = len(traced.leaves)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.program.in_avals]

    def gradient(arrays, others):
        return jax.value_and_grad(lambda arrays: fn(*arrays, *others))(arrays)

    compiled = jax.jit(gradient).lower(types[:n], types[n:]).compile()
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def show_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} GiB"
