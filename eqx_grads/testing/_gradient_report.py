"""The result of `check_gradients`: a verdict for each leaf, and what was found."""

import dataclasses
from collections.abc import Sequence

from .._diagnosis.report import AbstractReport


RIGHT, WRONG, DEAD, KINK = "right", "WRONG", "zero", "kink"
UNMEASURED, SKIPPED = "not measured", "skipped"


@dataclasses.dataclass(frozen=True)
class LeafVerdict:
    """What is known of the gradient of one leaf.

    - `path`: the leaf.
    - `verdict`: `"right"`, `"WRONG"`, `"zero"` (the loss does not depend on the leaf, and the
        gradient is zero), `"kink"` (the loss has no derivative here), `"not measured"` or
        `"skipped"`.
    - `reverse`, `forward`: the derivative along one random direction in both modes; `None` if
        there is no such mode.
    - `differences`, `error`: the same by finite differences, and its estimated error.
    - `relative_error`: how far the gradient is from the differences, relative to its size.
    """

    path: str
    verdict: str
    reverse: float | None = None
    forward: float | None = None
    differences: float | None = None
    error: float = 0.0
    relative_error: float = 0.0


@dataclasses.dataclass(frozen=True)
class GradientFault:
    """A fault of the gradient.

    - `path`: the leaf whose gradient is wrong, or empty if it is not about one leaf.
    - `kind`: `"wrong"`, `"cut"` (the gradient is zero, and the differences are not), `"not a
        derivative"` (the differences are zero, and the gradient is not), `"not finite"`,
        `"modes disagree"` or `"random"`.
    - `layer`: the layer of the function that is at fault, otherwise that of the leaf.
    - `function`: the function without whose rule the gradient is right, or empty.
    - `file, line, primitive`: where that function is called.
    - `text`: what the numbers look like: a factor, a transposed array, one wrong entry.
    - `cure`: what to do.
    """

    path: str
    kind: str
    layer: str = ""
    function: str = ""
    file: str = ""
    line: int = 0
    primitive: str = ""
    text: str = ""
    cure: str = ""


class GradientCheckError(AssertionError):
    """A gradient failed `check_gradients`. The message is the printed report."""


class GradientReport(AbstractReport):
    """The result of [`eqx_grads.testing.check_gradients`][].

    It is false if the gradient is right. A printed report is a table of what is wrong, followed
    by a description of each fault.

    - `found`: the faults, with the fields `path`, `kind`, `layer`, `function`, `file`, `line`,
        `primitive`, `text` and `cure`.
    - `leaves`: a verdict for each leaf, with the fields `path`, `verdict`, `reverse`,
        `forward`, `differences`, `error` and `relative_error`.
    - `numbers`: a dictionary with the `"seed"`, the number of `"evaluations"` of the loss and
        the `"precision"` of the gradient.
    """

    def __init__(
        self,
        name: str,
        leaves: Sequence[LeafVerdict],
        found: Sequence[GradientFault],
        numbers: dict[str, object],
        remarks: Sequence[str] = (),
    ):
        self.name = name
        self.leaves = list(leaves)
        self.found = list(found)
        self.numbers = numbers
        self.remarks = list(remarks)

    @property
    def passed(self) -> bool:
        """Whether no fault was found."""
        return not self.found

    def __getitem__(self, path: str) -> LeafVerdict:
        """The verdict of one leaf."""
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(f"there is no leaf {path!r}")

    def raise_if_failed(self) -> None:
        """Raise a `GradientCheckError` with the whole report if a fault was found."""
        if not self.passed:
            raise GradientCheckError(str(self))

    @property
    def headline(self) -> str:
        counts = {}
        for leaf in self.leaves:
            counts[leaf.verdict] = counts.get(leaf.verdict, 0) + 1
        parts = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        status = "passed" if self.passed else "FAILED"
        n = len(self.leaves)
        return (
            f"The gradient of `{self.name}`: {status} (seed {self.numbers.get('seed')}). "
            f"{n} {'leaf' if n == 1 else 'leaves'}: {parts}."
        )

    def rows(self):
        columns = ("leaf", "what", "gradient", "differences", "error", "layer", "because of")
        rows = []
        for fault in self.found:
            leaf = next((x for x in self.leaves if x.path == fault.path), None)
            have = leaf and (leaf.reverse if leaf.reverse is not None else leaf.forward)
            rows.append(
                (
                    fault.path,
                    fault.kind,
                    _number(have),
                    _number(leaf and leaf.differences),
                    f"{leaf.relative_error:.1e}" if leaf else "",
                    fault.layer,
                    _because(fault),
                )
            )
        return columns, rows

    def notes(self):
        # Faults with the same cause have the same cure: it is said once.
        said: dict[str, list[str]] = {}
        for fault in self.found:
            said.setdefault(fault.cure, []).append(fault.text)
        texts = [
            "\n".join([*filter(None, dict.fromkeys(texts)), c]) for c, texts in said.items()
        ]
        return [*texts, *self.remarks, *self._listed()]

    def _listed(self):
        for verdict, text in _LISTS.items():
            paths = [leaf.path for leaf in self.leaves if leaf.verdict == verdict]
            if paths:
                shown = ", ".join(paths[:8]) + (
                    f", ... ({len(paths)})" if len(paths) > 8 else ""
                )
                yield f"{text}: {shown}."


_LISTS = {
    DEAD: "The loss does not depend on these leaves here, and their gradient is zero",
    KINK: "The loss has a kink here, and the gradient is between the slopes of its sides",
    UNMEASURED: "The differences are too small or too noisy to judge the gradient",
    SKIPPED: "Skipped",
}


def _number(x) -> str:
    return "" if x is None else f"{x:.6g}"


def _because(fault) -> str:
    if not fault.function:
        return ""
    place = f", {fault.file.rpartition('/')[2]}:{fault.line}" if fault.file else ""
    return f"{fault.function}{place}"
