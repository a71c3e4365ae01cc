"""Quantizers to two or three values, with a scale for each output of a weight."""

import abc
import math
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ... import ste
from ..._errors import check_flags
from ..._rules.float_args import as_floats, widen
from .quantizer import AbstractQuantizer, as_number, check_examples, Encoded, Floats


class AbstractSigns(AbstractQuantizer):
    """Signs, times the mean size of what is not zero, for each index of the first axis."""

    scale: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def _signs(self, x: Array) -> Array:
        """-1, 0 or 1, straight through."""

    def fit(self, x: Array) -> "AbstractSigns":
        """Return this quantizer: there is nothing to fit."""
        del x
        return self

    def __call__(self, x: Floats, *, key: Key[Array, ""] | None = None) -> Floats:
        """**Arguments:**

        - `x`: the weight of a layer, with the outputs along its first axis.
        - `key`: ignored.

        **Returns:**

        An array like `x`.
        """
        del key
        signs, scale = self._factors(x)
        return signs * scale

    def encode(self, x: Floats) -> Encoded:
        """The signs as `int8`, and the scale: their product is this quantizer's output."""
        check_examples(f"{type(self).__name__}.encode", x)
        signs, scale = self._factors(x)
        return signs.astype(jnp.int8), scale

    def _factors(self, x):
        x = as_floats(type(self).__name__, x)
        signs = self._signs(x)
        if not self.scale:
            return signs, jnp.ones((), x.dtype)
        axes, kept = tuple(range(1, x.ndim)), signs != 0
        total = jnp.sum(jnp.where(kept, widen(jnp.abs(x)), 0), axes, keepdims=True)
        count = jnp.maximum(jnp.sum(kept, axes, keepdims=True), 1).astype(total.dtype)
        return signs, (total / count).astype(x.dtype)


class Binary(AbstractSigns):
    r"""Single bits: the signs of a weight, with a scale for each output.

    The scale is the mean of $|w|$ over the inputs of each output (XNOR-Net, [Rastegari et al.
    2016](https://arxiv.org/abs/1603.05279)), or one (BinaryConnect, [Courbariaux et al.
    2015](https://arxiv.org/abs/1511.00363)).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        weight = jnp.array([[0.1, -0.2], [0.3, 0.5]])
        print(eqg.nn.Binary()(weight).round(2))
        print(eqg.nn.Binary(scale=False)(weight))
        ```

        ```text
        [[ 0.14999999 -0.14999999]
         [ 0.39999998  0.39999998]]
        [[ 1. -1.]
         [ 1.  1.]]
        ```

    **Derivative:**

    The derivative of $\alpha\,\operatorname{sign}(W)$, with
    $\alpha_i = \operatorname{mean}_j |W_{ij}|$ and the sign of
    [`eqx_grads.ste.binary_sign`][]: straight through where $|w| \le 1$. A larger weight has no
    gradient from its sign, so training usually clips weights to $[-1, 1]$ after each step. The
    scale is differentiated too.
    """

    scale: bool = eqx.field(static=True)
    bits: int = eqx.field(static=True)

    def __init__(self, *, scale: bool = True):
        """**Arguments:**

        - `scale`: whether each output is scaled by the mean $|w|$ of its weights.
        """
        check_flags("Binary", scale=scale)
        self.scale = bool(scale)
        self.bits = 1

    def _signs(self, x):
        return ste.binary_sign(x)


class Ternary(AbstractSigns):
    r"""Minus ones, zeros and ones, with a scale for each output.

    Ternary weight networks, [Li et al. (2016)](https://arxiv.org/abs/1605.04711): zero where
    $|w|$ is within a threshold, and the sign elsewhere. For each output, this is multiplied by
    the mean of $|w|$ over the weights that are not zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        weight = jnp.array([[0.1, -0.2, 0.0], [0.3, 0.5, -0.1]])
        print(eqg.nn.Ternary()(weight).round(2))
        ```

        ```text
        [[ 0.14999999 -0.14999999  0.        ]
         [ 0.39999998  0.39999998  0.        ]]
        ```

    **Derivative:**

    The derivative of $\alpha\,T(W)$, where $T$ is [`eqx_grads.ste.ternary`][]: straight through
    where $|w| \le 1$. The threshold is a constant; the scale $\alpha$ is differentiated too.
    Where no weight of an output is beyond the threshold, scale and gradient are zero, so
    training does not change these weights.
    """

    scale: bool = eqx.field(static=True)
    threshold: float | Literal["mean"] = eqx.field(static=True)
    bits: float = eqx.field(static=True)

    def __init__(self, *, threshold: float | Literal["mean"] = "mean", scale: bool = True):
        """**Arguments:**

        - `threshold`: the largest $|w|$ that becomes zero. `"mean"` is 0.7 of the mean of $|w|$
            over the inputs of each output.
        - `scale`: whether each output is scaled by the mean $|w|$ of its weights that are not
            zero.
        """
        check_flags("Ternary", scale=scale)
        is_mean = isinstance(threshold, str) and threshold == "mean"
        self.threshold = "mean" if is_mean else as_number("Ternary", "threshold", threshold)
        self.scale = bool(scale)
        self.bits = math.log2(3)

    def _signs(self, x):
        threshold: Any = self.threshold
        if threshold == "mean":
            size = jnp.abs(jax.lax.stop_gradient(x))
            mean = jnp.mean(size, tuple(range(1, x.ndim)), keepdims=True)
            threshold = jnp.nan_to_num(0.7 * mean)  # NaN is in the result anyway
        return ste.ternary(x, threshold=threshold)
