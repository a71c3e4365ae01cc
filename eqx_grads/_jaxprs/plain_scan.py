"""`jax.lax.scan` and `jax.lax.fori_loop`, as they are without JAX's switch `jax_scan3`.

With that switch, which is off by default, JAX 0.10 to 0.12 runs a scan with `reverse=True`
forward, without an error, and a scan has neither a reverse mode nor a batching rule
(https://github.com/jax-ml/jax/blob/main/jax/_src/lax/control_flow/loops.py, `Scan3`).
Delete this file when the oldest JAX has finished that switch, or does not have it.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .symbolic_sizes import is_symbolic


def lax_scan(f: Callable, init: Any, xs: Any = None, length: Any = None, **options: Any) -> Any:
    if length is not None and is_symbolic(length):
        # JAX takes a symbolic length from the arrays in `xs` only.
        xs, length = (xs, jnp.zeros((length, 0))), None
        f = _without_count(f)
    with plain_scans():
        return jax.lax.scan(f, init, xs, length, **options)


def _without_count(f):
    return lambda carry, xs_and_count: f(carry, xs_and_count[0])


def lax_fori_loop(lower: Any, upper: Any, body: Callable, init: Any) -> Any:
    with plain_scans():
        return jax.lax.fori_loop(lower, upper, body, init)


@contextlib.contextmanager
def plain_scans() -> Iterator[None]:
    """Trace the scans in this context, also those of the user's code, without the switch
    `jax_scan3`. If it is on, a warning says so."""
    if not getattr(jax.config, "jax_scan3", False):
        yield
        return
    # `jax.config.update` would change it in all threads. No public name changes it in one.
    switch: Callable[[bool], Any] | None = getattr(jax.config, "_value_holders", {}).get(
        "jax_scan3"
    )
    if switch is None:
        raise NotImplementedError(
            "A loop of `eqx_grads` can't run with JAX's switch `jax_scan3`.\n"
            "  JAX has not finished it, and this JAX can't leave it out of one loop\n"
            'Switch it off: `jax.config.update("jax_scan3", False)`.'
        )
    warnings.warn(_IS_IGNORED, stacklevel=1)
    with switch(False):
        yield


_IS_IGNORED = (
    "JAX's switch `jax_scan3` is on, and `eqx_grads` runs its loops without it: JAX has not "
    "finished it, and runs a scan with `reverse=True` forward."
)
