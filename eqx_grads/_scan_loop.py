"""The loops that run the steps of a scan: plain, or in chunks that are computed again.

JAX traces the step inside `jax.lax.scan`, so that whatever it closes over, named axes,
shardings and effects are handled there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._chunks import scan_in_chunks
from ._scan_progress import ProgressLine
from ._scan_step import Step
from ._spaces import is_differentiable


@dataclasses.dataclass(frozen=True)
class Loop:
    """How the steps follow each other."""

    steps: int
    reverse: bool
    unroll: int | bool
    truncate: int | None
    progress: ProgressLine | None


def run_loop(step: Step, loop: Loop, chunk: int | None) -> tuple[Any, Any]:
    """The last carry and all outputs of `filter_scan`."""
    done = None
    if chunk is not None or loop.truncate is not None or loop.progress is not None:
        # The number of steps done before each step, in the order in which they run.
        done = jnp.arange(loop.steps)
        done = done[::-1] if loop.reverse else done

    def body(carry, x):
        done, x = x
        if loop.truncate is not None:
            cut = (done % loop.truncate == 0) & (done > 0)
            carry = [_cut(cut, c) for c in carry]
        carry, ys = step(carry, x)
        if loop.progress is not None and chunk is None:
            loop.progress.report(done + 1)
        return carry, ys

    def run(carry, xs):
        length = loop.steps if chunk is None else None
        return jax.lax.scan(body, carry, xs, length, reverse=loop.reverse, unroll=loop.unroll)

    if chunk is None:
        carry, ys = run(step.init, (done, step.xs))
    else:
        carry, ys = _run_in_chunks(run, step.init, (done, step.xs), loop, chunk)
    return step.outputs(carry, ys)


def _cut(cut, carry):
    """No derivative passes where `cut`; also none that is NaN."""
    if not is_differentiable(carry):
        return carry
    return jnp.where(cut, jax.lax.stop_gradient(carry), carry)


def _run_in_chunks(run: Callable[..., Any], carry, xs, loop: Loop, chunk: int):
    # Within a loop, XLA has no way to undo the recomputation.
    remat = jax.checkpoint(run, prevent_cse=loop.steps < 2 * chunk)

    def one_chunk(carry, xs, _):
        carry, ys = remat(carry, xs)
        if loop.progress is not None:
            done, _ = xs
            loop.progress.report(jnp.max(done) + 1, every_time=True)
        return carry, ys, None

    carry, ys, _ = scan_in_chunks(one_chunk, carry, xs, chunk=chunk, reverse=loop.reverse)
    return carry, ys
