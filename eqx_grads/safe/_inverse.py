"""`1 / x` and `x / y`, or zero at a pole: the factors of which the other derivatives are made.

A tangent is multiplied by one factor at a time, so that a zero stays zero where the product of
the factors overflows. The derivatives of these functions are made of their results, so that
they hold at all orders.
"""

import jax
import jax.numpy as jnp

from .._rules.custom_jvp import custom_jvp
from ..tangents import add, neg, scale
from ._corner import corner


def positive(x):
    """`x`, or zero where it is negative."""
    return jnp.where(x <= 0, 0, x)


@custom_jvp
@jax.jit
def inverse(x):
    """`1 / x`, and zero at zero."""
    return 1 / jnp.where(x == 0, jnp.inf, x)


@inverse.def_jvp
def _inverse_jvp(primals, tangents):
    out = inverse(*primals)
    (t_x,) = tangents
    return out, -(out * t_x) * out


@custom_jvp
@jax.jit
def quotient(x, y):
    """`x / y`, and zero where `y` is, or where `x` is infinite."""
    return jnp.where(jnp.isinf(x), 0, x / jnp.where(y == 0, jnp.inf, y))


@quotient.def_jvp(symbolic_zeros=True)
def _quotient_jvp(primals, tangents):
    return quotient_jvp(quotient(*primals), primals, tangents)


def quotient_jvp(out, primals, tangents):
    """`out`, and its tangent, which is zero at a pole and where `x` is infinite."""
    x, y = primals
    t_x, t_y = tangents
    r = corner(inverse(y), y == 0, y)
    ratio = corner(jnp.where((y == 0) | jnp.isinf(x), 0, out), y == 0, x)
    return out, scale(add(t_x, neg(scale(t_y, ratio))), r)
