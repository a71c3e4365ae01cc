"""Logarithms: of a number, and of hyperbolic cosines and differences of exponentials; and
products with them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules.elementwise import elementwise
from .._rules.nan_where import nan_where
from ._corner import corner
from ._dtypes import apply
from ._inverse import inverse, positive, quotient
from ._logarithm import finite_logarithm, logarithm
from ._logistic import tanh


def log(x: ArrayLike) -> Array:
    r"""`jnp.log`, with the derivative zero at zero.

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

    $\dot y = \dot x / x$. At zero, where it is infinite, and below, the derivative is zero.
    Both modes and all orders; the second derivative is NaN at zero.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("log", logarithm, x=x)


def xlogy(x: ArrayLike, y: ArrayLike) -> Array:
    r"""`x * log(y)`, which is zero where `x` is.

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

    $\dot z = \log y\,\dot x + \frac{x}{y}\dot y$. Where `y` is zero, where both factors are
    infinite or undefined, both terms are zero. For a negative `y` they are zero as well. Both
    modes and all orders; second derivatives are NaN where `y` is zero, except that by `y` where
    `x` is zero as well.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` or `y` is complex, or if their shapes do not broadcast
    together.
    """
    return apply("xlogy", _xlogy, x=x, y=y)


@jax.jit
def _log_of_second(out, x, y):
    del out, x
    return corner(finite_logarithm(y), y == 0, y)


@jax.jit
def _ratio(out, x, y):
    del out
    return _ratio_to(positive(y), y == 0, x, y)


def _ratio_to(divisor, is_pole, x, y):
    slope = corner(quotient(x, divisor), is_pole, x)
    # Of zero times a logarithm, all derivatives by `y` are zero.
    return corner(slope, is_pole & (x != 0), y)


def _times_log(log):
    """`x * log(y)`, and zero where `x` is. No zero is multiplied by an infinity on the way."""

    def value(x, y):
        is_zero = x == 0
        return jnp.where(is_zero, 0, x * log(jnp.where(is_zero, 1, y)))

    return jax.jit(value)


_xlogy = elementwise(_times_log(jnp.log), (_log_of_second, _ratio))


def xlog1py(x: ArrayLike, y: ArrayLike) -> Array:
    r"""`x * log1p(y)`, which is zero where `x` is.

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
    or less. Both modes and all orders; second derivatives are NaN where `y` is -1, except that
    by `y` where `x` is zero.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` or `y` is complex, or if their shapes do not broadcast
    together.
    """
    return apply("xlog1py", _xlog1py, x=x, y=y)


@jax.jit
def _log1p_slope(out, x):
    del out
    return corner(inverse(positive(1 + x)), x == -1, x)


_log1p = elementwise(jnp.log1p, _log1p_slope)


@jax.jit
def _log1p_of_second(out, x, y):
    del out, x
    slope = jnp.where((y <= -1) | (y == jnp.inf), 0, _log1p(y))
    return corner(slope, y == -1, y)


@jax.jit
def _ratio_to_one_more(out, x, y):
    del out
    return _ratio_to(positive(1 + y), y == -1, x, y)


_xlog1py = elementwise(_times_log(jnp.log1p), (_log1p_of_second, _ratio_to_one_more))


def log_cosh(x: ArrayLike) -> Array:
    r"""`log(cosh(x))`: a smooth $|x|$, with the value zero and the curvature one at zero.

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

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("log_cosh", _log_cosh, x=x)


def _log_cosh_value(x):
    z = jnp.abs(x)
    # log(1 + (cosh(z) - 1)), in which nothing cancels; beyond 20, exp(-2z) is below rounding.
    u = jnp.expm1(jnp.minimum(z, 20))
    return jnp.where(z < 20, jnp.log1p(u * u / (2 * (1 + u))), z - _LOG_2)


_LOG_2 = 0.6931471805599453


def _tanh_of(out, x):
    del out
    return tanh(x)


_log_cosh = elementwise(jax.jit(_log_cosh_value), _tanh_of)


def log_expm1(x: ArrayLike) -> Array:
    r"""`log(exp(x) - 1)`, for positive `x`, without overflow.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.safe.log_expm1(200.0))
        print(jax.grad(eqg.safe.log_expm1)(200.0))
        ```

        ```text
        200.0
        1.0
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    An array like `x`: $-\infty$ at zero, and NaN below. (For $\log(1 - e^{-x})$, there is
    `jax.nn.log1mexp`.)

    **Derivative:**

    $\dot y = \dot x / (1 - e^{-x})$. At zero, where it is infinite, and below, the derivative
    is zero. Both modes and all orders; the second derivative is NaN at zero.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("log_expm1", _log_expm1, x=x)


def softplus_inverse(x: ArrayLike) -> Array:
    """The argument at which `jax.nn.softplus` is `x`: for the parameter of a positive number.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        raw = eqg.safe.softplus_inverse(0.01)
        print(f"{jax.nn.softplus(raw):.3f}")
        ```

        ```text
        0.010
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    [`eqx_grads.safe.log_expm1`][] of `x`, which is the same function.

    **Derivative:**

    As for [`eqx_grads.safe.log_expm1`][].

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("softplus_inverse", _log_expm1, x=x)


@jax.jit
def _log_one_minus_exp(x):
    """`log(1 - exp(-x))`."""
    # As minus the logarithm of the reciprocal, `1 + 1 / (exp(x) - 1)`: it keeps a small and a
    # large exponential. Below zero the quotient may be rounded to -1.
    return nan_where(x < 0, -jnp.log1p(1 / jnp.expm1(x)))


def _log_expm1_value(x):
    return x + _log_one_minus_exp(x)


def _weight_value(x):
    """`1 / (1 - exp(-x))`, and zero where `x` is not positive."""
    has_none = x <= 0
    return jnp.where(has_none, 0, -1 / jnp.expm1(-jnp.where(has_none, 1, x)))


def _weight_slope(out, x):
    return -(out * jnp.exp(-positive(x))) * out


def _weight_of(out, x):
    del out
    return corner(_weight(x), x == 0, x)


_log_expm1 = elementwise(jax.jit(_log_expm1_value), _weight_of)
_weight = elementwise(jax.jit(_weight_value), jax.jit(_weight_slope))


def log_sub_exp(x: ArrayLike, y: ArrayLike) -> Array:
    r"""`log(exp(x) - exp(y))`, for `x` greater than `y`. (For the logarithm of a sum, there is
    `logaddexp`.)

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

    - `x`, `y`: real, of shapes that broadcast together. Logarithms of zero may be among them.

    **Returns:**

    An array: $-\infty$ where `x` equals `y`, and NaN where it is less.

    **Derivative:**

    With $w = 1 / (1 - e^{y - x})$, $\dot z = w\,\dot x - e^{y - x} w\,\dot y$. Both terms are
    zero where $x \le y$, and the first where `x` is $-\infty$. The second, and all of higher
    orders, have the relative error of `exp` of a rounded difference, $\epsilon\,|x - y|$. Both
    modes and all orders; second derivatives are NaN where `x` equals `y`.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` or `y` is complex, or if their shapes do not broadcast
    together.
    """
    return apply("log_sub_exp", _log_sub_exp, x=x, y=y)


def _log_sub_exp_value(x, y):
    return x + _log_one_minus_exp(_gap(x, y))


def _gap(x, y):
    """`x - y`, which is infinite where `exp(y)` is zero, also if `exp(x)` is, and zero where
    both are infinite."""
    return jnp.where(jnp.isneginf(y), jnp.inf, jnp.where(x == y, 0, x - y))


@jax.jit
def _weight_of_first(out, x, y):
    del out
    weight = jnp.where(jnp.isneginf(x), 0, _weight(_gap(x, y)))
    return _at_equal(weight, x, y)


@jax.jit
def _weight_of_second(out, x, y):
    del out
    gap = _gap(x, y)
    return _at_equal(-jnp.exp(-positive(gap)) * _weight(gap), x, y)


def _at_equal(slope, x, y):
    return corner(slope, (x == y) & jnp.isfinite(x), x, y)


_log_sub_exp = elementwise(jax.jit(_log_sub_exp_value), (_weight_of_first, _weight_of_second))
