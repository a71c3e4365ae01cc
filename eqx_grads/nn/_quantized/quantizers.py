"""Quantizers as layers, whose scale is given, computed in each call, or learned."""

import abc
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Key

from ... import ste
from ..._errors import check_flags, rule_error, type_of
from ..._rules.float_args import (
    as_bits,
    as_floats,
    broadcast_parameter,
    is_known,
    is_number,
    widen,
)
from .argument_checks import (
    as_channel_axis,
    as_number,
    as_scale,
    check_backward,
    check_examples,
    check_function,
)


class StraightThrough(eqx.Module):
    r"""A layer with the value of one function and the derivative of another.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        network = eqx.nn.Sequential(
            [
                eqx.nn.Linear(3, 8, key=jax.random.key(0)),
                eqg.nn.StraightThrough(jnp.sign, backward="hard_tanh"),
                eqx.nn.Linear(8, 1, key=jax.random.key(1)),
            ]
        )
        grads = eqx.filter_grad(lambda network: network(jnp.ones(3)).sum())(network)
        print(jnp.any(grads[0].weight != 0))
        ```

        ```text
        True
        ```

    **Derivative:**

    That of [`eqx_grads.ste.wrap`][]: with `backward` as $b$,
    $\dot y = \partial b(x)\,\dot x$, and no derivative with respect to `fn`.
    """

    fn: Callable[..., Any]

    def __init__(
        self, fn: Callable[..., Any], *, backward: str | Callable[..., Any] = "identity"
    ):
        """**Arguments:**

        - `fn`: a function of one argument. It is never differentiated.
        - `backward`: as for [`eqx_grads.ste.wrap`][]. If it is a Module, its arrays are
            parameters of this layer.
        """
        check_function("StraightThrough", "fn", fn)
        check_backward("StraightThrough", backward)
        self.fn = ste.wrap(fn, backward=backward)

    def __call__(self, x: Any, *, key: Key[Array, ""] | None = None) -> Any:
        """**Arguments:**

        - `x`: the argument of `fn`.
        - `key`: ignored.

        **Returns:**

        `fn(x)`.
        """
        del key
        return self.fn(x)


class AbstractQuantizer(eqx.Module):
    """A quantizer whose parameters are initialized from the array that it quantizes.

    A quantizer of [`eqx_grads.nn.QuantizedLinear`][] or [`eqx_grads.nn.quantize_model`][] may
    be any function of an array. If its parameters depend on the weights, derive it from this
    class: layers call `fit` with their weights when they are made. For
    [`eqx_grads.nn.to_integers`][], add a method `to_integers(x)` that returns integers and a
    scale, whose product is the output.
    """

    bits: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def needs_fit(self) -> bool:
        """Whether it can't be called before it is fitted."""

    @abc.abstractmethod
    def fit(self, x: Array) -> "AbstractQuantizer":
        """This quantizer, with the parameters that it still lacks chosen for `x`."""

    @abc.abstractmethod
    def __call__(self, x: Array, *, key: Key[Array, ""] | None = None) -> Array:
        """An array like `x`, of few different values."""


class FakeQuantize(AbstractQuantizer):
    r"""Round to the multiples of a scale that an integer of a few bits can represent.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        x = jnp.array([0.3, -0.9, 2.0])
        dynamic = eqg.nn.FakeQuantize(bits=8)  # from the largest number of each call
        print([f"{y:.2f}" for y in dynamic(x)])

        given = eqg.nn.FakeQuantize(bits=3, scale=0.25)
        print(given(x))

        learned = eqg.nn.FakeQuantize(bits=3, learn_scale=True).fit(x)
        print(f"{learned.scale:.3f}")
        ```

        ```text
        ['0.30', '-0.90', '2.00']
        [ 0.25 -1.    0.75]
        0.667
        ```

    **Derivative:**

    That of [`eqx_grads.ste.fake_quantize`][]: straight through where nothing is clipped. With
    respect to `scale` only if it is learned; otherwise zero. Both modes and all orders.
    """

    scale: Float[Array, "..."] | None
    # Of a scale that is constant. Static, so that weight decay does not change it.
    constant: float | None = eqx.field(static=True)
    bits: int = eqx.field(static=True)
    signed: bool = eqx.field(static=True)
    narrow: bool = eqx.field(static=True)
    channel_axis: int | None = eqx.field(static=True)
    learn_scale: bool = eqx.field(static=True)

    def __init__(
        self,
        bits: int = 8,
        *,
        scale: ArrayLike | None = None,
        learn_scale: bool = False,
        signed: bool = True,
        narrow: bool = False,
        channel_axis: int | None = None,
    ):
        """**Arguments:**

        - `bits`, `signed`, `narrow`: as for [`eqx_grads.ste.fake_quantize`][].
        - `scale`: positive, a number or an array that broadcasts to the quantized array, with
            ones for the axes that share a scale. A number that is not learned is a
            constant: the attribute `constant`, and no leaf. An array is the leaf `scale`, even
            if it is not learned: mask it in an optimizer with weight decay, which would change
            it. With `None`, each call computes the scale at which its largest number is the
            largest integer ([`eqx_grads.ste.absmax_scale`][]).
        - `learn_scale`: whether the scale is a parameter. Give it, or let `fit` choose it.
        - `channel_axis`: if no scale is given, the axis along which each index has a scale of
            its own: 0 for one scale for each output of a weight. `None` is one scale for all.
        """
        check_flags("FakeQuantize", learn_scale=learn_scale, signed=signed, narrow=narrow)
        self.scale, self.constant = as_scale("FakeQuantize", scale), None
        if is_number(scale) and not learn_scale:
            self.scale, self.constant = None, float(scale)
        self.bits = as_bits("FakeQuantize", bits, signed)
        self.signed = bool(signed)
        self.narrow = bool(narrow)
        self.channel_axis = as_channel_axis("FakeQuantize", channel_axis)
        self.learn_scale = bool(learn_scale)

    @property
    def needs_fit(self) -> bool:
        """Whether the scale is learned and there is none yet."""
        return self.scale is None and self.learn_scale

    def fit(self, x: Float[Array, "..."]) -> "FakeQuantize":
        """**Arguments:**

        - `x`: numbers to be quantized.

        **Returns:**

        If the scale is learned and was not given, this quantizer with the scale at which the
        largest of `x` is the largest integer. Otherwise this quantizer, unchanged.
        """
        given, x = x, as_floats("FakeQuantize.fit", x)
        if not self.needs_fit:
            return self
        check_examples("FakeQuantize", given, x.dtype)
        return _with_scale(self, self._absmax(x).astype(x.dtype))

    def __call__(
        self, x: Float[ArrayLike, "..."], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "..."]:
        """**Arguments:**

        - `x`: floats of any shape.
        - `key`: ignored.

        **Returns:**

        An array like `x` with at most $2^b$ different values for each scale.
        """
        del key
        return self._quantize(x, self._scale_of(x))

    def to_integers(
        self, x: Float[ArrayLike, "..."]
    ) -> tuple[Integer[Array, "..."], Float[Array, "..."]]:
        """The integers that represent a quantized array, and their scale: what to store of a
        weight that is trained, `quantizer.to_integers(layer.weight)`.

        **Arguments:**

        - `x`: floats of any shape.

        **Returns:**

        - Integers in the shape of `x`: `int8` or `uint8` for up to 8 bits, 16 or 32 bits for
            more.
        - The scale, which broadcasts to them. Their product is this quantizer's output, up to
            the dtype: that of a half-precision `x` is the product rounded to half precision.
        """
        return _to_integers("FakeQuantize", self, x)

    def _scale_of(self, x):
        if self.needs_fit:
            raise _has_no_scale("FakeQuantize", x)
        scale = self.scale if self.constant is None else self.constant
        if scale is None:
            return self._absmax(as_floats("FakeQuantize", x))
        return _positive(scale) if self.learn_scale else jax.lax.stop_gradient(scale)

    def _quantize(self, x, scale):
        return ste.fake_quantize(
            x, scale, bits=self.bits, signed=self.signed, narrow=self.narrow
        )

    def _absmax(self, x):
        axes = _other_axes("FakeQuantize", self.channel_axis, x)
        # A scale in half precision is too coarse for ten bits: the largest would be clipped.
        return ste.absmax_scale(widen(x), bits=self.bits, signed=self.signed, axis=axes)


class LSQ(AbstractQuantizer):
    r"""Learned step size quantization: the scale is a parameter.

    [Esser et al. (2020)](https://arxiv.org/abs/1902.08153). The published scale that `fit`
    chooses is a start for training: with many bits, it uses only some of the integers. Before
    training, an [`eqx_grads.nn.FakeQuantize`][] with `learn_scale` has 0.14 to 0.28 times its
    error at 8 bits, for 64 to a million normally distributed numbers that share the scale, 0.6
    to 1.2 times at 4 bits, and 1.5 to 2.1 times at 2 bits.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        x = jax.random.normal(jax.random.key(0), (1000,))
        quantizer = eqg.nn.LSQ(bits=2).fit(x)
        print(len(jnp.unique(quantizer(x))))

        loss = lambda quantizer: jnp.mean((quantizer(x) - x) ** 2)
        grads = eqx.filter_grad(loss)(quantizer)
        print(grads.scale != 0)
        ```

        ```text
        4
        True
        ```

    **Derivative:**

    That of [`eqx_grads.ste.lsq`][], where the gradient of the scale is multiplied by a factor
    that makes it about as large as the gradient of a weight. Where training has made a scale
    negative, its absolute value is used, and differentiated. Both modes and all orders.
    """

    scale: Float[Array, "..."] | None
    bits: int = eqx.field(static=True)
    signed: bool = eqx.field(static=True)
    channel_axis: int | None = eqx.field(static=True)
    gradient_scale: float | None = eqx.field(static=True)

    def __init__(
        self,
        bits: int = 8,
        *,
        scale: ArrayLike | None = None,
        signed: bool = True,
        channel_axis: int | None = None,
        gradient_scale: float | None = None,
    ):
        """**Arguments:**

        - `bits`, `signed`, `gradient_scale`: as for [`eqx_grads.ste.lsq`][].
        - `scale`: the initial scale, as for [`eqx_grads.nn.FakeQuantize`][]. With `None`, `fit`
            chooses it, which layers call with their weights. Any number does for a quantizer
            that a file is read into.
        - `channel_axis`: as for [`eqx_grads.nn.FakeQuantize`][].
        """
        check_flags("LSQ", signed=signed)
        self.scale = as_scale("LSQ", scale)
        self.bits = as_bits("LSQ", bits, signed)
        self.signed = bool(signed)
        self.channel_axis = as_channel_axis("LSQ", channel_axis)
        if gradient_scale is not None:
            gradient_scale = as_number("LSQ", "gradient_scale", gradient_scale, positive=True)
        self.gradient_scale = gradient_scale

    @property
    def needs_fit(self) -> bool:
        """Whether there is no scale yet."""
        return self.scale is None

    def fit(self, x: Float[Array, "..."]) -> "LSQ":
        r"""**Arguments:**

        - `x`: numbers to be quantized: weights, or activations of a first batch.

        **Returns:**

        This quantizer with the scale $2\,\operatorname{mean}|x| / \sqrt{q_{\max}}$, as
        published. If it has a scale already, this quantizer, unchanged.
        """
        given, x = x, as_floats("LSQ.fit", x)
        if not self.needs_fit:
            return self
        check_examples("LSQ", given, x.dtype)
        axes = _other_axes("LSQ", self.channel_axis, x)
        size = jnp.abs(widen(jax.lax.stop_gradient(x)))
        sharing = max(math.prod(x.shape[i] for i in axes or range(x.ndim)), 1)
        # The sum may be out of range, and by a power of two it is not rounded.
        power = 2.0 ** math.ceil(math.log2(sharing))
        total = jnp.sum(size / power, axes, keepdims=axes is not None)
        scale = total * (2 * power / (sharing * _largest(self.bits, self.signed) ** 0.5))
        info = jnp.finfo(x.dtype)
        return _with_scale(
            self, jnp.clip(scale, float(info.tiny), float(info.max)).astype(x.dtype)
        )

    def __call__(
        self, x: Float[ArrayLike, "..."], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "..."]:
        """**Arguments:**

        - `x`: floats of any shape.
        - `key`: ignored.

        **Returns:**

        An array like `x` with at most $2^b$ different values for each scale.
        """
        del key
        return self._quantize(x, self._scale_of(x))

    def to_integers(
        self, x: Float[ArrayLike, "..."]
    ) -> tuple[Integer[Array, "..."], Float[Array, "..."]]:
        """The integers that represent a quantized array, and their scale, as
        [`eqx_grads.nn.FakeQuantize.to_integers`][]. The scale is positive, also where training
        has made that of this quantizer negative."""
        return _to_integers("LSQ", self, x)

    def _scale_of(self, x):
        if self.scale is None:
            raise _has_no_scale("LSQ", x)
        return _positive(self.scale)

    def _quantize(self, x, scale):
        return ste.lsq(
            x,
            scale,
            bits=self.bits,
            signed=self.signed,
            gradient_scale=self.gradient_scale,
        )


def _to_integers(name, quantizer, x):
    """In the scale one, the quantizer's output is the integers, by the same arithmetic."""
    floats = as_floats(f"{name}.to_integers", x)
    if is_known(floats) and np.any(np.isnan(np.asarray(floats))):
        raise rule_error(
            f"`{name}.to_integers` was given numbers of which some are NaN.",
            f"`x` is {type_of(x)}",
            do="No integer represents NaN. `eqx_grads.explain_nan` finds its origin.",
        )
    wide = widen(floats)
    scale = jnp.asarray(quantizer._scale_of(floats)).astype(wide.dtype)
    steps = broadcast_parameter(f"{name}.to_integers", "scale", scale, wide)
    levels = quantizer._quantize(wide / steps, jnp.ones((), wide.dtype))
    bits = next(n for n in (8, 16, 32) if quantizer.bits <= n)
    return levels.astype(f"{'' if quantizer.signed else 'u'}int{bits}"), scale


def _largest(bits, signed):
    return 2 ** (bits - 1) - 1 if signed else 2**bits - 1


def _with_scale(quantizer, scale):
    return eqx.tree_at(lambda q: q.scale, quantizer, scale, is_leaf=lambda x: x is None)


def _positive(scale):
    """A positive scale, differentiable also where training has made the given one negative."""
    return ste.clip(jnp.abs(scale), float(jnp.finfo(scale.dtype).tiny))


def _has_no_scale(layer, x):
    return rule_error(
        f"This `{layer}` has no scale yet.",
        "it was made without one and not fitted",
        f"it was called with {type_of(x)}",
        do="Fit it to numbers like those that it will quantize, "
        "`quantizer = quantizer.fit(x)`, or give it a scale: `scale=1.0` if a file is read "
        "into it, which has the scale. Layers fit the quantizer of their weights themselves.",
    )


def _other_axes(layer, channel_axis, x):
    """The axes that share a scale, `None` being all."""
    if channel_axis is None:
        return None
    if not -x.ndim <= channel_axis < x.ndim:
        raise rule_error(
            f"`{layer}` was given an array without the axis of its channels.",
            f"the array is {type_of(x)}, `channel_axis` is {channel_axis}",
            do="Give it another `channel_axis`, or `None` for one scale for all.",
        )
    return tuple(i for i in range(x.ndim) if i != channel_axis % x.ndim)
