"""Roots, reciprocals, quotients and powers, whose derivatives are zero at poles."""

import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules.custom_jvp import custom_jvp
from .._rules.elementwise import elementwise
from ._corner import corner
from ._dtypes import apply
from ._inverse import inverse, quotient, quotient_jvp
from ._logarithm import finite_logarithm


def sqrt(x: ArrayLike) -> Array:
    r"""`jnp.sqrt`, with the derivative zero at zero.

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

    $\dot y = \dot x / 2y$. At zero, where it is infinite, the derivative is zero, as it is of
    a norm, whose minimum this is. (So it is for `sqrt(x) ** 2`, whose true derivative is one.)
    Below zero it is zero as well. Both modes and all orders; the second derivative is NaN at
    zero.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("sqrt", square_root, x=x)


@jax.jit
def _square_root_slope(out, x):
    return corner(0.5 * inverse(jnp.where(x <= 0, 0, out)), x == 0, x)


square_root = elementwise(jnp.sqrt, _square_root_slope)


def reciprocal(x: ArrayLike) -> Array:
    r"""`1 / x`, with the derivative zero at zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        f = lambda x: jnp.where(x == 0, 0.0, eqg.safe.reciprocal(x))
        print(jax.grad(f)(0.0))
        print(jax.grad(f)(2.0))
        ```

        ```text
        -0.0
        -0.25
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    The values of `jnp.reciprocal`: infinite at zero.

    **Derivative:**

    $\dot y = -y^2\,\dot x$, and zero at zero. Both modes and all orders; the second derivative
    is NaN at zero.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("reciprocal", _reciprocal, x=x)


@custom_jvp
@jax.jit
def _reciprocal(x):
    return 1 / x


@_reciprocal.def_jvp
def _reciprocal_jvp(primals, tangents):
    (x,), (t_x,) = primals, tangents
    r = corner(inverse(x), x == 0, x)
    return _reciprocal(x), -(r * t_x) * r


def divide(x: ArrayLike, y: ArrayLike) -> Array:
    r"""`x / y`, with derivatives that are zero where `y` is zero, and right where `y**2` is
    out of range.

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
    where `y` is zero, and the second also where `x` is infinite. Both modes and all orders;
    second derivatives are NaN where `y` is zero, and that with respect to `y` is right where
    $1 / y^2$ is in range.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` or `y` is complex, or if their shapes do not broadcast
    together.
    """
    return apply("divide", _divide, x=x, y=y)


@custom_jvp
@jax.jit
def _divide(x, y):
    return x / y


@_divide.def_jvp(symbolic_zeros=True)
def _divide_jvp(primals, tangents):
    return quotient_jvp(_divide(*primals), primals, tangents)


def power(x: ArrayLike, y: ArrayLike) -> Array:
    r"""`x**y`, with derivatives that are zero where they are infinite or do not exist. For an
    exponent that is a Python `int`, write `x**2`, whose derivatives are right in JAX.

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
    $y < 0$. Both terms are zero where they would be infinite as `x` or `y` is. Both modes and
    all orders. At $x = 0$, a derivative of higher order is NaN where it is infinite. Those in
    `x` are quotients of the power, so that a large `y` remains even or
    odd. Where the power is out of range, and in mixed derivatives, the exponent is `y - 1` or
    `y - 2`, which is rounded: a relative error of $\epsilon\,|\log x|$ as well.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` or `y` is complex, or if their shapes do not broadcast
    together.
    """
    return apply("power", _power, x=x, y=y)


@jax.jit
def _base_slope(out, x, y):
    del out
    return _slope(x, y, order=1)


@jax.jit
def _exponent_slope(out, x, y):
    slope = jnp.where(_is_without_log(x, y), 0, out) * finite_logarithm(x)
    slope = corner(slope, (x == 0) & (y <= 1), x)
    return corner(slope, (x == 0) & (y <= 0), y)


def _is_without_log(x, y):
    return (x <= 0) | jnp.isinf(x) | jnp.isinf(y)


_power = elementwise(jnp.power, (_base_slope, _exponent_slope))


@ft.partial(jax.jit, static_argnames="order")
def _derivative_value(x, y, *, order):
    """`y (y - 1) ... x**(y - order)`, and zero where it is infinite or does not exist."""
    whole = jnp.power(x, y)
    # `y - order` is rounded, which matters for a large and for a small `y`: a large one is odd
    # instead of even. So quotients are better, unless the whole power is out of range.
    is_normal = (jnp.abs(whole) >= jnp.finfo(x.dtype).tiny) & jnp.isfinite(whole)
    by_quotients, by_power = whole, jnp.power(x, y - order)
    # One factor at a time: a product of two may be out of range.
    for j in range(order):
        by_quotients, by_power = quotient(by_quotients, x) * (y - j), by_power * (y - j)
    has_none = (x == 0) & (y < order) | (x < 0) & (jnp.floor(y) < y)
    has_none = has_none | jnp.isinf(y) | (jnp.isinf(x) & (y > order))
    return jnp.where(has_none, 0, jnp.where(is_normal, by_quotients, by_power))


def _in_base(out, x, y, *, order):
    del out
    return _slope(x, y, order=order + 1)


def _slope(x, y, *, order):
    is_polynomial = (y >= 0) & (jnp.floor(y) == y)
    slope = _derivative(x, y, order=order)
    slope = corner(slope, (x == 0) & (y < order + 1) & ~is_polynomial, x)
    return corner(slope, (x == 0) & (y <= order), y)


@ft.partial(jax.jit, static_argnames="order")
def _in_exponent(out, x, y, *, order):
    coefficient, slope = 1, 0  # y (y - 1) ..., and its derivative
    for j in range(order):
        coefficient, slope = coefficient * (y - j), slope * (y - j) + coefficient
    both = slope * _power(x, y - order) + out * finite_logarithm(x)
    return jnp.where(_is_without_log(x, y), 0, both)


# Of that order, the derivative of the power in the base.
_derivative = elementwise(_derivative_value, (_in_base, _in_exponent))
