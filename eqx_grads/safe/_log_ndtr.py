"""The logarithm of the normal distribution function, and its derivatives in the far tails."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules.elementwise import elementwise
from ._dtypes import apply
from ._normal_excess import excess, hazard_of_tail, TAIL


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
    $\dot y = h\,\dot x$, with $\dot h = -h\,(h + x)\,\dot x$. In the lower tail, $h$ is a
    continued fraction, in which nothing cancels (Laplace 1805). Below zero the derivatives of
    $h + x$ are cumulants of what is left of a normal variable above $-x$, computed each for
    itself: up to the third derivative of the function they are right to 48 units in the last
    place however far the tail, and up to the fifth, below -5, to 60. Both derivatives are zero
    at $-\infty$. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is complex.
    """
    return apply("log_ndtr", _log_ndtr, x=x)


_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


def _split(x):
    """Whether `x` is in a tail, with arguments for the formulas of tails and of the rest."""
    is_far = jnp.abs(x) > TAIL
    return is_far, jnp.where(is_far, jnp.abs(x), TAIL), jnp.where(is_far, 0, x)


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
    hazard = hazard_of_tail(far)
    of_near = 0.5 * jax.scipy.special.erfc(jnp.abs(near) / math.sqrt(2))
    return jnp.where(is_far, _density(far) / hazard, of_near), hazard


@jax.jit
def _log_ndtr_value(x):
    side, hazard = _smaller_side(x)
    in_tail = x < -TAIL
    # Up to 0.6, both are right for `1 - side`, but XLA's `log1p` has errors of 130 units in
    # double precision.
    log = jnp.log(jnp.where(in_tail, hazard, jnp.where(x > 0, 1 - side, side)))
    of_tail = -0.5 * x * x - (_LOG_SQRT_2_PI + log)
    return jnp.where(in_tail, of_tail, jnp.where(x > 0.6, jnp.log1p(-side), log))


@jax.jit
def _hazard_value(x):
    side, hazard = _smaller_side(x)
    of_body = _density(x) / jnp.where(x > 0, 1 - side, side)
    return jnp.where(jnp.isneginf(x), 0, jnp.where(x < -TAIL, hazard, of_body))


def _hazard_of(out, x):
    del out
    return _hazard(x)


@jax.jit
def _hazard_slope(out, x):
    # Below zero its derivative would be a difference of two products that are larger.
    is_below = x < 0
    below, above = jnp.where(is_below, x, -1), jnp.where(is_below, 0, jnp.minimum(x, 50))
    hazard = jnp.where(is_below, 0, out)
    slope = jnp.where(is_below, excess(below, order=1) - 1, -hazard * (hazard + above))
    return jnp.where(jnp.isneginf(x), 0, slope)


_log_ndtr = elementwise(_log_ndtr_value, _hazard_of)
_hazard = elementwise(_hazard_value, _hazard_slope)
