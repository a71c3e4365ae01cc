"""JAX's own checks for NaN and infinity, which would stop a diagnosis at what it looks for."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def without_nan_checks() -> Iterator[None]:
    """Without `jax.debug_nans` and `jax.debug_infs`, if they are on."""
    with contextlib.ExitStack() as stack:
        # Only then: what was compiled with another setting is compiled again.
        if jax.config.jax_debug_nans:  # pyright: ignore
            stack.enter_context(jax.debug_nans(False))
        if jax.config.jax_debug_infs:  # pyright: ignore
            stack.enter_context(jax.debug_infs(False))
        yield
