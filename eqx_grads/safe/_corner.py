"""Slopes at a kink or a pole: a number by convention, which has no derivative of its own."""

import jax
import jax.numpy as jnp

from .._rules.custom_jvp import custom_jvp
from .._rules.nan_where import nan_where, NO_SECOND_DERIVATIVE
from ..tangents import add, is_zero


@custom_jvp
def corner(slope, is_corner, *xs, axes=()):
    """`slope`, whose derivative by each of `xs` is NaN where `is_corner`.

    A rule returns a number by convention where its function has no derivative. Without this
    function, autodiff would differentiate that number, and a second derivative would be finite
    and wrong: zero for `norm(x)**2` at zero, instead of two. The elements along `axes` share a
    corner.

    A tangent that is zero makes a NaN too: at zero, `x**2` has the tangent zero, and
    `norm(x**2)` the second derivative two.
    """
    del is_corner, xs, axes
    return slope


@corner.def_jvp(symbolic_zeros=True)
def _corner_jvp(primals, tangents, *, axes):
    slope, is_corner, *xs = primals
    t_slope, _, *t_xs = tangents
    shape = jnp.broadcast_shapes(slope.shape, jnp.shape(is_corner))
    # It has no derivative either, at all orders.
    with jax.named_scope(NO_SECOND_DERIVATIVE):
        factor = nan_where(is_corner, jnp.ones(shape, slope.dtype))
    factor = corner(factor, is_corner, *xs, axes=axes)

    def term(t):
        # Elsewhere, a tangent or a cotangent may be infinite, and zero times that is NaN.
        t = factor * jnp.where(is_corner, t, 0)
        return jnp.broadcast_to(jnp.sum(t, axes, keepdims=True), slope.shape) if axes else t

    terms = [term(t) for t in t_xs if not is_zero(t)]
    return corner(slope, is_corner, *xs, axes=axes), add(t_slope, *terms)
