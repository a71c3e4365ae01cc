"""The norm of a gradient, of which no square over- or underflows."""

import functools as ft
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._tangent_spaces import promote


def scaled_norm(
    xs: Sequence[Array], axis: int | tuple[int, ...] | None = None
) -> tuple[Array, Array]:
    """`scale, ratio`, whose product is the norm of all the arrays together.

    `scale` is their largest magnitude (one where all are zero), and a constant to autodiff:
    rightly, as no product or quotient of both depends on it. Both are at least of single
    precision. With `axis`, the norm is taken along it, and the axis kept. The norm of what
    is not finite is NaN.
    """
    dtype = promote([jnp.float32, *(jnp.finfo(x.dtype).dtype for x in xs)])
    parts = [part.astype(dtype) for x in xs for part in _real_parts(x)]
    along = {"axis": axis, "keepdims": axis is not None}
    largest = [jnp.max(jnp.abs(part), initial=0.0, **along) for part in parts]
    scale = ft.reduce(jnp.maximum, largest, jnp.zeros((), dtype))
    scale = jax.lax.stop_gradient(jnp.where(scale > 0, scale, 1))
    squares = [jnp.sum((part / scale) ** 2, **along) for part in parts]
    total = sum(squares, jnp.zeros((), dtype))
    # The slope of the square root is infinite at zero, also where nobody asks for it.
    root = jnp.sqrt(jnp.where(total == 0, 1, total))
    return scale, jnp.where(total == 0, 0, root)


def divide(x: Array, scale: Array) -> Array:
    """`x / scale` at the precision of the more precise one; `scale` is real."""
    dtype = promote([jnp.finfo(x.dtype).dtype, scale])
    parts = [part.astype(dtype) / scale.astype(dtype) for part in _real_parts(x)]
    return jax.lax.complex(*parts) if jnp.iscomplexobj(x) else parts[0]


def norm(xs: Sequence[Array]) -> Array:
    """The norm of all the arrays together."""
    scale, ratio = scaled_norm(xs)
    return scale * ratio


def _real_parts(x):
    return (jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else (x,)
