"""JAX's own checks for NaN and infinity, which would stop a diagnosis at what it looks for."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def without_nan_checks() -> Iterator[None]:
    """Without `jax.debug_nans` and `jax.debug_infs`."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield
