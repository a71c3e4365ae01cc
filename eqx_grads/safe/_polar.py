"""The norm of a vector and its direction, by one rule that neither overflows nor underflows."""

import jax
import jax.numpy as jnp
from jax import lax

from .._rules.custom_jvp import custom_jvp
from ._corner import corner
from ._inverse import inverse


@custom_jvp
def polar(x, mask, factor, *, axes, center):
    r"""`factor * ‖x‖` and `x / ‖x‖`, which is zero where `x` is zero; the axes are kept.

    `x` is real. The mean over the axes `center` is subtracted before, if they are given. `mask`
    says which elements take part in it, or, without, which are not constant. The others have to
    be zero. `mask` and `factor` are constants.

    **Derivative:**

    With $u$ for the direction, $n$ for the norm and $P$ for the subtraction of the mean,
    $\dot n = u^\top \dot x$ and $\dot u = (P \dot x - u \dot n) / n$. Both formulas are made of
    what the function returns, so that they hold at all orders. Both are zero at zero, where
    they have no derivative.
    """
    largest = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0.0)
    scale = _power_of_two(largest)
    if center is None:  # what is infinite outweighs the rest
        finite = float(jnp.finfo(x.dtype).max)
        y = jnp.clip(x, -finite, finite) / scale
    else:
        y = _centered(x / scale, mask, center)
    ratio = jnp.sqrt(jnp.sum(y * y, axes, keepdims=True))
    n = scale * (ratio * factor)
    if center is None:
        n = jnp.where(largest == jnp.inf, largest, n)
    return n, y / jnp.where(ratio == 0, 1, ratio)


@polar.def_jvp
def _polar_jvp(primals, tangents, *, axes, center):
    x, mask, factor = primals
    t_x, _, _ = tangents
    n, u = polar(x, mask, factor, axes=axes, center=center)
    is_corner = (n == 0) & _can_change(mask, axes, center)
    at_zero = lambda slope: corner(slope, is_corner, x, axes=axes)
    # The mean need not be subtracted here: the sum of the directions is zero.
    t_n = jnp.sum(at_zero(u) * t_x, axes, keepdims=True)
    if center is not None:
        t_x = _minus_mean(t_x, mask, center)
    # Not as a quotient, whose derivative has the square of the norm: that may be out of range.
    return (n, u), (factor * t_n, (t_x - u * t_n) * at_zero(inverse(n / factor)))


def _can_change(mask, axes, center):
    if center is None:
        return True if mask is None else jnp.any(mask, axes, keepdims=True)
    # One number is equal to its mean, whatever it is.
    return jnp.any(jnp.sum(mask, center, keepdims=True) > 1, axes, keepdims=True)


def _power_of_two(x):
    """A power of two near `x`, one for zero.

    Division by it is exact: equal elements remain equal, and differences are not rounded. Its
    inverse, by which the compiler may multiply instead, is not subnormal.
    """
    info = jnp.finfo(x.dtype)
    integer = jnp.uint32 if info.bits == 32 else jnp.uint64
    exponent = ((1 << info.nexp) - 1) << info.nmant
    bits = lax.bitcast_convert_type(lax.stop_gradient(x), integer) & integer(exponent)
    power = lax.bitcast_convert_type(bits, x.dtype)
    return jnp.where(power == 0, 1, jnp.minimum(power, 1 / info.tiny))


def _centered(y, mask, axes):
    """Minus the mean. Minus the maximum first: the mean of equal numbers can be rounded."""
    top = jnp.max(y, axes, keepdims=True, initial=-jnp.inf, where=mask)
    return _minus_mean(jnp.where(mask, y - top, 0), mask, axes)


def _minus_mean(x, mask, axes):
    count = jnp.sum(mask, axes, keepdims=True).astype(x.dtype)
    mean = jnp.sum(x, axes, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(mask, x - mean, 0)


def as_pairs(x: jax.Array) -> jax.Array:
    """Complex numbers as vectors of their real and imaginary parts, along a new last axis."""
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
