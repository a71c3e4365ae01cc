"""Uniform quantizers, whose scale is given, computed in each call, or learned."""

import abc
import functools as ft
import math
from typing import Any, ClassVar, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer, Key

from ... import ste
from ..._errors import check_flags, rule_error, type_of
from ..._rules.float_args import (
    as_bits,
    as_count,
    as_floats,
    broadcast_parameter,
    is_number,
    widen,
)
from .quantizer import (
    AbstractQuantizer,
    as_number,
    as_scale,
    check_examples,
    Encoded,
    Floats,
    spread,
)


FloatsLike: TypeAlias = Float[ArrayLike, "..."]


class AbstractUniform(AbstractQuantizer):
    """Round to the multiples of a scale. The quantizers below choose the scale in another way,
    and round with another straight-through function."""

    scale: Floats | None
    # A constant scale. Static, so that weight decay does not change it.
    constant: float | None = eqx.field(static=True)
    bits: int = eqx.field(static=True)
    signed: bool = eqx.field(static=True)
    channel_axis: int | None = eqx.field(static=True)
    group_size: int | None = eqx.field(static=True)
    learn_scale: bool = eqx.field(static=True)
    asymmetric: eqx.AbstractVar[bool]

    def _set(self, scale, bits, learn_scale, signed, channel_axis, group_size, narrow=False):
        """Set the fields that all have, in `__init__`."""
        name = type(self).__name__
        check_flags(name, learn_scale=learn_scale, signed=signed)
        self.scale, self.constant = as_scale(name, scale), None
        if is_number(scale) and not learn_scale:
            self.scale, self.constant = None, float(scale)
        self.bits, self.signed = as_bits(name, bits, signed, narrow), bool(signed)
        count = ft.partial(as_count, name, do="Give an integer, or `None`.")
        optional = lambda what, x, least: None if x is None else count(what, x, least=least)
        self.channel_axis = optional("channel_axis", channel_axis, -64)
        self.group_size = optional("group_size", group_size, 1)
        self.learn_scale = bool(learn_scale)

    @abc.abstractmethod
    def _scale_for(self, x: Array, axes: tuple[int, ...]) -> Array:
        """A scale for each index of the other axes, which are kept as ones."""

    @abc.abstractmethod
    def _zero_for(self, x: Array, scale: Any) -> Any:
        """The integer that represents zero, for each number of the scale."""

    @abc.abstractmethod
    def _round(self, x: Array, scale: Any, zero: Any) -> Array:
        """`x` on the grid, straight through."""

    @property
    def needs_fit(self) -> bool:
        """Whether the scale is learned and not known yet."""
        return self.scale is None and self.learn_scale

    def fit(self, x: Floats) -> Any:
        """**Arguments:**

        - `x`: numbers like the ones that will be quantized: weights, or activations of a batch.

        **Returns:**

        If the scale is learned and was not given, this quantizer with a scale for `x`, and
        with a zero point if it has one. Otherwise this quantizer, unchanged.
        """
        name = f"{type(self).__name__}.fit"
        given, x = x, as_floats(name, x)
        if not self.needs_fit:
            return self
        check_examples(name, given)
        info = jnp.finfo(x.dtype)
        scale = jnp.clip(self._scale_of_all(x), float(info.tiny), float(info.max))
        scale = scale.astype(x.dtype)
        # Integers, so that no optimizer changes them.
        found = scale, self._zero_for(x, scale).astype(jnp.int32)
        fields = lambda q: (q.scale, q.zero_point) if q.asymmetric else (q.scale,)
        found = found[: 1 + self.asymmetric]
        return eqx.tree_at(fields, self, found, is_leaf=lambda x: x is None)

    def __call__(self, x: FloatsLike, *, key: Key[Array, ""] | None = None) -> Floats:
        """**Arguments:**

        - `x`: floats of any shape.
        - `key`: ignored.

        **Returns:**

        An array like `x` with at most $2^b$ different values for each scale.
        """
        del key
        x = as_floats(type(self).__name__, x)
        scale = self._scale_in_use(x)
        return self._round(x, scale, self._zero_for(x, scale))

    def encode(self, x: FloatsLike) -> Encoded:
        """Return the integers that represent a quantized array, and their scale. Store these
        for a trained weight.

        **Arguments:**

        - `x`: floats of any shape.

        **Returns:**

        - Integers in the shape of `x`: `int8` or `uint8` for up to 8 bits, 16 or 32 bits for
            more.
        - The positive scale, which broadcasts to them, or has one number for each group. The
            product of integers and scale is this quantizer's output, rounded to the dtype of
            `x`.
        - If it is `asymmetric`, the zero points, in the shape of the scale: subtract them from
            the integers before.
        """
        name = f"{type(self).__name__}.encode"
        floats = as_floats(name, x)
        check_examples(name, x)
        wide = widen(floats)
        scale = jnp.asarray(self._scale_in_use(floats)).astype(wide.dtype)
        steps = broadcast_parameter(name, "scale", spread(scale, wide), wide)
        zero = self._zero_for(wide, scale)
        # In the scale one, the output is the integers, by the same arithmetic.
        levels = self._round(wide / steps, jnp.ones((), wide.dtype), zero)
        bits = next(n for n in (8, 16, 32) if self.bits <= n)
        dtype = f"{'' if self.signed else 'u'}int{bits}"
        levels = (levels + spread(zero, wide)).astype(dtype)
        return (levels, scale, zero.astype(dtype)) if self.asymmetric else (levels, scale)

    def _scale_in_use(self, x):
        if self.needs_fit:
            raise rule_error(
                f"This `{type(self).__name__}` has no scale yet.",
                f"it was made without one and not fitted, and called with {type_of(x)}",
                do="Fit it to numbers like the ones that it will quantize, "
                "`quantizer = quantizer.fit(x)`, or give it a scale. `scale=1.0` is "
                "enough if you then read the scale from a file.",
            )
        if self.constant is not None:
            return self.constant
        if self.scale is None:
            return self._scale_of_all(x)
        if not self.learn_scale:
            return jax.lax.stop_gradient(self.scale)
        # Positive, and differentiable, even where training has made it negative.
        return ste.clip(jnp.abs(self.scale), float(jnp.finfo(self.scale.dtype).tiny))

    def _scale_of_all(self, x):
        return self._of_groups(self._scale_for, x)

    def _of_groups(self, fn, x):
        """`fn(x, axes)` of an array, of each index of its channel axis, or of each group."""
        # A scale in half precision is too coarse for ten bits: the largest would be clipped.
        x, channel, size = widen(jax.lax.stop_gradient(x)), self.channel_axis, self.group_size
        has_channel = channel is None or -x.ndim <= channel < x.ndim
        if not has_channel or (size is not None and (x.ndim == 0 or x.shape[-1] % size)):
            raise rule_error(
                f"`{type(self).__name__}` was given an array without its channels or groups.",
                f"it is {type_of(x)}, `channel_axis` is {channel}, `group_size` is {size}",
                do="Give a `channel_axis` that the array has, and a `group_size` that divides "
                "its last axis, or `None` for one scale for all.",
            )
        if size is not None:
            return fn(x.reshape(*x.shape[:-1], -1, size), (x.ndim,))[..., 0]
        if channel is None:
            return fn(x, tuple(range(x.ndim))).reshape(())
        return fn(x, tuple(i for i in range(x.ndim) if i != channel % x.ndim))


class FakeQuantize(AbstractUniform):
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

    The derivative of [`eqx_grads.ste.fake_quantize`][]: straight through where nothing is
    clipped. With respect to `scale` only if it is learned; otherwise zero. Both modes and all
    orders.
    """

    narrow: bool = eqx.field(static=True)
    asymmetric: bool = eqx.field(static=True)
    zero_point: Integer[Array, "..."] | None

    def __init__(
        self,
        bits: int = 8,
        *,
        scale: ArrayLike | None = None,
        learn_scale: bool = False,
        signed: bool = True,
        narrow: bool = False,
        asymmetric: bool = False,
        channel_axis: int | None = None,
        group_size: int | None = None,
    ):
        """**Arguments:**

        - `bits`, `signed`, `narrow`: as for [`eqx_grads.ste.fake_quantize`][].
        - `scale`: positive, a number or an array that broadcasts to the quantized array, with
            ones for the axes that share a scale. A number that is not learned is a constant: it
            is the attribute `constant`, and not a leaf. An array is the leaf `scale`, even if
            it is not learned: mask it in an optimizer with weight decay, which would change it.
            With `None`, each call computes the scale at which its largest number is the largest
            integer ([`eqx_grads.ste.absmax_scale`][]).
        - `learn_scale`: whether the scale is a parameter. Give it, or let `fit` choose it: the
            largest number is then the largest integer.
        - `asymmetric`: whether the range is from the smallest to the largest number and has a
            zero point, the integer that represents zero, instead of being symmetric about zero.
            Zero is always in the range. The attribute `zero_point` has it if the scale is
            learned; it is a constant, and zero if a scale is given (for a file to be read
            into).
        - `channel_axis`: if no scale is given, the axis along which each index has its own
            scale: 0 for one scale for each output of a weight. `None` is one scale for all.
        - `group_size`: if no scale is given, how many neighbors along the last axis share a
            scale, 32 to 128 for weights of 4 bits. The scale of a weight of shape `(out, in)`
            has the shape `(out, in / group_size)`.
        """
        check_flags("FakeQuantize", narrow=narrow, asymmetric=asymmetric)
        self._set(scale, bits, learn_scale, signed, channel_axis, group_size, narrow)
        self.narrow, self.asymmetric = bool(narrow), bool(asymmetric)
        given = self.scale if asymmetric else None
        self.zero_point = None if given is None else jnp.zeros_like(given, jnp.int32)

    def _scale_for(self, x, axes):
        if not self.asymmetric:
            return ste.absmax_scale(x, bits=self.bits, signed=self.signed, axis=axes)
        low, high = self._range
        # Each side for itself, as their sum may be out of range.
        scale = sum(-_lowest(side, axes) / (high - low) for side in (x, -x))
        return jnp.clip(scale, jnp.finfo(x.dtype).tiny, jnp.finfo(x.dtype).max)

    @property
    def _range(self):
        low = -(2 ** (self.bits - 1)) if self.signed else 0
        return low + self.narrow, low + 2**self.bits - 1

    def _zero_for(self, x, scale):
        if not self.asymmetric or self.constant is not None:
            return jnp.zeros((), x.dtype)
        if self.zero_point is not None:
            return self.zero_point.astype(widen(x).dtype)
        low, high = self._range
        lowest = self._of_groups(_lowest, x)
        zero = low - jnp.round(lowest / scale.astype(lowest.dtype))
        return jnp.clip(zero, low, high)

    def _round(self, x, scale, zero):
        options = {"bits": self.bits, "signed": self.signed, "narrow": self.narrow}
        zero = spread(zero, x)
        return ste.fake_quantize(x, spread(scale, x), zero_point=zero, **options)


def _lowest(x, axes):
    """The smallest number, at most zero."""
    return jnp.min(x, axes, keepdims=True, initial=0.0)


class LSQ(AbstractUniform):
    r"""Learned step size quantization: the scale is a parameter.

    [Esser et al. (2020)](https://arxiv.org/abs/1902.08153). `fit` chooses the published scale
    $2\,\operatorname{mean}|x| / \sqrt{q_{\max}}$. It is a starting point for training: with
    many bits, it uses only some of the integers. Before training, the error of an
    [`eqx_grads.nn.FakeQuantize`][] with `learn_scale` is 0.14 to 0.28 times as large at 8
    bits, 0.6 to 1.2 times at 4 bits, and 1.5 to 2.1 times at 2 bits. This holds for 64 to a
    million normally distributed numbers that share the scale.

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

    The derivative of [`eqx_grads.ste.lsq`][]. The gradient of the scale is multiplied by a
    factor that makes it about as large as the gradient of a weight. Where training has made a
    scale negative, its absolute value is used, and differentiated. Both modes and all orders.
    """

    gradient_scale: float | None = eqx.field(static=True)
    asymmetric: ClassVar[bool] = False

    def __init__(
        self,
        bits: int = 8,
        *,
        scale: ArrayLike | None = None,
        signed: bool = True,
        channel_axis: int | None = None,
        group_size: int | None = None,
        gradient_scale: float | None = None,
    ):
        """**Arguments:**

        - `bits`, `signed`, `gradient_scale`: as for [`eqx_grads.ste.lsq`][].
        - `scale`: the initial scale, as for [`eqx_grads.nn.FakeQuantize`][]. With `None`, `fit`
            chooses it, which layers call with their weights. For a quantizer that a file is
            read into, any number works.
        - `channel_axis`, `group_size`: as for [`eqx_grads.nn.FakeQuantize`][].
        """
        self._set(scale, bits, True, signed, channel_axis, group_size)
        if gradient_scale is not None:
            gradient_scale = as_number("LSQ", "gradient_scale", gradient_scale, positive=True)
        self.gradient_scale = gradient_scale

    def _scale_for(self, x, axes):
        return jnp.mean(jnp.abs(x), axes, keepdims=True) * (2 / self._largest**0.5)

    def _zero_for(self, x, scale):
        return jnp.zeros((), x.dtype)

    def _round(self, x, scale, zero):
        factor = self.gradient_scale
        if factor is None:
            sharing = max(jnp.size(x), 1) / max(jnp.size(scale), 1)
            factor = 1 / math.sqrt(sharing * self._largest)
        options = {"bits": self.bits, "signed": self.signed, "gradient_scale": factor}
        return ste.lsq(x, spread(scale, x), **options)

    @property
    def _largest(self):
        return 2 ** (self.bits - self.signed) - 1
