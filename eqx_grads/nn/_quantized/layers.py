"""Linear layers and convolutions with a quantized weight and input."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Key

from ..._errors import check_flags, name_of, rule_error, RuleError
from .._argument_checks import as_sizes
from .._dtypes import layer_dtype
from .argument_checks import (
    as_features,
    check_convolution,
    check_dtypes,
    check_image,
    check_input,
    check_layer,
    check_quantized,
    check_quantizer,
)
from .quantizers import AbstractQuantizer


Quantizer = Callable[[Array], Array]
Size = int | Literal["scalar"]


class AbstractQuantizedLayer(eqx.Module):
    """A layer of Equinox that is called with a quantized weight."""

    layer: eqx.AbstractVar[eqx.nn.Linear | eqx.nn.Conv]
    input_quantizer: eqx.AbstractVar[Quantizer | None]

    @abc.abstractmethod
    def quantized_weight(self) -> Float[Array, "..."]:
        """The weight that the layer computes with. For an ensemble, call this method under
        `equinox.filter_vmap`."""

    @abc.abstractmethod
    def describe_weight(self) -> str:
        """What the weight is quantized to, in one or two words."""

    @property
    def weight(self) -> Any:
        """The weight before quantization, which is trained."""
        return self.layer.weight

    @property
    def bias(self) -> Any:
        """The bias, which is not quantized."""
        return self.layer.bias

    def __call__(
        self, x: Float[Array, "..."], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "..."]:
        """**Arguments:**

        - `x`: as for the layer of Equinox.
        - `key`: ignored.

        **Returns:**

        What that layer would return with the quantized weight and input.
        """
        del key
        if isinstance(self.layer, eqx.nn.Linear):
            check_input(type(self).__name__, self.layer, x)
        else:
            check_image(type(self).__name__, self.layer, x)
        weight = self.quantized_weight()
        if self.input_quantizer is not None:
            x = _quantized("input", self.input_quantizer, x)
        if isinstance(self.layer, eqx.nn.Conv):
            check_dtypes(type(self).__name__, x, weight)
        return eqx.tree_at(lambda layer: layer.weight, self.layer, weight)(x)


class AbstractQuantizedLinear(AbstractQuantizedLayer):
    """A linear layer of Equinox that is called with a quantized weight."""

    layer: eqx.AbstractVar[eqx.nn.Linear]

    @property
    def in_features(self) -> Size:
        """The size of the input, or `"scalar"`."""
        return self.layer.in_features

    @property
    def out_features(self) -> Size:
        """The size of the output, or `"scalar"`."""
        return self.layer.out_features


class QuantizedLinear(AbstractQuantizedLinear):
    r"""`equinox.nn.Linear` with a quantized weight, and input.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        layer = eqg.nn.QuantizedLinear(
            64,
            10,
            weight_quantizer=eqg.nn.LSQ(bits=2),
            input_quantizer=eqg.nn.FakeQuantize(bits=8),
            key=jax.random.key(0),
        )
        print(len(jnp.unique(layer.quantized_weight())) <= 4)

        grads = eqx.filter_grad(lambda layer: layer(jnp.ones(64)).sum())(layer)
        print(jnp.any(grads.weight != 0), grads.weight_quantizer.scale != 0)
        ```

        ```text
        True
        True True
        ```

    **Derivative:**

    With $Q$ and $A$ the quantizers, that of $y = Q(W)\,A(x) + b$ by the chain rule.
    """

    layer: eqx.nn.Linear
    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None

    def __init__(
        self,
        in_features: Size,
        out_features: Size,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        weight_quantizer: Quantizer | None,
        input_quantizer: Quantizer | None = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `in_features`, `out_features`, `use_bias`, `dtype`, `key`: as for
            `equinox.nn.Linear`.
        - `weight_quantizer`: a function of an array that returns one like it:
            [`eqx_grads.nn.LSQ`][], [`eqx_grads.nn.FakeQuantize`][],
            [`eqx_grads.ste.binary_sign`][], your own. An
            [`eqx_grads.nn.AbstractQuantizer`][] is fitted to the weight.
        - `input_quantizer`: as `weight_quantizer`, but for the input. It must have its scale.

        With `None`, the weight or the input is not quantized.
        """
        layer = make_linear(
            "QuantizedLinear", in_features, out_features, use_bias, dtype, key=key
        )
        quantizers = fit_quantizers("QuantizedLinear", layer, weight_quantizer, input_quantizer)
        self.layer = layer
        self.weight_quantizer, self.input_quantizer = quantizers

    def quantized_weight(self) -> Float[Array, "out in"]:
        """The weight that the layer computes with."""
        return _quantized("weight", self.weight_quantizer, self.weight)

    def describe_weight(self) -> str:
        return describe(self.weight_quantizer)

    @staticmethod
    def from_layer(
        layer: eqx.Module,
        *,
        weight_quantizer: Quantizer | None,
        input_quantizer: Quantizer | None = None,
    ) -> "QuantizedLinear":
        """The same layer, quantized.

        **Arguments:**

        - `layer`: an `equinox.nn.Linear`, or an ensemble of them made by
            `equinox.filter_vmap`: each member then has quantizers of its own.
        - `weight_quantizer`, `input_quantizer`: as above.
        """
        new = QuantizedLinear(1, 1, weight_quantizer=None, key=jr.key(0))
        return replace_layer(new, layer, eqx.nn.Linear, weight_quantizer, input_quantizer)


class QuantizedConv(AbstractQuantizedLayer):
    r"""`equinox.nn.Conv` with a quantized weight, and input.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        conv = eqg.nn.QuantizedConv(
            num_spatial_dims=2,
            in_channels=3,
            out_channels=8,
            kernel_size=3,
            padding="SAME",
            weight_quantizer=eqg.nn.LSQ(bits=4, channel_axis=0),
            key=jax.random.key(0),
        )
        print(conv(jnp.ones((3, 16, 16))).shape)
        print(conv.weight_quantizer.scale.shape)
        ```

        ```text
        (8, 16, 16)
        (8, 1, 1, 1)
        ```

    **Derivative:**

    With $Q$ and $A$ the quantizers, that of $y = Q(W) * A(x) + b$ by the chain rule.
    """

    layer: eqx.nn.Conv
    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        weight_quantizer: Quantizer | None,
        input_quantizer: Quantizer | None = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `weight_quantizer`, `input_quantizer`: as for [`eqx_grads.nn.QuantizedLinear`][].
            The input is quantized before it is padded.

        All others as for `equinox.nn.Conv`.
        """
        in_channels, out_channels = as_sizes(
            "QuantizedConv", in_channels=in_channels, out_channels=out_channels
        )
        check_flags("QuantizedConv", use_bias=use_bias)
        sizes = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        check_convolution(num_spatial_dims, groups, padding_mode, **sizes)
        layer = eqx.nn.Conv(
            num_spatial_dims,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bool(use_bias),
            padding_mode,
            layer_dtype("QuantizedConv", dtype),
            key=key,
        )
        quantizers = fit_quantizers("QuantizedConv", layer, weight_quantizer, input_quantizer)
        self.layer = layer
        self.weight_quantizer, self.input_quantizer = quantizers

    def quantized_weight(self) -> Float[Array, "out in *kernel"]:
        """The weight that the layer computes with."""
        return _quantized("weight", self.weight_quantizer, self.weight)

    def describe_weight(self) -> str:
        return describe(self.weight_quantizer)

    @staticmethod
    def from_layer(
        layer: eqx.Module,
        *,
        weight_quantizer: Quantizer | None,
        input_quantizer: Quantizer | None = None,
    ) -> "QuantizedConv":
        """The same layer, quantized.

        **Arguments:**

        - `layer`: an `equinox.nn.Conv`, `Conv1d`, `Conv2d` or `Conv3d`, or an ensemble of them
            made by `equinox.filter_vmap`: each member then has quantizers of its own.
        - `weight_quantizer`, `input_quantizer`: as above.
        """
        new = QuantizedConv(1, 1, 1, 1, weight_quantizer=None, key=jr.key(0))
        return replace_layer(new, layer, eqx.nn.Conv, weight_quantizer, input_quantizer)


def make_linear(
    name: str, in_features: Size, out_features: Size, use_bias: bool, dtype: Any, *, key: Array
) -> eqx.nn.Linear:
    """The linear layer of a quantized one, its arguments checked."""
    in_features = as_features(name, "in_features", in_features)
    out_features = as_features(name, "out_features", out_features)
    check_flags(name, use_bias=use_bias)
    dtype = layer_dtype(name, dtype)
    return eqx.nn.Linear(in_features, out_features, bool(use_bias), dtype, key=key)


def replace_layer(
    new: Any, layer: Any, kind: type, weight_quantizer: Any, input_quantizer: Any
) -> Any:
    """The quantized layer `new`, with another layer of Equinox and other quantizers."""
    name = type(new).__name__
    check_layer(name, layer, kind)
    fields = ("layer", "weight_quantizer", "input_quantizer")
    quantizers = fit_quantizers(name, layer, weight_quantizer, input_quantizer)
    for field, part in zip(fields, (layer, *quantizers), strict=True):
        if hasattr(new, field):
            get = lambda new, field=field: getattr(new, field)
            new = eqx.tree_at(get, new, part, is_leaf=lambda x: x is None)
    return new


def with_input_quantizer(layer: AbstractQuantizedLayer, input_quantizer: Any) -> Any:
    """The layer with its own weight and weight quantizer, and another input quantizer."""
    name = type(layer).__name__
    _, ready = fit_quantizers(name, layer.layer, None, input_quantizer)
    get = lambda layer: layer.input_quantizer
    return eqx.tree_at(get, layer, ready, is_leaf=lambda x: x is None)


class _StaticFunction(eqx.Module):
    """A function without arrays as a static field: `jax.lax.scan` over layers, as in
    `equinox.nn.MLP`, takes leaves that are arrays only."""

    fn: Quantizer = eqx.field(static=True)

    @property
    def __name__(self):
        return name_of(self.fn)

    def __call__(self, x):
        return self.fn(x)


def describe(quantizer: Quantizer | None) -> str:
    """What a quantizer quantizes to, for a report."""
    if quantizer is None:
        return ""
    bits = getattr(quantizer, "bits", None)
    if bits is None:
        return name_of(quantizer)
    text = f"{bits} bit" + "s" * (bits != 1)
    signed = getattr(quantizer, "signed", None)
    return text if signed is None else f"{text} {'signed' if signed else 'unsigned'}"


def fit_quantizers(
    name: str, layer: Any, weight_quantizer: Any, input_quantizer: Any
) -> tuple[Any, Any]:
    """The quantizers of a layer, checked, that of the weight fitted to it.

    An ensemble has more axes in front of its weight, and its quantizers have them too.
    """
    kernel = getattr(layer, "num_spatial_dims", 0)
    ready = lambda weight: (
        _ready_for_weight(name, weight_quantizer, weight),
        _ready_for_input(name, input_quantizer),
    )
    for _ in range(layer.weight.ndim - 2 - kernel):
        ready = eqx.filter_vmap(ready)
    return ready(jnp.asarray(layer.weight))


def _ready_for_weight(name, quantizer, weight):
    check_quantizer(name, "weight", quantizer)
    if isinstance(quantizer, AbstractQuantizer):
        return quantizer.fit(weight)
    return _without_function_leaf(quantizer)


def _ready_for_input(name, quantizer):
    check_quantizer(name, "input", quantizer)
    if isinstance(quantizer, AbstractQuantizer) and quantizer.needs_fit:
        raise no_input_scale(name, quantizer)
    return _without_function_leaf(quantizer)


def no_input_scale(name: str, quantizer: Any, *where: str) -> RuleError:
    """The error of a layer, named `name`, whose input quantizer was not fitted."""
    kind = type(quantizer).__name__
    article = "an" if kind.startswith(("LSQ", *"AEIOU")) else "a"  # an L is spoken "ell"
    return rule_error(
        f"The `input_quantizer` of `{name}` has no scale.",
        *where,
        f"it is {article} `{kind}` that was made without one, and it was not fitted to inputs",
        do="`quantize_model(..., calibrate=batch)` fits those of a model, and "
        "`input_quantizer=quantizer.fit(x)` fits one. To read a calibrated model from a "
        "file, no batch is needed: make the same quantizer with `scale=1.0`, and the file "
        "has the scale.",
    )


def _without_function_leaf(quantizer: Any) -> Any:
    arrays = [x for x in jax.tree.leaves(quantizer) if eqx.is_array_like(x)]
    known = AbstractQuantizer | _StaticFunction
    if quantizer is None or isinstance(quantizer, known) or arrays:
        return quantizer
    return _StaticFunction(quantizer)


def _quantized(what, quantizer, x):
    if quantizer is None:
        return x
    out = quantizer(x)
    check_quantized(what, quantizer, x, out)
    return out
