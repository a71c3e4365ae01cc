"""Quotients by `x` that are one at zero: of `expm1`, `log1p` and `sinh`."""

import functools as ft
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules.elementwise import elementwise
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

    $\dot y = \frac{1}{x}\bigl(e^x - y\bigr)\,\dot x$, and by its series for $|x| < 1$, where
    this difference cancels. Zero at infinity. Both modes and all orders.

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
    and at infinity. Both modes and all orders.

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

    $\dot y = \frac{1}{x}\bigl(\cosh x - y\bigr)\,\dot x$, and by its series for $|x| < 1$,
    where this difference cancels. Zero at infinity. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("sinhc", _sinhc, x=x)


# The derivatives are differences that cancel near zero: series there, and closed forms
# elsewhere. Both are differentiated by autodiff for the higher orders. An argument of the form
# that is not chosen is replaced by one at which its derivatives are finite.


def _near_zero(series, closed, x, low, lowest):
    """`series(x)` from `low` to one, `closed(x)` elsewhere above `lowest`; zero below that, and
    at infinity."""
    is_near = (x > low) & (x < 1)
    is_regular = (x > lowest) & (x < jnp.inf)
    near, far = jnp.where(is_near, x, 0), jnp.where(is_near | ~is_regular, 1, x)
    return jnp.where(is_near, series(near), jnp.where(is_regular, closed(far), 0))


def _polynomial(coefficients, x):
    if x.dtype == jnp.float32:
        coefficients = coefficients[: (len(coefficients) + 3) // 2]
    return ft.reduce(lambda total, c: total * x + c, reversed(coefficients), jnp.zeros_like(x))


def _exp_of_half(z):
    """`exp(z / 2)` for `z` of at least one: finite where its square is out of range. The
    compiler would make one exponential of two that are multiplied."""
    largest = math.log(float(jnp.finfo(z.dtype).max)) - 1
    return 1 + jnp.expm1(jnp.minimum(z / 2, largest))


# ---------------------------------------------------------------- expm1(x) / x


@jax.jit
def _expm1_ratio_value(x):
    is_tiny = jnp.abs(x) < jnp.finfo(x.dtype).eps
    divisor = jnp.where(is_tiny, 1, x)
    u = jnp.expm1(divisor / 2)
    return jnp.where(is_tiny, 1, jnp.where(jnp.isposinf(x), x, (u / divisor) * (u + 2)))


@jax.jit
def _expm1_ratio_slope(out, x):
    del out
    return _near_zero(_expm1_ratio_series, _expm1_ratio_closed, x, -1, -jnp.inf)


def _expm1_ratio_series(x):
    return _polynomial([1 / (math.factorial(k) * (k + 2)) for k in range(20)], x)


def _expm1_ratio_closed(x):
    z = jnp.abs(x)
    root = _exp_of_half(z)
    decay = 1 / root
    mean = (1 - decay) * (1 + decay) / z  # of exp(-s) for s between zero and z
    return jnp.where(x > 0, root * ((root / z) * (1 - mean)), (mean - decay * decay) / z)


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
    return _near_zero(_log1p_ratio_series, _log1p_ratio_closed, x, -0.5, -1)


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
    largest = math.log(float(jnp.finfo(z.dtype).max)) - 1
    u = jnp.expm1(jnp.minimum(z / 2, largest))
    sinh, cosh = u + u / (1 + u), 1 + u * (u / (2 * (1 + u)))
    return jnp.where(is_tiny, 1, jnp.where(z / 2 > largest, jnp.inf, (sinh / z) * cosh))


@jax.jit
def _sinhc_slope(out, x):
    del out
    return _near_zero(_sinhc_series, _sinhc_closed, x, -1, -jnp.inf)


def _sinhc_series(x):
    coefficients = [(2 * k + 2) / math.factorial(2 * k + 3) for k in range(10)]
    return x * _polynomial(coefficients, x * x)


def _sinhc_closed(x):
    z = jnp.abs(x)
    root = _exp_of_half(z)
    decay = (1 / root) ** 4
    difference = 1 + decay - (1 - decay) / z
    return root * ((root / (2 * x)) * difference)


_sinhc = elementwise(_sinhc_value, _sinhc_slope)
