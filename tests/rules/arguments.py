"""Arguments for sample rules."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np


def sample(*shape: int, low: float = -1.5, high: float = 1.5, seed: int = 0) -> jax.Array:
    """Numbers spread evenly over an interval, in no order: the same in every run."""
    steps = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    return jnp.asarray(low + (high - low) * ((0.6180339887 * steps + 0.37 * seed) % 1))


def two(n: int) -> tuple[jax.Array, jax.Array]:
    return sample(n), sample(n, seed=1)


def matrix_and_vector(n: int) -> tuple[jax.Array, jax.Array]:
    return sample(n, n), sample(n, seed=1)


def complex_sample(*shape: int) -> jax.Array:
    return jax.lax.complex(sample(*shape), sample(*shape, seed=1))


def normals(key, dtype, *shapes):
    keys = jr.split(key, len(shapes))
    return tuple(jr.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))


def away_from_zero(key, dtype, *shape):
    """Between 0.3 and 1.5, of either sign."""
    size_key, sign_key = jr.split(key)
    return jr.uniform(size_key, shape, dtype, 0.3, 1.5) * jr.rademacher(sign_key, shape, dtype)


def well_apart(key, dtype, n):
    """No two near each other, in any order."""
    return jr.permutation(key, jnp.linspace(-1.0, 1.3, n).astype(dtype))
