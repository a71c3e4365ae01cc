"""Change the layers of a model, with a table of what was done."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from ..._errors import show_path
from ..._tangent_spaces import is_differentiable
from .quantized import Quantized
from .quantizer import describe


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """A row of a `QuantizationReport`.

    - `path`: the path of the layer in the model, `encoder.layers[0]`.
    - `layer`: the name of its type, or the dtype of an array.
    - `weights`, `inputs`: what they are quantized to, for example `"2 bits signed"`.
    - `shape`: of the weight. An ensemble has more axes in front.
    - `note`: why the layer was left, or with which other layer it is shared.
    """

    path: str
    layer: str
    weights: str
    inputs: str
    shape: tuple[int, ...]
    note: str


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """The changes that [`eqx_grads.nn.quantize_model`][] or
    [`eqx_grads.nn.to_integers`][] made. Printing it gives a table.

    - `swapped`: the layers that now are quantized, or hold integers: a list of rows with the
        fields `path`, `layer`, `weights`, `inputs`, `shape` and `note`.
    - `left`: the layers that stay as they were, and all other arrays of floats in the model.
    - `sizes`: from [`eqx_grads.nn.to_integers`][], the bytes of all arrays in the new model and
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
            row.layer,
            row.weights and f"weights {row.weights}",
            row.inputs and f"inputs {row.inputs}",
            str(row.shape),
            row.note,
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True) if w]
        yield "  " + "  ".join(padded).rstrip()


def map_layers(
    model: Any,
    is_layer: Callable[[Any], bool],
    choose: Callable[[str, Any], Any],
    make: Callable[[Any, Any], tuple[Any, str]],
) -> tuple[Any, list[LayerReport], list[LayerReport]]:
    """A model with its layers changed, and the rows of what was changed and what was left.

    `choose(path, layer)` is the reason to leave a layer, a string, or how to change it, and
    `make(layer, how)` the new layer with a note. A layer in several places stays one where it
    is changed in the same way.
    """
    new, swapped, left = [], [], []
    seen: dict[Any, tuple[str, Any]] = {}
    nodes, treedef = jtu.tree_flatten_with_path(model, is_leaf=is_layer)
    for keys, node in nodes:
        path, result = path_of(keys), node
        if is_layer(node):
            how = choose(path, node)
            if isinstance(how, str):
                note = how
            elif (id(node), how) in seen:
                first, result = seen[id(node), how]
                note = f"shared with {first}"
            else:
                try:
                    result, note = make(node, how)
                except Exception as error:
                    error.add_note(f"It is about {place_of(path)}.")
                    raise
                seen[id(node), how] = path, result
            of = () if result is node else (result.weight_quantizer, result.input_quantizer)
            weights, inputs = map(describe, of or (None, None))
            shape = getattr(node.weight, "shape", ())
            row = LayerReport(path, kind_of(node), weights, inputs, shape, note)
            (left if result is node else swapped).append(row)
        elif isinstance(node, jax.Array | np.ndarray) and is_differentiable(node):
            row = LayerReport(path, str(node.dtype), "", "", node.shape, "of no layer")
            left.append(row)
        new.append(result)
    return jax.tree.unflatten(treedef, new), swapped, left


def kind_of(layer: Any) -> str:
    """The name of the type of a layer, even if the layer is quantized."""
    return type(layer.layer if isinstance(layer, Quantized) else layer).__name__


def path_of(keys: Sequence[Any]) -> str:
    """A path as Python writes it: `layers[0]`."""
    return show_path(keys).removeprefix(".")


def place_of(path: str) -> str:
    return f"`{path}`" if path else "the model itself"


def first_of(lines: Sequence[str], n: int) -> list[str]:
    """The first lines of a list for an error, which says how many there are more."""
    more = [f"and {len(lines) - n} more"] if len(lines) > n else []
    return [*lines[:n], *more]
