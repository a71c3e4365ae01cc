"""Roots, reciprocals, quotients and powers: their derivatives at poles and at all magnitudes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules.custom_jvp import custom_jvp
from .._rules.elementwise import elementwise
from ._dtypes import apply
from ._inverse import inverse, positive, quotient, quotient_jvp
from ._logarithm import finite_logarithm


def sqrt(x: ArrayLike) -> Array:
    return apply("sqrt", square_root, x=x)


def _square_root_slope(out, x):
    del x
    return 0.5 * inverse(positive(out))


square_root = elementwise(jnp.sqrt, _square_root_slope)


def reciprocal(x: ArrayLike) -> Array:
    return apply("reciprocal", _reciprocal, x=x)


@custom_jvp
@jax.jit
def _reciprocal(x):
    return 1 / x


@_reciprocal.def_jvp
def _reciprocal_jvp(primals, tangents):
    r = inverse(*primals)
    (t_x,) = tangents
    return _reciprocal(*primals), -(r * t_x) * r


def divide(x: ArrayLike, y: ArrayLike) -> Array:
    return apply("divide", _divide, x=x, y=y)


@custom_jvp
@jax.jit
def _divide(x, y):
    return x / y


@_divide.def_jvp
def _divide_jvp(primals, tangents):
    return quotient_jvp(_divide(*primals), primals, tangents)


def power(x: ArrayLike, y: ArrayLike) -> Array:
    return apply("power", _power, x=x, y=y)


@jax.jit
def _base_slope(out, x, y):
    del out
    return _slope(x, y)


@jax.jit
def _exponent_slope(out, x, y):
    del y
    return jnp.where(x > 0, out, 0) * finite_logarithm(x)


_power = elementwise(jnp.power, (_base_slope, _exponent_slope))


def _slope_value(x, y):
    """`y * x**(y - 1)`, and zero where the derivative is infinite or does not exist."""
    whole = jnp.power(x, y)
    # `y - 1` is rounded, which matters for a large and for a small `y`. So the quotient is
    # better, unless the whole power is out of range.
    is_normal = (jnp.abs(whole) >= jnp.finfo(x.dtype).tiny) & jnp.isfinite(whole)
    lower = jnp.where(is_normal, quotient(whole, x), jnp.power(x, y - 1))
    at_zero = (x == 0) & (y >= 1)
    right = (x > 0) & ~(jnp.isposinf(x) & (y > 1))
    left = (x < 0) & (y == jnp.floor(y))
    return jnp.where(at_zero | right | left, y * lower, 0)


@jax.jit
def _slope_in_base(out, x, y):
    del out
    return y * _slope(x, y - 1)


@jax.jit
def _slope_in_exponent(out, x, y):
    both = _power(x, y - 1) + out * finite_logarithm(x)
    return jnp.where((x > 0) & jnp.isfinite(x), both, 0)


_slope = elementwise(jax.jit(_slope_value), (_slope_in_base, _slope_in_exponent))
