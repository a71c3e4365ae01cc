"""Quotients by `x` that are one at zero: of `expm1`, `log1p` and `sinh`.

Their derivatives are differences that cancel near zero: series there, and closed forms
elsewhere.
"""

import functools as ft
import math

import jax.numpy as jnp
from jaxtyping import Array

from ._arguments import Numbers
from ._elementwise import corner, real_function, with_slopes


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


# ---------------------------------------------------------------- expm1(x) / x and sinh(x) / x
# The derivative of an order is the mean of s**order * exp(x * s), for s between zero and one,
# and between -1 and 1: a function of its own for each order. In the derivatives of a closed
# form, factors and terms would be out of range where the whole is not.


@real_function(lambda _, x: _moment(1, False)(x))
def expm1_ratio(x: Numbers) -> Array:
    r"""Return `expm1(x) / x`, which is one at zero: the mean of $e^{s}$ for $s$ between zero
    and $x$.

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

    An array like `x`. It overflows where the quotient overflows, not where `expm1(x)`
    overflows.

    **Derivative:**

    $\dot y = \frac{1}{x}\bigl(e^x - y\bigr)\,\dot x$. The derivative of order $n$ is the mean
    of $s^n e^{xs}$ for $s$ between zero and one. It is computed by parts from the derivative
    of order $n - 1$, and by its series for $|x| < 1$, where differences cancel. It is infinite
    where it is out of range, and zero at infinity. Both modes and all orders.
    """
    return jnp.where(x == jnp.inf, x, _moment(0, False)(x))


@real_function(lambda _, x: _moment(1, True)(x))
def sinhc(x: Numbers) -> Array:
    r"""Return `sinh(x) / x`, which is one at zero. (For `sin(x) / x`, use `jnp.sinc`.)

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

    An array like `x`. It overflows where the quotient overflows, not where `sinh(x)` overflows.

    **Derivative:**

    $\dot y = \frac{1}{x}\bigl(\cosh x - y\bigr)\,\dot x$. The derivative of order $n$ is the
    mean of $s^n e^{xs}$ for $s$ between -1 and 1, as for [`eqx_grads.safe.expm1_ratio`][].
    Infinite where it is out of range, and zero at infinity. Both modes and all orders.
    """
    return jnp.where(jnp.isinf(x), jnp.inf, _moment(0, True)(x))


@ft.cache
def _moment(order, is_symmetric):
    """The mean of `s**order * exp(x * s)`: it is zero at infinity, by convention."""

    def series(x):
        if not is_symmetric:
            return _polynomial(
                [1 / (math.factorial(k) * (k + 1 + order)) for k in range(20)], x
            )
        powers = range(order % 2, 20, 2)
        even = _polynomial([1 / (math.factorial(k) * (k + 1 + order)) for k in powers], x * x)
        return x * even if order % 2 else even

    def closed(x):
        z = jnp.abs(x)
        # Half of the exponential, so that it is finite, and infinite after a multiplication by
        # itself. The compiler would make one exponential of two that are multiplied.
        largest = math.log(float(jnp.finfo(z.dtype).max)) - 1
        root = 1 + jnp.expm1(jnp.minimum(z / 2, largest))
        # The integrals of s**order * exp(-z * (1 - s)) and of s**order * exp(-z * s).
        decay, r = 1 / root, 1 / z
        rising = falling = (1 - decay) * (1 + decay) * r
        for k in range(1, order + 1):  # by parts
            rising, falling = (1 - k * rising) * r, (k * falling - decay * decay) * r
        grown = lambda x: jnp.where(z / 2 > largest, jnp.inf, root * (root * x))
        if not is_symmetric:
            return jnp.where(x > 0, grown(rising), falling)
        if order % 2:
            return jnp.sign(x) * (grown(0.5 * rising) - 0.5 * falling)
        return grown(0.5 * rising) + 0.5 * falling

    value = lambda x: _near_zero(series, closed, x, -1, -jnp.inf)
    return with_slopes(value, lambda _, x: _moment(order + 1, is_symmetric)(x))


# ---------------------------------------------------------------- log1p(x) / x
# log1p(x) = 2 atanh(w) for w = x / (2 + x): the series in w has few terms.


def _atanh_ratio(w, first=0):
    """`atanh(w) / w`; or what it is from its coefficient `first` on."""
    return _polynomial([1 / (2 * k + 1) for k in range(first, 20)], w * w)


def _log1p_ratio_slope(_, x):
    def series(x):
        w = x / (2 + x)
        total = _atanh_ratio(w) + w * _atanh_ratio(w, first=1)
        return -(1 - w) * (1 - w) / (2 * (1 + w)) * total

    closed = lambda x: (1 / (1 + x) - log1p_ratio(x)) / x
    return corner(_near_zero(series, closed, x, -0.5, -1), x == -1, x)


@real_function(_log1p_ratio_slope)
def log1p_ratio(x: Numbers) -> Array:
    r"""Return `log1p(x) / x`, which is one at zero.

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
    $-\frac12 < x < 1$, where this difference cancels. The derivative is zero below -1, at
    infinity, and at -1, where the formula is infinite. Both modes and all orders; the second
    derivative is NaN at -1.
    """
    series = lambda x: (1 - x / (2 + x)) * _atanh_ratio(x / (2 + x))
    # NaN below -1 is the value of the closed form there.
    return _near_zero(series, lambda x: jnp.log1p(x) / x, x, -0.5, jnp.nan)
