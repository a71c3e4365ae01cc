"""A layer that is called with a quantized weight, and a quantized input."""

from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._errors import bad_argument, name_of, rule_error, type_of
from .quantizer import (
    AbstractQuantizer,
    needs_fit,
    Quantizer,
    Stored,
)


# The layers that `quantize_model` looks for.
Layer: TypeAlias = eqx.nn.Linear | eqx.nn.Conv | eqx.nn.ConvTranspose


class Quantized(eqx.Module):
    r"""A layer that is called with a quantized weight, and a quantized input.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        layer = eqg.nn.Quantized(
            eqx.nn.Linear(64, 10, key=jax.random.key(0)),
            eqg.nn.LSQ(bits=2),
            eqg.nn.FakeQuantize(bits=8),
        )
        print(len(jnp.unique(layer.quantized_weight())) <= 4)

        grads = eqx.filter_grad(lambda layer: layer(jnp.ones(64)).sum())(layer)
        print(jnp.any(grads.layer.weight != 0), grads.weight_quantizer.scale != 0)
        ```

        ```text
        True
        True True
        ```

    `quantize_model` makes them. All attributes of the layer, such as `weight`, can be read from
    the `Quantized` layer too.

    **Derivative:**

    The layer has the weight $Q(W)$ and the input $A(x)$, and the chain rule applies to the
    quantizers $Q$ and $A$.
    """

    layer: Any
    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None

    def __init__(
        self,
        layer: Any,
        weight_quantizer: Quantizer | None = None,
        input_quantizer: Quantizer | None = None,
    ):
        """**Arguments:**

        - `layer`: any Module with an array `weight`: an `equinox.nn.Linear`, `equinox.nn.Conv`,
            `equinox.nn.Embedding`, your own. The members of an ensemble of layers of Equinox,
            made by `equinox.filter_vmap`, have their own quantizers.
        - `weight_quantizer`: a function of an array that returns one like it:
            [`eqx_grads.nn.LSQ`][], [`eqx_grads.nn.FakeQuantize`][], [`eqx_grads.nn.Binary`][],
            [`eqx_grads.nn.Ternary`][], [`eqx_grads.ste.binary_sign`][], your own. An
            [`eqx_grads.nn.AbstractQuantizer`][] is fitted to the weight.
        - `input_quantizer`: as `weight_quantizer`, but for the first input. It must have its
            scale. A convolution pads the quantized input.

        With `None`, the weight or the input is not quantized.
        """
        weight = getattr(layer, "weight", None)
        if not callable(layer) or not isinstance(weight, jax.Array | np.ndarray):
            raise rule_error(
                "The `layer` of `Quantized` has no array `weight`.",
                f"it is a `{type(layer).__name__}`, its weight is a `{type(weight).__name__}`",
                do="Give a Module with an array `weight`. Quantize a layer of "
                "`equinox.nn.Shared` before it is shared.",
            )
        _check_quantizer("weight", weight_quantizer)
        _check_quantizer("input", input_quantizer)

        def quantizers(weight):
            of_weight = weight_quantizer
            if isinstance(of_weight, AbstractQuantizer):
                of_weight = of_weight.fit(weight)
            # A scan over layers, as in `equinox.nn.MLP`, takes no leaf that is a function.
            is_leaf = lambda q: jax.tree_util.all_leaves([q])
            wrap = lambda q: jax.tree_util.Partial(q) if is_leaf(q) else q
            return wrap(of_weight), wrap(input_quantizer)

        for _ in ensemble_shape(layer):
            quantizers = eqx.filter_vmap(quantizers)
        self.layer = layer
        self.weight_quantizer, self.input_quantizer = quantizers(jnp.asarray(weight))

    def quantized_weight(self) -> Float[Array, "..."]:
        """The weight that the layer computes with. For an ensemble, call this method under
        `equinox.filter_vmap`."""
        return _quantize("weight", self.weight_quantizer, self.layer.weight)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """**Arguments:**

        - `x`, and all others: as for the layer.

        **Returns:**

        What the layer returns with the quantized weight and input.
        """
        weight, x = self.quantized_weight(), _quantize("input", self.input_quantizer, x)
        return eqx.tree_at(lambda layer: layer.weight, self.layer, weight)(x, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "layer" or name.startswith("__"):  # not there yet, when it is copied
            raise AttributeError(name)
        return getattr(self.layer, name)


def with_input_quantizer(layer: Quantized, quantizer: Quantizer | None) -> Quantized:
    """The layer with the same weight and weight quantizer."""
    get = lambda layer: layer.input_quantizer
    return eqx.tree_at(get, layer, quantizer, is_leaf=lambda x: x is None)


def ensemble_shape(layer: Any) -> tuple[int, ...]:
    """The axes of an ensemble: a weight has them in front of its own."""
    if isinstance(layer, Quantized):
        return ensemble_shape(layer.layer)
    if not isinstance(layer, Layer | eqx.nn.Embedding):
        return ()
    own = 2 + getattr(layer, "num_spatial_dims", 0)
    return layer.weight.shape[: layer.weight.ndim - own]


def _check_quantizer(what, quantizer):
    is_quantizer = callable(quantizer) and not isinstance(quantizer, type)
    if (what == "input" and needs_fit(quantizer)) or not (quantizer is None or is_quantizer):
        do = (
            "Give a function of an array, such as `eqx_grads.nn.LSQ(bits=4)`. A quantizer of "
            "an input needs its scale: `quantize_model(..., calibrate=batch)` fits all scales "
            "of a model, `quantizer.fit(x)` one. To read a calibrated model from a file, no "
            "batch is needed: make the same quantizer with `scale=1.0`."
        )
        wanted = "a quantizer that has its scale" if what == "input" else "a quantizer"
        raise bad_argument("Quantized", f"{what}_quantizer", wanted, quantizer, do)


def _quantize(what, quantizer, x):
    if quantizer is None:
        return x
    out = quantizer(x)
    if isinstance(quantizer, Stored):  # of integers, two of which may be in a byte
        return out
    if jnp.shape(out) != jnp.shape(x) or not jnp.issubdtype(jnp.result_type(out), jnp.floating):
        raise rule_error(
            f"The {what} quantizer did not return an array like its input.",
            f"`{name_of(quantizer)}` was given {type_of(x)} and returned {type_of(out)}",
            do="A quantizer is a function of an array that returns floats of the same shape.",
        )
    return out
