"""Choices for a CPU and an accelerator: the one place that decides by platform.

On a CPU, the intermediate values of a few steps stay in the cache. On a GPU, a step costs 10 to
15 microseconds whatever its size, so few and wide steps win (`docs/benchmarks.md`).

The platform is JAX's default backend while a program is traced.
"""

import jax

from .chunked_scan import near_divisor, Size


_BYTES_OF_A_CHUNK = 2**26


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def kept_of_cells() -> str:
    """Whether the backward pass of a gated cell keeps gates or states. On an accelerator,
    reading the gates takes longer than recomputing the gates of a chunk at once."""
    return "gates" if on_cpu() else "states"


def steps_of_chunk(steps: Size, bytes_of_step: int, of_cpu: Size) -> Size:
    """The number of steps of a chunk: `of_cpu` on a CPU. On an accelerator, where a loop within
    a loop costs several launches, as many as have 64 MB of intermediate values."""
    if on_cpu():
        return of_cpu
    return near_divisor(steps, max(1, _BYTES_OF_A_CHUNK / max(bytes_of_step, 1)))


STEPS_UNROLLED = 16  # of a linear recurrence in chunks; 8 and 32 were slower


def recurrence_method() -> str:
    """How a linear recurrence runs."""
    return "scan" if on_cpu() else "associative"


def steps_of_delta_rule() -> int:
    """How many steps of a delta rule are one matrix product. 16 and 64 are slower on a CPU."""
    return 32 if on_cpu() else 64


def logits_of_chunk() -> int:
    """How many logits of `linear_cross_entropy` exist at a time, at least."""
    return 2**20 if on_cpu() else 2**25
