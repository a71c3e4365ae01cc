"""Two-norms of PyTrees, scaled so that squares neither overflow nor underflow."""

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

    `scale` is the largest magnitude of an element (one where all are zero). It is a constant
    to autodiff, which is right, as the product does not depend on it. Both are at least of
    single precision. With `axis`, the norm is taken along it, and the axis is kept. The norm
    is NaN where an element is not finite.
    """
    dtype = promote([jnp.float32, *(jnp.finfo(x.dtype).dtype for x in xs)])
    parts = [part.astype(dtype) for x in xs for part in _real_parts(x)]
    along = {"axis": axis, "keepdims": axis is not None}
    largest = [jnp.max(jnp.abs(part), initial=0.0, **along) for part in parts]
    scale = ft.reduce(jnp.maximum, largest, jnp.zeros((), dtype))
    scale = jax.lax.stop_gradient(jnp.where(scale > 0, scale, 1))
    squares = [jnp.sum((part / scale) ** 2, **along) for part in parts]
    total = sum(squares, jnp.zeros((), dtype))
    # The derivative of the square root at zero is infinite, and 0 * inf in the branch that
    # `where` does not select would be NaN: so never take the root of zero.
    root = jnp.sqrt(jnp.where(total == 0, 1, total))
    return scale, jnp.where(total == 0, 0, root)


def divide(x: Array, scale: Array) -> Array:
    """`x / scale` for a real `scale`, whose precision is at least that of `x`."""
    parts = [part.astype(scale.dtype) / scale for part in _real_parts(x)]
    return jax.lax.complex(*parts) if jnp.iscomplexobj(x) else parts[0]


def norm(xs: Sequence[Array]) -> Array:
    """The norm of all the arrays together."""
    scale, ratio = scaled_norm(xs)
    return scale * ratio


def _real_parts(x):
    return (jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else (x,)
