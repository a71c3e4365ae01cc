"""The logarithm of the normal distribution function, and its derivatives in the far tails."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules.elementwise import elementwise
from ._dtypes import apply


def log_ndtr(x: ArrayLike) -> Array:
    r"""The logarithm of the standard normal distribution function, with derivatives that are
    right in the far tails.

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
    $\dot y = h\,\dot x$, with $\dot h = -h\,(h + x)\,\dot x$. In the lower tail, $h$ and
    $h + x$ are continued fractions, in which nothing cancels (Laplace 1805). Both are zero at
    $-\infty$. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("log_ndtr", _log_ndtr, x=x)


_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


def _split(x):
    """Whether `x` is in a tail, with arguments for the formulas of tails and of the rest."""
    is_far = jnp.abs(x) > 3
    return is_far, jnp.where(is_far, jnp.abs(x), 3), jnp.where(is_far, 0, x)


def _continued_fraction(t):
    """The hazard at `-t` less `t`: 1 / (t + 2 / (t + 3 / (t + ...))) (Laplace)."""
    n = 14 if t.dtype == jnp.float32 else 48
    # As 1 / t over 1 + 2u / (1 + 3u / (1 + ...)), by the recurrence of numerators and
    # denominators (Wallis): in powers of `u` they stay in range, and there is one division.
    u = 1 / (t * t)
    p = p_before = q = jnp.ones_like(t)
    q_before = jnp.zeros_like(t)
    for k in range(2, n):
        p, p_before = p + k * u * p_before, p
        q, q_before = q + k * u * q_before, q
    # What is left out is near to the root of `r = 1 + (n + 1) * u / r`.
    r = 0.5 * (1 + jnp.sqrt(1 + 4 * (n + 1) * u))
    return (r * q + n * u * q_before) / (t * (r * p + n * u * p_before))


def _density(x):
    """The normal density. The square of a rounded `x` is exact, and the rest is small."""
    x = jnp.clip(x, -50, 50)  # it is zero from there on
    steps = 16.0 if x.dtype == jnp.float32 else 65536.0
    coarse = jnp.round(x * steps) / steps
    rest = (x - coarse) * (x + coarse)
    # The compiler would make one exponential of two that are multiplied.
    coarse = jnp.exp(-0.5 * coarse * coarse) / math.sqrt(2 * math.pi)
    return coarse + coarse * jnp.expm1(-0.5 * rest)


def _smaller_side(x):
    """The distribution function at `-abs(x)`, and the hazard there if it is in a tail."""
    is_far, far, near = _split(x)
    hazard = far + _continued_fraction(far)
    of_near = 0.5 * jax.scipy.special.erfc(jnp.abs(near) / math.sqrt(2))
    return jnp.where(is_far, _density(far) / hazard, of_near), hazard


@jax.jit
def _log_ndtr_value(x):
    side, hazard = _smaller_side(x)
    in_tail = x < -3
    log = jnp.log(jnp.where(in_tail, hazard, side))
    of_tail = -0.5 * x * x - (_LOG_SQRT_2_PI + log)
    return jnp.where(in_tail, of_tail, jnp.where(x > 0, jnp.log1p(-side), log))


@jax.jit
def _hazard_value(x):
    side, hazard = _smaller_side(x)
    of_body = _density(x) / jnp.where(x > 0, 1 - side, side)
    return jnp.where(jnp.isneginf(x), 0, jnp.where(x < -3, hazard, of_body))


def _excess(x):
    """The hazard plus `x`, which cancel in the lower tail."""
    in_tail = x < -3
    # At minus infinity the derivatives of the fraction would be NaN, and not zero.
    bounded = jnp.maximum(x, float(jnp.finfo(x.dtype).min))
    tail, body = jnp.where(in_tail, -bounded, 3), jnp.where(in_tail, 0, jnp.minimum(x, 50))
    return jnp.where(in_tail, _continued_fraction(tail), _hazard(body) + body)


def _hazard_of(out, x):
    del out
    return _hazard(x)


@jax.jit
def _hazard_slope(out, x):
    return -out * _excess(x)


_log_ndtr = elementwise(_log_ndtr_value, _hazard_of)
_hazard = elementwise(_hazard_value, _hazard_slope)
