"""Roots, quotients, powers and logarithms, whose derivatives are zero at poles."""

import functools as ft
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._rules.nan_where import nan_where
from ._arguments import Numbers, on_arrays
from ._elementwise import (
    corner,
    inverse,
    positive,
    quotient,
    real_function,
    tanh,
    with_slopes,
)


@real_function(
    lambda out, x: corner(0.5 * inverse(jnp.where(x <= 0, 0, out)), x == 0, x),
)
def sqrt(x: Numbers) -> Array:
    r"""Return `jnp.sqrt(x)`, with a zero derivative at zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        length = lambda x: eqg.safe.sqrt(jnp.sum(x**2))
        print(jax.grad(length)(jnp.zeros(2)))

        # A mask on the result is enough.
        drag = lambda v: jnp.where(v > 0, eqg.safe.sqrt(v), 0.0)
        print(jax.grad(drag)(0.0), jax.grad(drag)(-1.0))
        ```

        ```text
        [0. 0.]
        0.0 0.0
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    The values of `jnp.sqrt`: NaN below zero.

    **Derivative:**

    $\dot y = \dot x / 2y$. At zero, where the true derivative is infinite, it is zero, as for a
    norm. (It is zero for `sqrt(x) ** 2` too, whose true derivative is one.) Below zero it is
    zero as well. Both modes and all orders; the second derivative is NaN at zero.
    """
    return jnp.sqrt(x)


@on_arrays("x", "y", real=True)
def divide(x: Numbers, y: Numbers) -> Array:
    r"""Return `x / y`, with derivatives that are zero where `y` is zero, and right where `y**2`
    is out of range.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        f = lambda x, y: jnp.where(y == 0, 0.0, eqg.safe.divide(x, y))
        print(*jax.grad(f, argnums=(0, 1))(1.0, 0.0))

        x, y = jnp.float32(1e-30), jnp.float32(1e-25)
        print(f"{jax.grad(eqg.safe.divide, argnums=1)(x, y):.1e}")
        print(jax.grad(jnp.divide, argnums=1)(x, y))  # the square of `y` underflows
        ```

        ```text
        0.0 -0.0
        -1.0e+20
        -inf
        ```

    **Arguments:**

    - `x`, `y`: real, of shapes that broadcast together.

    **Returns:**

    The values of `jnp.divide`: infinite where `y` is zero, and NaN for `0 / 0`.

    **Derivative:**

    With $q = x / y$, $\dot q = \frac{1}{y}\dot x - \frac{q}{y}\dot y$. Both terms are zero
    where `y` is zero. The second term is zero where `x` is infinite, too. Both modes and all
    orders. Second derivatives are NaN where `y` is zero; the second derivative with respect to
    `y` is right where $1 / y^2$ is in range.
    """
    return quotient(x, y, is_finite=False)


@real_function(
    lambda _, x, y: _slope_in_base(x, y, 1),
    lambda out, x, y: _slope_in_exponent(out, x, y),
)
def power(x: Numbers, y: Numbers) -> Array:
    r"""Return `x**y`, with zero derivatives where the true ones are infinite or do not exist.
    For an exponent that is a Python `int`, write `x**2`, whose derivatives are right in JAX.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        root = lambda x: eqg.safe.power(x, 0.5)
        print(jax.grad(root)(0.0))
        print(jax.grad(root)(4.0))
        print(jax.hessian(lambda x: eqg.safe.power(x, 2.0))(0.0))
        ```

        ```text
        0.0
        0.25
        2.0
        ```

    **Arguments:**

    - `x`, `y`: real, of shapes that broadcast together.

    **Returns:**

    The values of `jnp.power`: NaN for a negative `x` and a `y` that is not whole.

    **Derivative:**

    $\dot p = y x^{y-1}\,\dot x + x^y \log x\,\dot y$. The first term is zero at $x = 0$ for
    $y < 1$, and for a negative `x` if `y` is not whole. The second is zero unless `x` is
    positive: at $x = 0$ the power is zero for $y > 0$, one at $y = 0$ and infinite for
    $y < 0$. Both terms are zero where they would be infinite because `x` or `y` is infinite.
    Both modes and all orders. At $x = 0$, a derivative of higher order is NaN where it is
    infinite.
    """
    return jnp.power(x, y)


def _slope_in_exponent(out, x, y):
    slope = jnp.where(_is_without_log(x, y), 0, out) * _finite(log, x)
    slope = corner(slope, (x == 0) & (y <= 1), x)
    return corner(slope, (x == 0) & (y <= 0), y)


def _is_without_log(x, y):
    return (x <= 0) | jnp.isinf(x) | jnp.isinf(y)


def _slope_in_base(x, y, order):
    is_polynomial = (y >= 0) & (jnp.floor(y) == y)
    slope = _derivative_in_base(order)(x, y)
    slope = corner(slope, (x == 0) & (y < order + 1) & ~is_polynomial, x)
    return corner(slope, (x == 0) & (y <= order), y)


@ft.cache
def _derivative_in_base(order):
    """`y (y - 1) ... x**(y - order)`, and zero where it is infinite or does not exist."""

    def value(x, y):
        whole = jnp.power(x, y)
        # `y - order` is rounded, which matters for a large and for a small `y`: a large one is
        # odd instead of even. So quotients are better, unless the whole power is out of range.
        is_normal = (jnp.abs(whole) >= jnp.finfo(x.dtype).tiny) & jnp.isfinite(whole)
        by_quotients, by_power = whole, jnp.power(x, y - order)
        # One factor at a time: a product of two may be out of range.
        for j in range(order):
            by_quotients, by_power = quotient(by_quotients, x) * (y - j), by_power * (y - j)
        has_none = (x == 0) & (y < order) | (x < 0) & (jnp.floor(y) < y)
        has_none = has_none | jnp.isinf(y) | (jnp.isinf(x) & (y > order))
        return jnp.where(has_none, 0, jnp.where(is_normal, by_quotients, by_power))

    def in_exponent(out, x, y):
        factor = lambda y: math.prod(y - j for j in range(order))
        _, slope = jax.jvp(factor, (y,), (jnp.ones_like(y),))
        both = slope * power(x, y - order) + out * _finite(log, x)
        return jnp.where(_is_without_log(x, y), 0, both)

    return with_slopes(value, lambda _, x, y: _slope_in_base(x, y, order + 1), in_exponent)


@real_function(lambda _, x: corner(inverse(positive(x)), x == 0, x))
def log(x: Numbers) -> Array:
    r"""Return `jnp.log(x)`, with a zero derivative at zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        # A mask on the result is enough.
        f = lambda x: jnp.where(x > 0, eqg.safe.log(x), 0.0)
        print(jax.grad(f)(0.0), jax.grad(f)(-1.0))
        print(jax.grad(f)(2.0))
        ```

        ```text
        0.0 0.0
        0.5
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    The values of `jnp.log`: $-\infty$ at zero, and NaN below.

    **Derivative:**

    $\dot y = \dot x / x$. The derivative is zero at zero, where $1 / x$ is infinite, and below
    zero. Both modes and all orders; the second derivative is NaN at zero.
    """
    return jnp.log(x)


def _finite(log, x, pole=0):
    """A logarithm with this pole, and zero where it is infinite, and below the pole."""
    return jnp.where((x <= pole) | (x == jnp.inf), 0, log(x))


def _slopes_of_product(log, pole):
    """The slopes of `x * log(y)`, for a logarithm with this pole."""

    def in_log(_, x, y):
        slope = corner(quotient(x, positive(y - pole)), y == pole, x)
        # For zero times a logarithm, all derivatives by `y` are zero.
        return corner(slope, (y == pole) & (x != 0), y)

    return lambda _, x, y: corner(_finite(log, y, pole), y == pole, y), in_log


@real_function(*_slopes_of_product(log, 0))
def xlogy(x: Numbers, y: Numbers) -> Array:
    r"""Return `x * log(y)`, which is zero where `x` is.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        entropy = lambda p: -jnp.sum(eqg.safe.xlogy(p, p))
        p = jnp.array([0.0, 1.0])
        print(entropy(p))
        print(jax.grad(entropy)(p))
        ```

        ```text
        -0.0
        [-0. -1.]
        ```

    **Arguments:**

    - `x`, `y`: real, of shapes that broadcast together.

    **Returns:**

    The values of `jax.scipy.special.xlogy`.

    **Derivative:**

    $\dot z = \log y\,\dot x + \frac{x}{y}\dot y$. Both terms are zero where `y` is negative.
    They are zero where `y` is zero, too, because both factors are infinite or undefined there.
    Both modes and all orders; second derivatives are NaN where `y` is zero, except the second
    derivative by `y` where `x` is zero as well.
    """
    return _times_log(jnp.log, x, y)


def _times_log(log, x, y):
    """`x * log(y)`, and zero where `x` is. No zero is multiplied by an infinity on the way."""
    is_zero = x == 0
    return jnp.where(is_zero, 0, x * log(jnp.where(is_zero, 1, y)))


_log1p = with_slopes(jnp.log1p, lambda _, x: corner(inverse(positive(1 + x)), x == -1, x))


@real_function(*_slopes_of_product(_log1p, -1))
def xlog1py(x: Numbers, y: Numbers) -> Array:
    r"""Return `x * log1p(y)`, which is zero where `x` is.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        slopes = jax.grad(eqg.safe.xlog1py, argnums=(0, 1))
        print(*slopes(0.0, -1.0))
        print(*slopes(3.0, 0.0))
        ```

        ```text
        0.0 0.0
        0.0 3.0
        ```

    **Arguments:**

    - `x`, `y`: real, of shapes that broadcast together.

    **Returns:**

    The values of `jax.scipy.special.xlog1py`.

    **Derivative:**

    $\dot z = \log(1 + y)\,\dot x + \frac{x}{1 + y}\dot y$. Both terms are zero where `y` is -1
    or less. Both modes and all orders; second derivatives are NaN where `y` is -1, except the
    second derivative by `y` where `x` is zero.
    """
    return _times_log(jnp.log1p, x, y)


@real_function(lambda _, x: tanh(x))
def log_cosh(x: Numbers) -> Array:
    r"""Return `log(cosh(x))`: a smooth $|x|$, with the value zero and the curvature one at
    zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(f"{eqg.safe.log_cosh(100.0):.3f}")
        print(f"{eqg.safe.log_cosh(1e-3):.1e}")
        print(jax.grad(eqg.safe.log_cosh)(100.0))
        ```

        ```text
        99.307
        5.0e-07
        1.0
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    An array like `x`. It neither overflows nor cancels near zero.

    **Derivative:**

    $\dot y = \tanh x\,\dot x$. The derivative of the hyperbolic tangent in it is
    $4 e^{-2|x|} / (1 + e^{-2|x|})^2$, which keeps its digits in the tails, where
    `1 - tanh(x)**2` is zero. Both modes and all orders.
    """
    z = jnp.abs(x)
    # log(1 + (cosh(z) - 1)), in which nothing cancels; beyond 20, exp(-2z) is below rounding.
    u = jnp.expm1(jnp.minimum(z, 20))
    log_2 = 0.6931471805599453
    return jnp.where(z < 20, jnp.log1p(u * u / (2 * (1 + u))), z - log_2)


# ---------------------------------------------------------------- differences of exponentials


@real_function(lambda _, x: corner(_weight(x), x == 0, x))
def log_expm1(x: Numbers) -> Array:
    r"""Return `log(exp(x) - 1)` for positive `x`, without overflow: the inverse of
    `jax.nn.softplus`.

    Use it to compute the parameter whose softplus is a given positive number.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        raw = eqg.safe.log_expm1(0.01)
        print(f"{jax.nn.softplus(raw):.3f}")
        print(eqg.safe.log_expm1(200.0))
        print(jax.grad(eqg.safe.log_expm1)(200.0))
        ```

        ```text
        0.010
        200.0
        1.0
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    An array like `x`: $-\infty$ at zero, and NaN below. (For $\log(1 - e^{-x})$, there is
    `jax.nn.log1mexp`.)

    **Derivative:**

    $\dot y = \dot x / (1 - e^{-x})$. The derivative is zero below zero, and at zero, where
    this formula is infinite. Both modes and all orders. The second derivative is NaN at zero.
    """
    return x + _log_one_minus_exp(x)


def _log_one_minus_exp(x):
    """`log(1 - exp(-x))`."""
    # As minus the logarithm of the reciprocal, `1 + 1 / (exp(x) - 1)`: it keeps a small and a
    # large exponential. Below zero the quotient may be rounded to -1.
    return nan_where(x < 0, -jnp.log1p(1 / jnp.expm1(x)))


# `1 / (exp(x) - 1)`, and zero where `x` is not positive. The value has the same quotient.
_odds = with_slopes(
    lambda x: jnp.where(x <= 0, 0, 1 / jnp.expm1(x)), lambda out, _: -(out * (1 + out))
)


def _weight(x):
    """`1 / (1 - exp(-x))`, and zero where `x` is not positive."""
    return jnp.where(x <= 0, 0, 1 + _odds(x))


@real_function(
    lambda _, x, y: _at_equal(jnp.where(jnp.isneginf(x), 0, _weight(_gap(x, y))), x, y),
    lambda _, x, y: _at_equal(-_odds(_gap(x, y)), x, y),
)
def log_sub_exp(x: Numbers, y: Numbers) -> Array:
    r"""Return `log(exp(x) - exp(y))`, for `x` greater than `y`. (For the logarithm of a sum,
    use `logaddexp`.)

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        print(f"{eqg.safe.log_sub_exp(1000.0, 999.0):.3f}")
        slopes = jax.grad(eqg.safe.log_sub_exp, argnums=(0, 1))
        print(*slopes(3.0, -jnp.inf))
        print(*slopes(-jnp.inf, -jnp.inf))
        ```

        ```text
        999.541
        1.0 -0.0
        0.0 -0.0
        ```

    **Arguments:**

    - `x`, `y`: real, of shapes that broadcast together. They may be logarithms of zero.

    **Returns:**

    An array: $-\infty$ where `x` equals `y`, and NaN where it is less.

    **Derivative:**

    With $w = 1 / (1 - e^{y - x})$, $\dot z = w\,\dot x - e^{y - x} w\,\dot y$. Both terms are
    zero where $x \le y$, and the first where `x` is $-\infty$. Both modes and all orders;
    second derivatives are NaN where `x` equals `y`.
    """
    return x + _log_one_minus_exp(_gap(x, y))


def _gap(x, y):
    """`x - y`. It is infinite where `exp(y)` is zero, even if `exp(x)` is zero, and it is zero
    where both are infinite."""
    return jnp.where(jnp.isneginf(y), jnp.inf, jnp.where(x == y, 0, x - y))


def _at_equal(slope, x, y):
    return corner(slope, (x == y) & jnp.isfinite(x), x, y)
