"""The loops that run the steps of a scan: plain, or in chunks that are computed again.

JAX traces the step inside `jax.lax.scan`, so that whatever it closes over, named axes,
shardings and effects are handled there.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._array_step import close_step
from ._chunks import near_divisor, scan_in_chunks
from ._jaxprs import holds, MARK
from ._scan_progress import ProgressLine
from ._scan_replay import replayed_scan
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
    body = _body(step, loop)

    def run(carry, xs):
        length = None if jax.tree.leaves(xs) else loop.steps
        return jax.lax.scan(body, carry, xs, length, reverse=loop.reverse, unroll=loop.unroll)

    if chunk is not None:
        # Within a loop, XLA has no way to undo the recomputation.
        run_chunk = jax.checkpoint(run, prevent_cse=loop.steps < 2 * chunk)
    elif loop.progress is not None:
        chunk, run_chunk = near_divisor(loop.steps, loop.progress.every), run
    else:
        done = None if loop.truncate is None else _steps_done(loop)
        return step.outputs(*run(step.init, (done, step.xs)))

    def one_chunk(carry, xs, _):
        carry, ys = run_chunk(carry, xs)
        if loop.progress is not None:
            loop.progress.report(xs[0])
        return carry, ys, None

    xs = (_steps_done(loop), step.xs)
    carry, ys, _ = scan_in_chunks(one_chunk, step.init, xs, chunk=chunk, reverse=loop.reverse)
    return step.outputs(carry, ys)


def run_replayed(step: Step, loop: Loop, always: bool) -> tuple[Any, Any] | None:
    """The same, with a backward pass that replays the steps. `None` if that can't be."""
    body = _body(step, loop)
    done = _steps_done(loop)
    x = jax.eval_shape(lambda: [done[0], *(x[0] for x in step.xs)])
    flat = lambda carry, x: body(carry, (x[0], x[1:]))
    array_step, consts, init = close_step(flat, step.init, x)
    if not array_step.can_be_replayed():
        return None
    if holds(array_step.program, MARK):
        # Whoever put it there will look for it in the program, and the derivative is the same.
        return run_loop(step, loop, None)
    carry, ys = replayed_scan(
        array_step,
        consts,
        init,
        [done, *step.xs],
        reverse=loop.reverse,
        always=always,
        progress=loop.progress,
    )
    return step.outputs(carry, ys)


def _steps_done(loop: Loop):
    """The number of steps done before each step, in the order in which they run."""
    done = jnp.arange(loop.steps)
    return done[::-1] if loop.reverse else done


def _body(step: Step, loop: Loop):
    def body(carry, x):
        done, x = x
        if loop.truncate is not None:
            cut = (done % loop.truncate == 0) & (done > 0)
            carry = [_cut(cut, c) for c in carry]
        return step(carry, x)

    return body


def _cut(cut, carry):
    """No derivative passes where `cut`; also none that is NaN."""
    if not is_differentiable(carry):
        return carry
    return jnp.where(cut, jax.lax.stop_gradient(carry), carry)
