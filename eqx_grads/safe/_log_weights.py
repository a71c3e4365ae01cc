"""The logarithm of a sum of exponentials and the weights of its terms, by one rule."""

import jax.numpy as jnp
from jax import lax

from .._rules.custom_jvp import custom_jvp
from ._corner import corner


@custom_jvp
def log_weights(a, b, *, axes):
    r"""$y = \log |\sum b\, e^a|$, the sign of the sum, and $q = e^a / \sum b\, e^a$.

    The axes are kept. Without `b`, which is `None` for one, the last are the softmax of `a`. A
    term with $b = 0$ is masked, whatever $a$ is. Several infinite terms have equal weights, and
    a sum that is zero has no weights.

    **Derivative:**

    $\dot y = \sum q (b\, \dot a + \dot b)$ and $\dot q = q (\dot a - \dot y)$, made of what the
    function returns, so that they hold at all orders. The tangent of a term that is $-\infty$
    is dropped: it may be infinite itself, that of a logarithm of zero.
    """
    present = a if b is None else jnp.where(b == 0, -jnp.inf, a)
    largest = jnp.max(present, axes, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(shift(a, largest))
    if b is None:
        total = jnp.sum(e, axes, keepdims=True)
    else:
        total = jnp.sum(jnp.where(b == 0, 0, b * e), axes, keepdims=True)
        e = jnp.where((total == 0) | ((b == 0) & jnp.isinf(e)), 0, e)
    # By infinity, not by zero: no element has to be looked at again.
    q = e / jnp.where(total == 0, jnp.inf, total)
    return largest + jnp.log(jnp.abs(total)), jnp.sign(total), q


@log_weights.def_jvp
def _log_weights_jvp(primals, tangents, *, axes):
    a, b = primals
    t_a, t_b = tangents
    y, sign, q = log_weights(a, b, axes=axes)
    t_a = jnp.where(a == -jnp.inf, 0, t_a)
    if b is None:
        t_terms = q * t_a
    else:
        weights = _without_derivative_at_zero(q, sign, a, b, axes)
        t_terms = jnp.where(b == 0, 0, b * weights) * t_a + weights * t_b
    t_y = jnp.sum(t_terms, axes, keepdims=True)
    return (y, sign, q), (t_y, None, q * (t_a - t_y))


def _without_derivative_at_zero(q, sign, a, b, axes):
    """The weights, where terms of a sum cancel, or the factors of all are zero."""
    is_term = a != -jnp.inf
    is_pole = lambda terms: (sign == 0) & jnp.any(terms, axes, keepdims=True)
    # A tangent of minus infinity may be infinite, too.
    q = corner(q, is_pole(is_term & (b != 0)), jnp.where(is_term, a, 0), axes=axes)
    return corner(q, is_pole(is_term), b, axes=axes)


def shift(a, largest):
    """`a - largest`, where infinity minus itself is zero, and `-inf` remains what it is.

    Most of it is done to `largest`, which is smaller than `a`.
    """
    largest = lax.stop_gradient(largest)
    finite = float(jnp.finfo(a.dtype).max)
    top = jnp.where(largest == -jnp.inf, 0, jnp.minimum(largest, finite))
    # What is below infinity is zero, relative to it: its logarithm is minus infinity.
    return (jnp.minimum(a, finite) - top) * jnp.where(largest == jnp.inf, finite, 1)
