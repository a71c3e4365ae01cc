"""Linear layers with weights of two or three values."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from ... import ste
from ..._errors import check_flags
from ..._rules.float_args import is_known, widen
from .argument_checks import as_threshold, check_backward
from .layers import (
    AbstractQuantizedLinear,
    fit_quantizers,
    make_linear,
    Quantizer,
    replace_layer,
    Size,
)


class BinaryLinear(AbstractQuantizedLinear):
    r"""`equinox.nn.Linear` with a weight of single bits.

    The signs of the weight, times the mean of $|w|$ over the inputs of each output (XNOR-Net,
    [Rastegari et al. 2016](https://arxiv.org/abs/1603.05279)), or without a scale
    (BinaryConnect, [Courbariaux et al. 2015](https://arxiv.org/abs/1511.00363)).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        layer = eqg.nn.BinaryLinear(
            64, 10, scale=False, input_quantizer=eqg.ste.binary_sign, key=jax.random.key(0)
        )
        print(jnp.unique(layer.quantized_weight()))
        ```

        ```text
        [-1.  1.]
        ```

    **Derivative:**

    With $\alpha_i = \operatorname{mean}_j |W_{ij}|$, that of
    $y = \alpha\,\operatorname{sign}(W)\,A(x) + b$, where the sign is
    [`eqx_grads.ste.binary_sign`][]: straight through where $|w| \le 1$. A larger weight has no
    gradient from its sign, so training usually clips weights to $[-1, 1]$ after each step. The
    scale is differentiated too.
    """

    layer: eqx.nn.Linear
    input_quantizer: Quantizer | None
    backward: str | Callable[..., Any] = eqx.field(static=True)
    scale: bool = eqx.field(static=True)

    def __init__(
        self,
        in_features: Size,
        out_features: Size,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        scale: bool = True,
        backward: str | Callable[..., Any] = "hard_tanh",
        input_quantizer: Quantizer | None = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `in_features`, `out_features`, `use_bias`, `dtype`, `key`: as for
            `equinox.nn.Linear`.
        - `scale`: whether each output is scaled by the mean $|w|$ of its weights.
        - `backward`: as for [`eqx_grads.ste.wrap`][].
        - `input_quantizer`: as for [`eqx_grads.nn.QuantizedLinear`][].
        """
        check_backward("BinaryLinear", backward)
        check_flags("BinaryLinear", scale=scale)
        layer = make_linear("BinaryLinear", in_features, out_features, use_bias, dtype, key=key)
        self.layer = layer
        _, self.input_quantizer = fit_quantizers("BinaryLinear", layer, None, input_quantizer)
        self.backward = backward
        self.scale = bool(scale)

    def quantized_weight(self) -> Float[Array, "out in"]:
        """The weight that the layer computes with: two values for each output."""
        signs, scale = self.signs_and_scale()
        return signs * scale

    def signs_and_scale(self) -> tuple[Float[Array, "out in"], Float[Array, "..."]]:
        """The factors of the quantized weight."""
        signs = ste.binary_sign(self.weight, backward=self.backward)
        if not self.scale:
            return signs, jnp.ones((), signs.dtype)
        return signs, jnp.mean(jnp.abs(self.weight), axis=1, keepdims=True)

    def describe_weight(self) -> str:
        return "1 bit"

    @staticmethod
    def from_layer(
        layer: eqx.Module,
        *,
        scale: bool = True,
        backward: str | Callable[..., Any] = "hard_tanh",
        input_quantizer: Quantizer | None = None,
    ) -> "BinaryLinear":
        """The same layer, with a weight of single bits.

        **Arguments:**

        - `layer`: an `equinox.nn.Linear`, or an ensemble of them.
        - `scale`, `backward`, `input_quantizer`: as above.
        """
        options: dict[str, Any] = {"scale": scale, "backward": backward}
        new = BinaryLinear(1, 1, **options, key=jr.key(0))
        return replace_layer(new, layer, eqx.nn.Linear, None, input_quantizer)


class TernaryLinear(AbstractQuantizedLinear):
    r"""`equinox.nn.Linear` with a weight of minus ones, zeros and ones.

    Ternary weight networks, [Li et al. (2016)](https://arxiv.org/abs/1605.04711): zero where
    $|w|$ is within a threshold and the sign elsewhere, times the mean of $|w|$ over the weights
    that are not zero, for each output.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        layer = eqg.nn.TernaryLinear(64, 10, scale=False, key=jax.random.key(0))
        values = jnp.unique(layer.quantized_weight())
        print(values)
        ```

        ```text
        [-1.  0.  1.]
        ```

    **Derivative:**

    That of $y = \alpha\,T(W)\,A(x) + b$, where $T$ is [`eqx_grads.ste.ternary`][]: straight
    through where $|w| \le 1$, the threshold being a constant. The scale is differentiated too.
    Where no weight of an output is beyond the threshold, scale and gradient are zero: it stays
    as it is. A layer with no such weight at all, as one of zeros, is a warning, unless
    `scale=False`.
    """

    layer: eqx.nn.Linear
    input_quantizer: Quantizer | None
    threshold: float | Literal["mean"] = eqx.field(static=True)
    backward: str | Callable[..., Any] = eqx.field(static=True)
    scale: bool = eqx.field(static=True)

    def __init__(
        self,
        in_features: Size,
        out_features: Size,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        threshold: float | Literal["mean"] = "mean",
        scale: bool = True,
        backward: str | Callable[..., Any] = "hard_tanh",
        input_quantizer: Quantizer | None = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `in_features`, `out_features`, `use_bias`, `dtype`, `key`: as for
            `equinox.nn.Linear`.
        - `threshold`: the largest $|w|$ that becomes zero. `"mean"` is 0.7 of the mean of $|w|$
            over the inputs of each output.
        - `scale`: whether each output is scaled by the mean $|w|$ of its weights that are not
            zero.
        - `backward`, `input_quantizer`: as for [`eqx_grads.nn.BinaryLinear`][].
        """
        check_backward("TernaryLinear", backward)
        check_flags("TernaryLinear", scale=scale)
        layer = make_linear(
            "TernaryLinear", in_features, out_features, use_bias, dtype, key=key
        )
        self.layer = layer
        _, self.input_quantizer = fit_quantizers("TernaryLinear", layer, None, input_quantizer)
        self.threshold = as_threshold("TernaryLinear", threshold)
        self.backward = backward
        self.scale = bool(scale)
        _warn_of_zero_scale(self)

    def quantized_weight(self) -> Float[Array, "out in"]:
        """The weight that the layer computes with: three values for each output."""
        signs, scale = self.signs_and_scale()
        return signs * scale

    def signs_and_scale(self) -> tuple[Float[Array, "out in"], Float[Array, "..."]]:
        """The factors of the quantized weight."""
        size = jnp.abs(self.weight)
        threshold = self.threshold
        if threshold == "mean":
            mean = jnp.mean(jax.lax.stop_gradient(size), axis=1, keepdims=True)
            threshold = 0.7 * mean
        signs = ste.ternary(self.weight, threshold=threshold, backward=self.backward)
        if not self.scale:
            return signs, jnp.ones((), signs.dtype)
        kept = jax.lax.stop_gradient(signs != 0)
        total = jnp.sum(jnp.where(kept, widen(size), 0), axis=1, keepdims=True)
        mean = total / jnp.maximum(jnp.sum(kept, axis=1, keepdims=True), 1).astype(total.dtype)
        return signs, mean.astype(signs.dtype)

    def describe_weight(self) -> str:
        return f"{math.log2(3):.2f} bits"

    @staticmethod
    def from_layer(
        layer: eqx.Module,
        *,
        threshold: float | Literal["mean"] = "mean",
        scale: bool = True,
        backward: str | Callable[..., Any] = "hard_tanh",
        input_quantizer: Quantizer | None = None,
    ) -> "TernaryLinear":
        """The same layer, with a weight of three values.

        **Arguments:**

        - `layer`: an `equinox.nn.Linear`, or an ensemble of them.
        - `threshold`, `scale`, `backward`, `input_quantizer`: as above.
        """
        options: dict[str, Any] = {"threshold": threshold, "scale": scale, "backward": backward}
        new = TernaryLinear(1, 1, **options, key=jr.key(0))
        new = replace_layer(new, layer, eqx.nn.Linear, None, input_quantizer)
        _warn_of_zero_scale(new)
        return new


def _warn_of_zero_scale(layer: TernaryLinear) -> None:
    """Warn if the scale of every output is zero, as far as the weights are known. The gradient
    of the weights is then zero, too."""
    if not layer.scale or not is_known(layer.weight):
        return
    largest = np.max(np.abs(np.asarray(layer.weight)), initial=0.0)
    # That of "mean" is less than the largest.
    threshold = 0.0 if isinstance(layer.threshold, str) else layer.threshold
    if largest <= threshold:
        of_threshold = f", and `threshold` is {threshold:.3g}" if threshold else ""
        smaller = " A smaller `threshold` may do as well." if threshold else ""
        warnings.warn(
            "The scale of a `TernaryLinear` is zero, and so is its gradient: it will not learn."
            f" Its weight is of shape {layer.weight.shape}, its largest |w| is {largest:.3g}"
            f"{of_threshold}. Begin with other weights, or without a scale: "
            f"`functools.partial(eqg.nn.TernaryLinear.from_layer, scale=False)`.{smaller}",
            stacklevel=3,
        )
