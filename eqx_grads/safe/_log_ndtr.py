r"""The logarithm of the normal distribution function, and its derivatives in the far tails.

All is made of the hazard $h(x) = \varphi(x) / \Phi(x)$ below zero. There, $e = h + x$ is the
mean excess of a normal variable over the threshold $-x$: what is left of a sum of two numbers
that are much larger. So `e` is computed, and $h = e - x$ is a sum of positive numbers.
"""

import decimal
import functools as ft
import math
from decimal import Decimal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._arguments import Numbers
from ._elementwise import real_function, with_slopes


@real_function(lambda _, x: _hazard(x))
def log_ndtr(x: Numbers) -> Array:
    r"""Return the logarithm of the standard normal distribution function, with derivatives that
    are right in the far tails.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        slope = jax.grad(eqg.safe.log_ndtr)
        print(f"{slope(-1e5):.3g}")
        print(f"{jax.grad(slope)(-1e5):.3f}")
        ```

        ```text
        1e+05
        -1.000
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    An array like `x`.

    **Derivative:**

    The hazard $h(x) = \varphi(x) / \Phi(x)$ (also called the inverse Mills ratio):
    $\dot y = h\,\dot x$, with $\dot h = -h\,(h + x)\,\dot x$. In the lower tail, $h + x$ is a
    continued fraction, in which nothing cancels (Laplace 1805). Both derivatives are zero at
    $-\infty$. Both modes and all orders.
    """
    side, hazard = _smaller_side(x)
    above = jnp.where(x < 0, 0, side)
    # XLA's `log1p` has errors of 130 units in double precision, and up to 0.6 needs not to be
    # used.
    of_body = jnp.where(x > 0.6, jnp.log1p(-above), jnp.log(1 - above))
    of_tail = -0.5 * x * x - (0.5 * math.log(2 * math.pi) + jnp.log(hazard))
    return jnp.where(x < 0, of_tail, of_body)


def _hazard_value(x):
    side, hazard = _smaller_side(x)
    hazard = jnp.where(x < 0, hazard, _density(x) / (1 - side))
    return jnp.where(jnp.isneginf(x), 0, hazard)


def _hazard_slope(out, x):
    # Not by `minimum` and `clip`, whose derivatives at zero are a half. Far below, the excess
    # is constant to rounding.
    is_below = x < 0
    below = jnp.where(is_below, jnp.maximum(x, -1e18), -1)
    above = jnp.where(is_below, 0, jnp.minimum(x, 50))
    _, slope = jax.jvp(_excess, (below,), (jnp.ones_like(x),))
    slope = jnp.where(is_below, slope - 1, -out * (out + above))
    return jnp.where(jnp.isneginf(x), 0, slope)


_hazard = with_slopes(_hazard_value, _hazard_slope)


def _smaller_side(x):
    """The distribution function at `-abs(x)`, and the hazard there."""
    z = jnp.abs(x)
    hazard = _excess(-z) + z
    return _density(z) / hazard, hazard


def _density(x):
    """The normal density. The square of a rounded `x` is exact, and the rest is small."""
    x = jnp.clip(x, -50, 50)  # it is zero from there on
    coarse = jnp.round(x * 64) / 64
    rest = (x - coarse) * (x + coarse)
    # The compiler would make one exponential of two that are multiplied.
    coarse = jnp.exp(-0.5 * coarse * coarse) / math.sqrt(2 * math.pi)
    return coarse + coarse * jnp.expm1(-0.5 * rest)


# ---------------------------------------------------------------- the excess

_TAIL = 3  # where the continued fraction begins
_CENTER = -1.5


def _excess(x):
    in_tail = x < -_TAIL
    tail, body = jnp.where(in_tail, -x, _TAIL), jnp.where(in_tail, _CENTER, x)
    return jnp.where(in_tail, _fraction(tail), _series(body - _CENTER))


def _fraction(t):
    """The continued fraction `1 / (t + 2 / (t + 3 / ...))` (Laplace 1805)."""
    last = 14 if t.dtype == jnp.float32 else 48
    # As 1 / t over 1 + 2 u / (1 + 3 u / (1 + ...)). What is left out is near to the root of
    # `r = 1 + (last + 1) * u / r`.
    u = 1 / (t * t)
    r = 0.5 * (1 + jnp.sqrt(1 + 4 * (last + 1) * u))
    for k in range(last, 1, -1):
        r = 1 + k * u / r
    return 1 / (t * r)


def _series(s):
    # The nearest pole, a zero of the distribution function, is at 1.92 + 2.82i: each term is
    # at most 0.34 of the one before.
    coefficients = _coefficients()[: 18 if s.dtype == jnp.float32 else 40]
    return ft.reduce(lambda total, a: total * s + a, reversed(coefficients), jnp.zeros_like(s))


@ft.cache
def _coefficients():
    """The first coefficients of the power series at the center.

    The excess `e` has the derivative `1 - e * (e - x)`, so they follow from its value at the
    center. Each step of the recurrence cancels; in doubles, only a few digits would be left in
    the end.
    """
    with decimal.localcontext(prec=50):
        center = Decimal(_CENTER)
        e = Decimal(0)
        for k in range(2000, 0, -1):
            e = k / (e - center)
        a = [e]
        for k in range(39):
            products = sum(a[i] * a[k - i] for i in range(k + 1))
            rest = 1 if k == 0 else a[k - 1]
            a.append((rest - products + center * a[k]) / (k + 1))
        return [float(x) for x in a]
