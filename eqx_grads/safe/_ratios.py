"""Quotients by `x` that are one at zero: of `expm1`, `log1p` and `sinh`."""

import functools as ft
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules.elementwise import elementwise
from ._dtypes import apply


def expm1_ratio(x: ArrayLike) -> Array:
    return apply("expm1_ratio", _expm1_ratio, x=x)


def log1p_ratio(x: ArrayLike) -> Array:
    return apply("log1p_ratio", _log1p_ratio, x=x)


def sinhc(x: ArrayLike) -> Array:
    return apply("sinhc", _sinhc, x=x)


# The slopes are differences that cancel near zero: series there, and closed forms elsewhere. Both
# are differentiated by autodiff for the higher orders. An argument of the form that is not chosen
# is replaced by one at which its derivatives are finite.


def _split(x, low):
    """Whether `x` is near zero, with arguments for the series and for the closed form."""
    is_near = (x > low) & (x < 1)
    return is_near, jnp.where(is_near, x, 0), jnp.where(is_near, 1, x)


def _exp_of_half(z):
    """`exp(z / 2)`, whose square may be out of range. The compiler would make one exponential of
    two that are multiplied."""
    return 1 + jnp.expm1(z / 2)


def _polynomial(coefficients, x):
    if x.dtype == jnp.float32:
        coefficients = coefficients[: (len(coefficients) + 3) // 2]
    return ft.reduce(lambda total, c: total * x + c, reversed(coefficients), jnp.zeros_like(x))


def _expm1_ratio_value(x):
    # With the half argument, the exponential is in range wherever the quotient is.
    is_tiny = jnp.abs(x) < jnp.finfo(x.dtype).eps
    divisor = jnp.where(is_tiny, 1, x)
    u = jnp.expm1(divisor / 2)
    return jnp.where(is_tiny, 1, jnp.where(jnp.isposinf(x), x, (u / divisor) * (u + 2)))


_EXPM1_SERIES = tuple(1 / (math.factorial(k) * (k + 2)) for k in range(20))


@jax.jit
def _expm1_ratio_slope(out, x):
    del out
    is_near, near, far = _split(x, -1)
    z = jnp.abs(far)
    decay = jnp.exp(-z)
    mean = -jnp.expm1(-z) / z
    below = (mean - decay) / z
    root = _exp_of_half(jnp.maximum(far, 0))
    above = root * ((root / z) * (1 - mean))
    closed = jnp.where(far > 0, above, below)
    return jnp.where(is_near, _polynomial(_EXPM1_SERIES, near), closed)


_expm1_ratio = elementwise(jax.jit(_expm1_ratio_value), _expm1_ratio_slope)


_ATANH_SERIES = tuple(1 / (2 * k + 1) for k in range(20))


def _log1p_ratio_value(x):
    is_near, near, far = _split(x, -0.5)
    # log1p(x) = 2 atanh(w), whose series has few terms.
    w = near / (2 + near)
    series = (1 - w) * _polynomial(_ATANH_SERIES, w * w)
    return jnp.where(is_near, series, jnp.log1p(far) / far)


@jax.jit
def _log1p_ratio_slope(out, x):
    del out
    is_near, near, far = _split(x, -0.5)
    w = near / (2 + near)
    p = _polynomial(_ATANH_SERIES, w * w)
    q = _polynomial(_ATANH_SERIES[1:], w * w)
    series = -(1 - w) * (1 - w) / (2 * (1 + w)) * (p + w * q)
    closed = (1 / (1 + far) - _log1p_ratio(far)) / far
    return jnp.where(is_near, series, closed)


_log1p_ratio = elementwise(jax.jit(_log1p_ratio_value), _log1p_ratio_slope)


def _sinhc_value(x):
    z = jnp.abs(x)
    is_tiny = z < jnp.finfo(x.dtype).eps
    z = jnp.where(is_tiny, 1, z)
    # sinh(z) = 2 sinh(z / 2) cosh(z / 2)
    u = jnp.expm1(z / 2)
    sinh, cosh = u + u / (1 + u), 1 + u * (u / (2 * (1 + u)))
    return jnp.where(is_tiny, 1, jnp.where(jnp.isinf(z), z, (sinh / z) * cosh))


_SINH_SERIES = tuple((2 * k + 2) / math.factorial(2 * k + 3) for k in range(10))


@jax.jit
def _sinhc_slope(out, x):
    del out
    is_near, near, far = _split(x, -1)
    z = jnp.abs(far)
    decay = jnp.exp(-2 * z)
    root = _exp_of_half(z)
    difference = 1 + decay + jnp.expm1(-2 * z) / z
    closed = root * ((root / (2 * far)) * difference)
    return jnp.where(is_near, near * _polynomial(_SINH_SERIES, near * near), closed)


_sinhc = elementwise(jax.jit(_sinhc_value), _sinhc_slope)
