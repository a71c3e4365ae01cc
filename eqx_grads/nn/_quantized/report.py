"""What `quantize_model` and `to_integers` did to the layers of a model, as a table."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """A row of a `QuantizationReport`.

    - `path`: the path of the layer in the model, `encoder.layers[0]`.
    - `old`, `new`: the names of the types; `new` is empty where nothing was swapped.
    - `weights`, `inputs`: what they are quantized to, for example `"2 bits signed"`.
    - `shape`: of the weight. An ensemble has more axes in front.
    - `note`: why the layer was left, or with which other layer it is shared.
    """

    path: str
    old: str
    new: str = ""
    weights: str = ""
    inputs: str = ""
    shape: tuple[int, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """The changes that [`eqx_grads.nn.quantize_model`][] or
    [`eqx_grads.nn.to_integers`][] made. Printing it gives a table.

    - `swapped`: the layers that are quantized now, or hold integers now, a list of rows with
        the fields `path`, `old`, `new`, `weights`, `inputs`, `shape` and `note`.
    - `left`: the layers that are not, and all other arrays of floats in the model.
    - `sizes`: of [`eqx_grads.nn.to_integers`][], the bytes of all arrays in the new model and
        in the given one, biases and scales included.
    """

    swapped: list[LayerReport]
    left: list[LayerReport]
    sizes: tuple[int, int] | None = None

    def __str__(self) -> str:
        lines = [f"swapped: {len(self.swapped)}", *_table(self.swapped)]
        lines += [f"left: {len(self.left)}", *_table(self.left)]
        if self.sizes is not None:
            now, before = self.sizes
            lines.append(f"all arrays: {now:,} bytes, {before:,} before")
        return "\n".join(lines)


def _table(rows: Sequence[LayerReport]) -> Iterator[str]:
    cells = [
        (
            row.path or "(the model)",
            f"{row.old} -> {row.new}" if row.new else row.old,
            f"weights {row.weights}" if row.weights else "",
            f"inputs {row.inputs}" if row.inputs else "",
            str(row.shape),
            row.note,
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True) if w]
        yield "  " + "  ".join(padded).rstrip()


def first_of(lines: Sequence[str], n: int) -> list[str]:
    """The first lines of a list for an error, which says how many there are more."""
    more = [f"and {len(lines) - n} more"] if len(lines) > n else []
    return [*lines[:n], *more]


def array_row(path: str, array: Any, note: str) -> LayerReport:
    """The row of an array that is in no layer that could be replaced."""
    return LayerReport(path, str(array.dtype), shape=array.shape, note=note)
