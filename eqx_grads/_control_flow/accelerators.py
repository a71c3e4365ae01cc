"""What a CPU and an accelerator want: the one place that decides by platform.

On a CPU, the intermediate values of a few steps stay in the cache. On a GPU, a step costs 10 to
15 microseconds whatever its size, so that few and wide steps win (`docs/benchmarks.md`).

The platform is JAX's default backend while a program is traced.
"""

import jax

from .chunked_scan import near_divisor, Size


_BYTES_OF_A_CHUNK = 2**26


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def kept_of_cells() -> str:
    """What the backward pass of a gated cell keeps. On an accelerator, to recompute the gates of
    a chunk at once is faster than to read them."""
    return "gates" if on_cpu() else "states"


def steps_of_chunk(steps: Size, bytes_of_step: int, of_cpu: Size) -> Size:
    """The number of steps of a chunk: `of_cpu` on a CPU, and on an accelerator as many as have
    64 MB of intermediate values. Each loop inside of a loop costs several launches there."""
    if on_cpu():
        return of_cpu
    return near_divisor(steps, max(1, _BYTES_OF_A_CHUNK / max(bytes_of_step, 1)))
