"""Elementwise functions with slopes, and the factors that slopes are products of.

A slope at a kink or a pole is a number by convention, and has no derivative of its own: that is
`corner`. A tangent is multiplied by one factor at a time, so that a zero stays zero where the
product of the factors overflows. The derivatives of `inverse` and `quotient` are made of their
results, so that they hold at all orders.
"""

import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._rules.custom_jvp import custom_jvp
from .._rules.elementwise import elementwise
from .._rules.nan_where import nan_where
from ..tangents import add, is_zero, neg, scale
from ._arguments import on_arrays


P = ParamSpec("P")


def with_slopes(fn: Callable[..., Any], *slopes: Callable[..., Any]) -> Callable[..., Array]:
    """An elementwise function of arrays. A slope is a function of the result and of the
    arguments. Each of them is compiled."""
    return elementwise(jax.jit(fn), tuple(map(jax.jit, slopes)))


def real_function(
    *slopes: Callable[..., Any],
) -> Callable[[Callable[P, Array]], Callable[P, Array]]:
    """Decorate an elementwise function of real numbers, with its slopes."""

    def decorate(fn: Callable[P, Array]) -> Callable[P, Array]:
        op = with_slopes(fn, *slopes)
        of_arrays: Any = ft.wraps(fn)(lambda *args, **kwargs: op(*args, **kwargs))
        return on_arrays(*inspect.signature(fn).parameters, real=True)(of_arrays)

    return decorate


# ---------------------------------------------------------------- slopes without a derivative


@custom_jvp
def corner(slope, is_corner, *xs, axes=()):
    """`slope`, whose derivative by each of `xs` is NaN where `is_corner`.

    A rule returns a number by convention where its function has no derivative. Without this
    function, autodiff would differentiate that number, and a second derivative would be finite
    and wrong: zero for `norm(x)**2` at zero, instead of two. The elements along `axes` share a
    corner.

    A zero tangent makes a NaN too. At zero, the tangent of `x**2` is zero, but the second
    derivative of `norm(x**2)` is two.
    """
    del is_corner, xs, axes
    return slope


@corner.def_jvp(symbolic_zeros=True)
def _corner_jvp(primals, tangents, *, axes):
    slope, is_corner, *xs = primals
    t_slope, _, *t_xs = tangents
    shape = jnp.broadcast_shapes(slope.shape, jnp.shape(is_corner))
    # It has no derivative either, at all orders.
    factor = nan_where(is_corner, jnp.ones(shape, slope.dtype))
    factor = corner(factor, is_corner, *xs, axes=axes)

    def term(t):
        # Elsewhere, a tangent or a cotangent may be infinite, and zero times that is NaN.
        t = factor * jnp.where(is_corner, t, 0)
        return jnp.broadcast_to(jnp.sum(t, axes, keepdims=True), slope.shape) if axes else t

    terms = [term(t) for t in t_xs if not is_zero(t)]
    return corner(slope, is_corner, *xs, axes=axes), add(t_slope, *terms)


# ---------------------------------------------------------------- factors


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
def quotient(x, y, *, is_finite=True):
    """`x / y`, and zero where `y` is, or where `x` is infinite, unless it may be infinite."""
    return jnp.where(jnp.isinf(x), 0, x / jnp.where(y == 0, jnp.inf, y)) if is_finite else x / y


@quotient.def_jvp(symbolic_zeros=True)
def _quotient_jvp(primals, tangents, *, is_finite):
    x, y = primals
    t_x, t_y = tangents
    out = quotient(x, y, is_finite=is_finite)
    r = corner(inverse(y), y == 0, y)
    ratio = corner(jnp.where((y == 0) | jnp.isinf(x), 0, out), y == 0, x)
    return out, scale(add(t_x, neg(scale(t_y, ratio))), r)


# ---------------------------------------------------------------- smooth steps
# Their slopes keep their digits in the tails, where `1 - tanh(x)**2` and `s * (1 - s)`, as in
# JAX, are zero.


tanh = with_slopes(jnp.tanh, lambda _, x: 4 * _bell(2 * x))
sigmoid = with_slopes(jax.nn.sigmoid, lambda _, x: _bell(x))
_bell = with_slopes(
    lambda x: jax.nn.sigmoid(x) * jax.nn.sigmoid(-x), lambda out, x: -tanh(0.5 * x) * out
)
