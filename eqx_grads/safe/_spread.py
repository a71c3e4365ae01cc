"""Eigenvalues that are too close together to divide by their difference, moved apart."""

import jax.numpy as jnp
from jax import lax


def spread(w, tolerance, size):
    r"""Ascending eigenvalues, the closest ones moved up, until all differ enough.

    Neighbors have to differ by `tolerance` times the larger magnitude of the two. If they differ
    by less than the rounding error of the solver, which is `size` times that of the norm, what
    is known of them is relative to the norm: then they have to differ by `tolerance` times the
    norm. The eigenvalues move up and never down, so that a matrix that is positive remains
    positive. To autodiff, the shift is a constant.
    """
    dtype = w.dtype
    tolerance = jnp.finfo(dtype).eps ** 0.5 if tolerance is None else tolerance
    size_of_w = jnp.abs(lax.stop_gradient(w))
    norm = jnp.max(size_of_w, -1, keepdims=True, initial=0.0)
    norm = jnp.where(norm == 0, 1, norm)
    larger = jnp.maximum(size_of_w[..., 1:], size_of_w[..., :-1])
    gap = jnp.diff(lax.stop_gradient(w))
    rounding = size * float(jnp.finfo(dtype).eps) * norm
    needed = float(tolerance) * jnp.where(gap > rounding, larger, norm)
    needed = jnp.concatenate([jnp.zeros_like(w[..., :1]), jnp.cumsum(needed, -1)], -1)
    rest = lax.stop_gradient(w) - needed
    return w + (lax.cummax(rest, axis=w.ndim - 1) - rest)


def reciprocal(x):
    """`1 / x`, and zero for zero."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))


def matmul(*factors):
    """The product in full precision, also on accelerators."""
    product, *others = factors
    for x in others:
        product = jnp.matmul(product, x, precision=lax.Precision.HIGHEST)
    return product


def adjoint(x):
    return jnp.conj(jnp.swapaxes(x, -1, -2))
