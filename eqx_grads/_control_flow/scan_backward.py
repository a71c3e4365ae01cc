"""The loops that run the steps of a scan: plain, or in chunks that are computed again.

JAX traces the step inside `jax.lax.scan`, so that whatever it closes over, named axes,
shardings and effects are handled there.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs.evaluate import MARK
from .._jaxprs.structure import holds
from .chunked_scan import near_divisor, scan_in_chunks
from .progress import ProgressLine
from .replay import replayed_scan
from .scan_body import Step
from .traced_body import close_step
from .truncated import cut_where, truncated_scan


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
        run_chunk = _forgetting(run, loop.steps, chunk)
    elif loop.progress is not None:
        chunk, run_chunk = near_divisor(loop.steps, loop.progress.every), run
    else:
        done = None if loop.truncate is None else _steps_done(loop)
        return step.outputs(*run(step.init, (done, step.xs)))

    def one_chunk(carry, xs, _):
        carry, ys = run_chunk(carry, xs)
        if loop.progress is not None:
            loop.progress.report(xs[0])
        return carry, ys

    xs = (_steps_done(loop), step.xs)
    carry, ys = scan_in_chunks(one_chunk, step.init, xs, chunk=chunk, reverse=loop.reverse)
    return step.outputs(carry, ys)


def _forgetting(run, steps, chunk):
    """Run a chunk, keep nothing that it computes, and compute it again when that is needed."""
    # Within a loop, XLA has no way to undo the recomputation.
    return jax.checkpoint(run, prevent_cse=steps < 2 * chunk)


def run_replayed(step: Step, loop: Loop, always: bool) -> tuple[Any, Any] | None:
    """The same, with a backward pass that replays the steps. `None` if that can't be."""
    closed = _close(step, loop)
    if closed is None:
        return None
    array_step, *args = closed
    if not array_step.can_be_vectorized():
        return None
    if holds(array_step.program, MARK):
        # Whoever put it there will look for it in the program, and the derivative is the same.
        return run_loop(step, loop, None)
    options = {"reverse": loop.reverse, "always": always, "progress": loop.progress}
    return step.outputs(*replayed_scan(array_step, *args, **options))


def run_truncated(step: Step, loop: Loop, keep: int | str | None) -> tuple[Any, Any] | None:
    """The same in windows that keep everything, the carries of chunks of `keep` steps, or
    what "replay" and "auto" do. `None` if that can't be."""
    assert loop.truncate is not None
    closed = _close(step, dataclasses.replace(loop, truncate=None))
    if closed is None:
        return None
    array_step, *args = closed
    if isinstance(keep, str) and not array_step.can_be_vectorized():
        if keep == "replay":
            return None
        keep = None
    if holds(array_step.program, MARK):
        return run_loop(step, loop, None)

    def remember(step, consts, carry, xs):
        if isinstance(keep, str):
            options = {"reverse": loop.reverse, "always": keep == "replay", "progress": None}
            return replayed_scan(step, consts, carry, xs, **options)

        def run(carry, xs):
            body = lambda c, x: step(consts, c, x)
            return jax.lax.scan(body, carry, xs, reverse=loop.reverse, unroll=loop.unroll)

        if keep is None:
            return run(carry, xs)
        run_chunk = _forgetting(run, loop.truncate, keep)
        one_chunk = lambda carry, xs, _: run_chunk(carry, xs)
        return scan_in_chunks(one_chunk, carry, xs, chunk=keep, reverse=loop.reverse)

    options = {"remember": remember, "reverse": loop.reverse, "progress": loop.progress}
    return step.outputs(*truncated_scan(array_step, *args, window=loop.truncate, **options))


def _close(step: Step, loop: Loop):
    """The step as a program, what it closes over, the first carry, and `xs`."""
    body = _body(step, loop)
    done = _steps_done(loop)
    x = jax.eval_shape(lambda: [done[0], *(x[0] for x in step.xs)])
    flat = lambda carry, x: body(carry, (x[0], x[1:]))
    closed = close_step(flat, step.init, x)
    if closed is None or not closed[0].can_be_replayed():
        return None
    return *closed, [done, *step.xs]


def _steps_done(loop: Loop):
    """The number of steps done before each step, in the order in which they run."""
    done = jnp.arange(loop.steps)
    return done[::-1] if loop.reverse else done


def _body(step: Step, loop: Loop):
    def body(carry, x):
        done, x = x
        if loop.truncate is not None:
            cut = (done % loop.truncate == 0) & (done > 0)
            carry = [cut_where(cut, c) for c in carry]
        return step(carry, x)

    return body
