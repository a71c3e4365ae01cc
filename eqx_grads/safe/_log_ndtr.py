"""The logarithm of the normal distribution function, and its derivatives in the far tails."""

import functools as ft
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
        import jax.numpy as jnp

        slope = jax.grad(eqg.safe.log_ndtr)
        assert jnp.allclose(slope(-1e5), 1e5)
        assert jnp.allclose(jax.grad(slope)(-1e5), -1.0)
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    An array like `x`.

    **Derivative:**

    The hazard $h(x) = \varphi(x) / \Phi(x)$ (also called the inverse Mills ratio):
    $\dot y = h\,\dot x$, with $\dot h = -h\,(h + x)\,\dot x$. In the lower tail, $h$ and
    $h + x$ are continued fractions, in which nothing cancels (Laplace 1805). Both are zero at
    $-\infty$. Both modes, all orders.
    """
    return apply("log_ndtr", _log_ndtr, x=x)


_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


def _tail_and_body(x):
    """Whether `x` is in the lower tail, with arguments for both formulas."""
    in_tail = x < -3
    # The density is zero from 50 on.
    return in_tail, jnp.where(in_tail, -x, 3), jnp.where(in_tail, 0, jnp.minimum(x, 50))


def _continued_fraction(t):
    """The hazard at `-t` less `t`: 1 / (t + 2 / (t + 3 / (t + ...))) (Laplace)."""
    n = 16 if t.dtype == jnp.float32 else 48
    # What is left out is near to the root of `r = t + (n + 1) / r`.
    remainder = 0.5 * (t + jnp.sqrt(t * t + 4 * (n + 1)))
    return 1 / ft.reduce(lambda total, k: t + k / total, range(n, 1, -1), remainder)


def _density(x):
    """The normal density. The square of a rounded `x` is exact, and the rest is small."""
    steps = 16.0 if x.dtype == jnp.float32 else 65536.0
    coarse = jnp.round(x * steps) / steps
    rest = (x - coarse) * (x + coarse)
    return jnp.exp(-0.5 * coarse * coarse) * jnp.exp(-0.5 * rest) / math.sqrt(2 * math.pi)


def _lower(x):
    """The distribution function, from the smaller of the two sides."""
    side = 0.5 * jax.scipy.special.erfc(jnp.abs(x) / math.sqrt(2))
    return jnp.where(x > 0, 1 - side, side), side


def _log_ndtr_value(x):
    in_tail, tail, body = _tail_and_body(x)
    _, side = _lower(body)
    of_body = jnp.where(body > 0, jnp.log1p(-side), jnp.log(side))
    hazard = tail + _continued_fraction(tail)
    of_tail = -0.5 * tail * tail - (_LOG_SQRT_2_PI + jnp.log(hazard))
    return jnp.where(in_tail, of_tail, of_body)


def _hazard_value(x):
    in_tail, tail, body = _tail_and_body(x)
    of_body = _density(body) / _lower(body)[0]
    of_tail = tail + _continued_fraction(tail)
    return jnp.where(jnp.isneginf(x), 0, jnp.where(in_tail, of_tail, of_body))


def _excess(x):
    """The hazard plus `x`, which cancel in the tail."""
    in_tail, tail, body = _tail_and_body(x)
    return jnp.where(in_tail, _continued_fraction(tail), _hazard(body) + body)


def _hazard_of(out, x):
    del out
    return _hazard(x)


def _hazard_slope(out, x):
    return -out * _excess(x)


_log_ndtr = elementwise(jax.jit(_log_ndtr_value), _hazard_of)
_hazard = elementwise(jax.jit(_hazard_value), jax.jit(_hazard_slope))
