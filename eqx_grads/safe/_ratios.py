"""Quotients by `x` that are one at zero: of `expm1`, `log1p` and `sinh`."""

import functools as ft
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules.elementwise import elementwise
from ._corner import corner
from ._dtypes import apply


def expm1_ratio(x: ArrayLike) -> Array:
    r"""`expm1(x) / x`, which is one at zero: the mean of $e^{s}$ for $s$ between zero and $x$.

    It occurs in exponential integrators, and in the solution of a linear differential equation.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        print(eqg.safe.expm1_ratio(0.0))
        print(jax.grad(eqg.safe.expm1_ratio)(0.0))
        print(jax.grad(lambda x: jnp.expm1(x) / x)(0.0))
        ```

        ```text
        1.0
        0.5
        nan
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    An array like `x`. It overflows where the quotient does, and not already where `expm1(x)`
    does.

    **Derivative:**

    $\dot y = \frac{1}{x}\bigl(e^x - y\bigr)\,\dot x$. The derivative of order $n$ is the mean
    of $s^n e^{xs}$ for $s$ between zero and one, by parts from the one before, and by its
    series for $|x| < 1$, where differences cancel. Infinite where it is out of range, and zero
    at infinity. Both modes and all orders. To the third they are right to 96 units in the last
    place; near $|x| = 1$ each further order loses a digit.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("expm1_ratio", _expm1_ratio, x=x)


def log1p_ratio(x: ArrayLike) -> Array:
    r"""`log1p(x) / x`, which is one at zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.safe.log1p_ratio(0.0))
        print(jax.grad(eqg.safe.log1p_ratio)(0.0))
        ```

        ```text
        1.0
        -0.5
        ```

    **Arguments:**

    - `x`: real, at least -1.

    **Returns:**

    An array like `x`: infinite at -1, and NaN below.

    **Derivative:**

    $\dot y = \frac{1}{x}\bigl(\frac{1}{1 + x} - y\bigr)\,\dot x$, and by its series for
    $-\frac12 < x < 1$, where this difference cancels. Zero at -1, where it is infinite, below,
    and at infinity. Both modes and all orders; the second derivative is NaN at -1.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("log1p_ratio", _log1p_ratio, x=x)


def sinhc(x: ArrayLike) -> Array:
    r"""`sinh(x) / x`, which is one at zero. (For `sin(x) / x`, there is `jnp.sinc`.)

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.safe.sinhc(0.0))
        print(jax.grad(eqg.safe.sinhc)(0.0))
        print(f"{jax.hessian(eqg.safe.sinhc)(0.0):.3f}")
        ```

        ```text
        1.0
        0.0
        0.333
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    An array like `x`. It overflows where the quotient does, and not already where `sinh(x)`
    does.

    **Derivative:**

    $\dot y = \frac{1}{x}\bigl(\cosh x - y\bigr)\,\dot x$. The derivative of order $n$ is the
    mean of $s^n e^{xs}$ for $s$ between -1 and 1. It is computed as for
    [`eqx_grads.safe.expm1_ratio`][], and is as right. Infinite where it is out of range, and
    zero at infinity. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("sinhc", _sinhc, x=x)


# The derivatives are differences that cancel near zero: series there, and closed forms
# elsewhere.


def _near_zero(series, closed, x, low, lowest):
    """`series(x)` from `low` to one, `closed(x)` elsewhere above `lowest`; zero below that, and
    at infinity. For the form that is not chosen, the argument is replaced by one at which its
    derivatives are finite."""
    is_near = (x > low) & (x < 1)
    has_none = (x <= lowest) | (x == jnp.inf)
    near, far = jnp.where(is_near, x, 0), jnp.where(is_near | has_none, 1, x)
    return jnp.where(is_near, series(near), jnp.where(has_none, 0, closed(far)))


def _polynomial(coefficients, x):
    if x.dtype == jnp.float32:
        coefficients = coefficients[: (len(coefficients) + 3) // 2]
    return ft.reduce(lambda total, c: total * x + c, reversed(coefficients), jnp.zeros_like(x))


def _largest_half(z):
    """So that `exp` of it is finite, and infinite after a multiplication by itself."""
    return math.log(float(jnp.finfo(z.dtype).max)) - 1


def _moments(z, order):
    """The integrals of `s**order * exp(-z * (1 - s))` and of `s**order * exp(-z * s)` for `s`
    between zero and one, for `z` of at least one; and the smaller of `exp(z / 2)` and what is
    finite."""
    # The compiler would make one exponential of two that are multiplied.
    root = 1 + jnp.expm1(jnp.minimum(z / 2, _largest_half(z)))
    decay = 1 / root
    r = 1 / z
    rising = falling = (1 - decay) * (1 + decay) * r
    for k in range(1, order + 1):  # by parts
        rising, falling = (1 - k * rising) * r, (k * falling - decay * decay) * r
    return rising, falling, root


def _scaled(root, moment, z):
    """`exp(z) * moment`, infinite where it is out of range, and not already where `exp(z)`
    is."""
    return jnp.where(z / 2 > _largest_half(z), jnp.inf, root * (root * moment))


# ---------------------------------------------------------------- expm1(x) / x


@jax.jit
def _expm1_ratio_value(x):
    is_tiny = jnp.abs(x) < jnp.finfo(x.dtype).eps
    divisor = jnp.where(is_tiny, 1, x)
    u = jnp.expm1(divisor / 2)
    return jnp.where(is_tiny, 1, jnp.where(jnp.isposinf(x), x, (u / divisor) * (u + 2)))


# The derivative of an order is the mean of s**order * exp(x * s) for s between zero and one: a
# function of its own for each order. In the derivatives of a closed form, factors and terms
# would be out of range where the whole is not.


@ft.partial(jax.jit, static_argnames="order")
def _expm1_moment_value(x, *, order):
    series, closed = (ft.partial(form, order=order) for form in (_expm1_series, _expm1_closed))
    return _near_zero(series, closed, x, -1, -jnp.inf)


def _expm1_series(x, *, order):
    return _polynomial([1 / (math.factorial(k) * (k + 1 + order)) for k in range(20)], x)


def _expm1_closed(x, *, order):
    z = jnp.abs(x)
    rising, falling, root = _moments(z, order)
    return jnp.where(x > 0, _scaled(root, rising, z), falling)


def _expm1_moment_slope(out, x, *, order):
    del out
    return _expm1_moment(x, order=order + 1)


def _expm1_ratio_slope(out, x):
    del out
    return _expm1_moment(x, order=1)


_expm1_moment = elementwise(_expm1_moment_value, _expm1_moment_slope)
_expm1_ratio = elementwise(_expm1_ratio_value, _expm1_ratio_slope)


# ---------------------------------------------------------------- log1p(x) / x
# log1p(x) = 2 atanh(w) for w = x / (2 + x): the series in w has few terms.


@jax.jit
def _log1p_ratio_value(x):
    is_near = (x > -0.5) & (x < 1)
    near, far = jnp.where(is_near, x, 0), jnp.where(is_near | jnp.isposinf(x), 1, x)
    w = near / (2 + near)
    value = jnp.where(is_near, (1 - w) * _atanh_ratio(w), jnp.log1p(far) / far)
    return jnp.where(jnp.isposinf(x), 0, value)


def _atanh_ratio(w, first=0):
    """`atanh(w) / w`; or what it is from its coefficient `first` on."""
    return _polynomial([1 / (2 * k + 1) for k in range(first, 20)], w * w)


@jax.jit
def _log1p_ratio_slope(out, x):
    del out
    slope = _near_zero(_log1p_ratio_series, _log1p_ratio_closed, x, -0.5, -1)
    return corner(slope, x == -1, x)


def _log1p_ratio_series(x):
    w = x / (2 + x)
    total = _atanh_ratio(w) + w * _atanh_ratio(w, first=1)
    return -(1 - w) * (1 - w) / (2 * (1 + w)) * total


def _log1p_ratio_closed(x):
    return (1 / (1 + x) - _log1p_ratio(x)) / x


_log1p_ratio = elementwise(_log1p_ratio_value, _log1p_ratio_slope)


# ---------------------------------------------------------------- sinh(x) / x


@jax.jit
def _sinhc_value(x):
    is_tiny = jnp.abs(x) < jnp.finfo(x.dtype).eps
    z = jnp.where(is_tiny, 1, jnp.abs(x))
    # sinh(z) = 2 sinh(z / 2) cosh(z / 2), which is infinite before one of the factors is.
    largest = _largest_half(z)
    u = jnp.expm1(jnp.minimum(z / 2, largest))
    sinh, cosh = u + u / (1 + u), 1 + u * (u / (2 * (1 + u)))
    return jnp.where(is_tiny, 1, jnp.where(z / 2 > largest, jnp.inf, (sinh / z) * cosh))


# The mean of s**order * exp(x * s) for s between -1 and 1: an even function or an odd one.


@ft.partial(jax.jit, static_argnames="order")
def _sinh_moment_value(x, *, order):
    series, closed = (ft.partial(form, order=order) for form in (_sinh_series, _sinh_closed))
    return _near_zero(series, closed, x, -1, -jnp.inf)


def _sinh_series(x, *, order):
    odd = order % 2
    powers = range(odd, 20, 2)
    total = _polynomial([1 / (math.factorial(k) * (k + 1 + order)) for k in powers], x * x)
    return x * total if odd else total


def _sinh_closed(x, *, order):
    z = jnp.abs(x)
    rising, falling, root = _moments(z, order)
    half = _scaled(root, 0.5 * rising, z)
    if order % 2:
        return jnp.sign(x) * (half - 0.5 * falling)
    return half + 0.5 * falling


def _sinh_moment_slope(out, x, *, order):
    del out
    return _sinh_moment(x, order=order + 1)


def _sinhc_slope(out, x):
    del out
    return _sinh_moment(x, order=1)


_sinh_moment = elementwise(_sinh_moment_value, _sinh_moment_slope)
_sinhc = elementwise(_sinhc_value, _sinhc_slope)
