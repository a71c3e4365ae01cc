"""`to_integers`: a model that holds integers and scales instead of its quantized weights."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ..._errors import name_of, rule_error
from .quantized import ensemble_shape, Layer, Quantized
from .quantizer import AbstractQuantizer, Stored, stored
from .report import first_of, map_layers, place_of, QuantizationReport


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
        uint8 (128, 1)
        True
        ```

    The result is a model like the given one, and you call it in the same way. In each quantized
    layer, `weight` holds integers, and `weight_quantizer.scale` the scale. A call multiplies
    the two, and computes with the product in floats. So the model needs less memory, and the
    arithmetic stays the same. The weights before quantization are gone, so keep the given model
    for further training. Integers have no gradient: training the new model changes only its
    scales, biases and other floats, without an error.

    Save it with `equinox.tree_serialise_leaves`. To read it, make the same model and pass it
    through `quantize_model` and `to_integers` inside of `equinox.filter_eval_shape`.

    **Arguments:**

    - `model`: any PyTree with layers that [`eqx_grads.nn.quantize_model`][] has replaced. The
        quantizer of a weight has to be an [`eqx_grads.nn.AbstractQuantizer`][], which has a
        method `encode`: [`eqx_grads.nn.LSQ`][], [`eqx_grads.nn.FakeQuantize`][],
        [`eqx_grads.nn.Binary`][], [`eqx_grads.nn.Ternary`][] or your own. Functions such as
        `eqx_grads.ste.ternary` have no such method.

    **Returns:**

    - The model with integers, `int8` or `uint8` for up to 8 bits. A `uint8` holds two integers
        of up to 4 bits, if the weight has an axis of even size. The last such axis is then half
        as long, and its second half is in the upper bits. The outputs are bitwise equal to the
        outputs of the given model. If calls are compiled, compile this function too,
        `equinox.filter_jit(to_integers)`: XLA may divide by a scale in another way than JAX
        does op by op. A weight halfway between two integers may then be rounded to the other
        one.
    - An [`eqx_grads.nn.QuantizationReport`][]: `swapped` has the layers that hold integers now,
        with their dtype and the bytes of the weight and its scale. `left` has the layers and
        arrays that hold floats. `sizes` has the bytes of the whole model. Biases and the scales
        of inputs stay floats.

    **Raises:**

    [`eqx_grads.RuleError`][] if no layer has a quantized weight that integers represent, or if
    a weight is not finite.
    """
    is_layer = lambda x: isinstance(x, Quantized | Layer)
    choose = lambda path, layer: _reason_to_leave(layer)
    new, swapped, left = map_layers(model, is_layer, choose, _with_integers)
    if not swapped:
        raise rule_error(
            "`to_integers` was given a model without a weight that can be stored as integers.",
            *first_of([f"{place_of(row.path)}: {row.note}" for row in left], 8),
            do="Give it a model whose layers `eqx_grads.nn.quantize_model` has replaced, with "
            "weights quantized by `eqx_grads.nn.FakeQuantize`, `eqx_grads.nn.LSQ`, "
            "`eqx_grads.nn.Binary`, `eqx_grads.nn.Ternary`, or by an "
            "`eqx_grads.nn.AbstractQuantizer` of your own.",
        )
    return new, QuantizationReport(swapped, left, (_size(new), _size(model)))


def _reason_to_leave(layer):
    """Why a layer keeps its floats; `None` if it does not."""
    if not isinstance(layer, Quantized):
        return "not quantized"
    quantizer, weight = layer.weight_quantizer, layer.layer.weight
    if not isinstance(weight, jax.Array | np.ndarray):
        return f"its weight is a `{type(weight).__name__}`"
    if isinstance(quantizer, Stored):
        return "has integers"
    if quantizer is None:
        return "its weight is not quantized"
    if not isinstance(quantizer, AbstractQuantizer):
        return f"`{name_of(quantizer)}` has no `encode`"
    return None


def _with_integers(layer, _):
    def replace(layer):
        get = lambda layer: (layer.layer.weight, layer.weight_quantizer)
        return eqx.tree_at(get, layer, stored(layer.weight_quantizer, layer.layer.weight))

    for _ in ensemble_shape(layer):
        replace = eqx.filter_vmap(replace)
    new = replace(layer)
    size = _size((new.layer.weight, new.weight_quantizer))
    return new, f"{new.layer.weight.dtype}, {size:,} bytes"


def _size(tree):
    """The bytes of all arrays; an array may be in several places."""
    leaves = jax.tree.leaves(tree)
    arrays = {id(x): x for x in leaves if isinstance(x, jax.Array | np.ndarray)}
    return sum(x.size * x.dtype.itemsize for x in arrays.values())
