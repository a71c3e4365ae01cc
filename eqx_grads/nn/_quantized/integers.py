"""`to_integers`: a model that holds integers and scales in place of its quantized weights."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Integer, PyTree

from ..._errors import rule_error, RuleError, show_path
from ..._tangent_spaces import is_differentiable
from .binary_ternary import BinaryLinear, TernaryLinear
from .calibration import members_of
from .layers import AbstractQuantizedLayer, describe, QuantizedConv, QuantizedLinear
from .report import array_row, first_of, LayerReport, QuantizationReport


def to_integers(model: PyTree) -> tuple[PyTree, QuantizationReport]:
    """Replace the quantized weights of a trained model by integers and their scales.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(64, 10, width_size=128, depth=1, key=jax.random.key(0))
        model, _ = eqg.nn.quantize_model(model, {"*": eqg.nn.LSQ(bits=4, channel_axis=0)})

        stored, report = eqg.nn.to_integers(model)
        print(stored.layers[0].weight.dtype, stored.layers[0].weight_quantizer.scale.shape)
        x = jnp.linspace(-1, 1, 64)
        print(jnp.array_equal(stored(x), model(x)))
        ```

        ```text
        int8 (128, 1)
        True
        ```

    The result is a model like the given one, and is called as that one is. In each quantized
    layer, `weight` is integers, and `weight_quantizer.scale` the scale. A call multiplies the
    two, and computes with the product in floats: less memory holds the model, and the
    arithmetic stays what it was. The weights before quantization are gone, so keep the given
    model for further training: integers have no gradient, and training the new model changes
    its scales, biases and other floats only, without an error.

    Save it with `equinox.tree_serialise_leaves`. To read it, make the same model and pass it
    through `quantize_model` and `to_integers` inside of `equinox.filter_eval_shape`.

    **Arguments:**

    - `model`: any PyTree with layers of this library that have a quantized weight, as
        [`eqx_grads.nn.quantize_model`][] makes them. A quantizer has to have a method
        `to_integers(weight)` that returns integers and a scale, whose product is the quantized
        weight: [`eqx_grads.nn.LSQ`][] and [`eqx_grads.nn.FakeQuantize`][] have. Functions such
        as `eqx_grads.ste.ternary` have not. [`eqx_grads.nn.BinaryLinear`][] and
        [`eqx_grads.nn.TernaryLinear`][] are stored as integers of one byte.

    **Returns:**

    - The model with integers, `int8` or `uint8` for up to 8 bits. Each takes a byte or more:
        two of 4 bits are not packed into one. Its outputs are bitwise equal to those of the
        given model. If calls are compiled, compile this function too,
        `equinox.filter_jit(to_integers)`: XLA may divide by a scale in another way than JAX
        does op by op, and a weight halfway between two integers becomes the other one.
    - An [`eqx_grads.nn.QuantizationReport`][]: in `swapped` the layers that hold integers now,
        with the bytes of the weight and its scale; in `left` the layers and arrays that hold
        floats; in `sizes` the bytes of the whole model. Biases and the scales of inputs stay
        floats.

    **Raises:**

    [`eqx_grads.RuleError`][] if no layer has a quantized weight that integers represent, or if
    a weight is NaN.
    """
    is_layer = lambda x: isinstance(x, AbstractQuantizedLayer | eqx.nn.Linear | eqx.nn.Conv)
    nodes, treedef = jtu.tree_flatten_with_path(model, is_leaf=is_layer)
    if not any(isinstance(node, AbstractQuantizedLayer) for _, node in nodes):
        raise rule_error(
            "`to_integers` was given a model without a quantized layer.",
            f"it is a `{type(model).__name__}`",
            do="Give it a model whose layers `eqx_grads.nn.quantize_model` has replaced.",
        )
    _check_some(nodes)
    new, swapped, left = [], [], []
    done: dict[int, tuple[Any, str]] = {}  # a layer in several places stays one
    for keys, node in nodes:
        path = show_path(keys).removeprefix(".")
        reason = _reason_to_leave(node)
        if reason is None:
            if id(node) not in done:
                done[id(node)] = _with_integers(node, path), path
            result, first = done[id(node)]
            sizes = _size(_weight_and_quantizer(result)), _size(_weight_and_quantizer(node))
            note = f"{sizes[0]:,} bytes, {sizes[1]:,} before"
            note = note if path == first else f"shared with {first}"
            kinds = type(node).__name__, str(result.weight.dtype)
            quantized_to = node.describe_weight(), describe(node.input_quantizer)
            row = LayerReport(path, *kinds, *quantized_to, note=note)
            swapped.append(dataclasses.replace(row, shape=node.weight.shape))
            new.append(result)
            continue
        new.append(node)
        if is_layer(node):
            shape = getattr(node.weight, "shape", ())
            left.append(LayerReport(path, type(node).__name__, shape=shape, note=reason))
        elif isinstance(node, jax.Array | np.ndarray) and is_differentiable(node):
            left.append(array_row(path, node, "not of a quantized layer"))
    stored = jax.tree.unflatten(treedef, new)
    return stored, QuantizationReport(swapped, left, (_size(stored), _size(model)))


class _Product(eqx.Module):
    """In place of a quantizer: the floats that integers represent."""

    scale: Float[Array, "..."]
    dtype: Any = eqx.field(static=True)

    def __call__(self, integers: Integer[Array, "..."]) -> Float[Array, "..."]:
        return (integers.astype(self.scale.dtype) * self.scale).astype(self.dtype)


def _check_some(nodes):
    """Raise if no layer holds integers, now or before: the model would be what it was."""
    layers = [(keys, node) for keys, node in nodes if isinstance(node, AbstractQuantizedLayer)]
    reasons = [_reason_to_leave(node) for _, node in layers]
    if any(reason in (None, _HAS_INTEGERS) for reason in reasons):
        return
    names = [show_path(keys).removeprefix(".") for keys, _ in layers]
    raise rule_error(
        "`to_integers` was given a model of which no weight can be stored as integers.",
        *first_of(
            [
                f"{f'`{name}`' if name else 'the model itself'}: {reason}"
                for name, reason in zip(names, reasons, strict=True)
            ],
            8,
        ),
        do="Quantize weights by an `eqx_grads.nn.FakeQuantize`, an `eqx_grads.nn.LSQ`, or a "
        "quantizer of your own with a method `to_integers`. Of two or three values, take an "
        "`eqx_grads.nn.BinaryLinear` or an `eqx_grads.nn.TernaryLinear`.",
    )


_HAS_INTEGERS = "has integers"


def _reason_to_leave(node):
    """Why a leaf or a layer keeps its floats; `None` if it does not."""
    if not isinstance(node, AbstractQuantizedLayer):
        return "not quantized"
    if not isinstance(node.weight, jax.Array | np.ndarray):
        return f"its weight is a `{type(node.weight).__name__}`"
    if isinstance(node, BinaryLinear | TernaryLinear):
        return None
    quantizer = getattr(node, "weight_quantizer", None)
    if isinstance(quantizer, _Product):
        return _HAS_INTEGERS
    if quantizer is None:
        return "its weight is not quantized"
    if not hasattr(quantizer, "to_integers"):
        return f"`{node.describe_weight()}` has no `to_integers`"
    return None


def _with_integers(layer, path):
    replace = _replace_weight
    for _ in members_of(layer):
        replace = eqx.filter_vmap(replace)
    try:
        return replace(layer)
    except RuleError as error:
        where = f"of `{path}`" if path else "of the model itself"
        error.add_note(f"It is the weight {where}.")
        raise


def _replace_weight(layer):
    if isinstance(layer, BinaryLinear | TernaryLinear):
        signs, scale = layer.signs_and_scale()
        integers = signs.astype(jnp.int8)
    else:
        integers, scale = layer.weight_quantizer.to_integers(layer.weight)
    kind = QuantizedConv if isinstance(layer.layer, eqx.nn.Conv) else QuantizedLinear
    return kind.from_layer(
        eqx.tree_at(lambda layer: layer.weight, layer.layer, integers),
        weight_quantizer=_Product(scale, layer.weight.dtype),
        input_quantizer=layer.input_quantizer,
    )


def _weight_and_quantizer(layer):
    return layer.weight, getattr(layer, "weight_quantizer", None)


_ARRAYS = jax.Array | np.ndarray


def _size(tree):
    """The bytes of all arrays, of which one may be in several places."""
    arrays = {id(x): x for x in jax.tree.leaves(tree) if isinstance(x, _ARRAYS)}
    return sum(x.size * x.dtype.itemsize for x in arrays.values())
