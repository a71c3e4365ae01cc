"""A NaN at some elements, that no eager operation makes at the others."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike


def nan_where(is_nan: ArrayLike, x: Array) -> Array:
    """`x`, and NaN where `is_nan`, with the derivative zero.

    `jnp.where(is_nan, jnp.nan, x)` makes the NaN of a whole array before it selects, and
    `jax.debug_nans` stops there, even if none is selected. Here `sqrt` makes the NaN, at the
    selected elements only.
    """
    return jnp.where(is_nan, lax.sqrt(jnp.where(is_nan, -1, 0).astype(x.dtype)), x)
