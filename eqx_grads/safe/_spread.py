"""Eigenvalues that are too close together to divide by their difference, moved apart."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import rule_error


def default_tolerance(a):
    """The distance at which the largest shift, of `n` equal eigenvalues, is as large as the
    rounding error of a difference of two of them, divided by the distance."""
    return (float(jnp.finfo(a.dtype).eps) / max(*a.shape[-2:], 1)) ** 0.5


def as_tolerance(name, tolerance):
    """The tolerance that the caller of `name` gave."""
    is_number = isinstance(tolerance, int | float | np.integer | np.floating)
    is_number = is_number and not isinstance(tolerance, bool)
    if is_number and 0 <= tolerance < math.inf:
        return float(tolerance)
    raise rule_error(
        f"`safe.{name}` was given a `tolerance` that is not a finite number from zero.",
        f"it is {tolerance!r:.60}",
        do="Give a number such as `1e-5`, or `None`.",
    )


def spread(w, tolerance, rounding):
    r"""Ascending eigenvalues, the closest ones moved up, until all differ enough.

    Neighbors have to differ by `tolerance` times the larger magnitude of the two. If they
    differ by less than the error of the solver, `rounding` times the norm, they have to differ
    by `tolerance` times the norm. The eigenvalues move up and never down, so that a matrix that
    is positive remains positive. To autodiff, the shift is a constant.
    """
    w_ = lax.stop_gradient(w)
    size = jnp.abs(w_)
    norm = jnp.max(size, -1, keepdims=True, initial=0.0)
    norm = jnp.where(norm == 0, 1, norm)
    larger = jnp.maximum(size[..., 1:], size[..., :-1])
    needed = tolerance * jnp.where(jnp.diff(w_) > rounding * norm, larger, norm)
    needed = jnp.concatenate([jnp.zeros_like(w_[..., :1]), jnp.cumsum(needed, -1)], -1)
    rest = w_ - needed
    return w + (lax.cummax(rest, axis=w.ndim - 1) - rest)


def matmul(*factors):
    """The product in full precision, also on accelerators."""
    product, *others = factors
    for x in others:
        product = jnp.matmul(product, x, precision=lax.Precision.HIGHEST)
    return product


def adjoint(x):
    return jnp.conj(jnp.swapaxes(x, -1, -2))
