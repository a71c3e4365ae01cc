"""`filter_scan`: a scan over anything, with a chosen backward pass."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from .._errors import rule_error
from .carry import BecomesArray
from .chunk_length import chunk_length
from .progress import progress_line
from .scan_backward import Loop, run_loop, run_replayed, run_truncated
from .scan_body import Step
from .scan_lengths import common_length


def filter_scan(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    checkpoint: int | str | None = None,
    truncate: int | None = None,
    carry_gradient: Callable[[PyTree], PyTree] | None = None,
    progress: bool = False,
) -> tuple[PyTree, PyTree]:
    r"""`jax.lax.scan` for any PyTrees, with a choice of how its backward pass remembers.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        cell = eqx.nn.GRUCell(3, 4, key=jax.random.key(0))
        xs = jnp.ones((100, 3))

        @eqx.filter_grad
        def gradient(cell):
            # Keeps 10 states and the insides of 10 steps, not the insides of 100 steps.
            h, _ = eqg.filter_scan(
                lambda h, x: (cell(x, h), None), jnp.zeros(4), xs, checkpoint="sqrt"
            )
            return jnp.sum(h)

        assert gradient(cell).weight_hh.shape == (12, 4)
        ```

    **Arguments:**

    - `f`: called as `f(carry, x)`, returns `carry, y`. A function, a bound method or a
        Module; whatever it closes over is differentiated like anywhere else.
    - `init`: the first carry, any PyTree. Arrays, floats and complex numbers vary from step to
        step. All other leaves (activation functions, strings, ...) are static: every step
        has to hand them on as they are. A Python integer or boolean is static as long as the
        steps do so, and an array if they don't.
    - `xs`: any PyTree. Arrays have a leading time axis, and each step gets its slice; all
        other leaves are handed to every step as they are.
    - `length`: the number of steps. Needed only if there is no array in `xs`.
    - `reverse`: run from the last step to the first.
    - `unroll`: as for `jax.lax.scan`. Seldom worth it: measure.
    - `checkpoint`: what is kept for the backward pass. By default, everything that the steps
        computed and their derivative needs. With `checkpoint=k`, only the carry of every
        `k`-th step; `k` steps at a time are then computed again. `"sqrt"` is about the square
        root of the number of steps, and so keeps the least. With `"replay"`, all carries
        and nothing else: as these are known, the backward pass computes many steps at once,
        side by side, and forms the gradients of the weights in few large matrix products.
        `"auto"` does that where it is estimated to be faster than the default.
    - `truncate`: backpropagation truncated to windows of so many steps: the derivative
        of a carry does not pass from one window to the one before. The backward pass then
        runs the windows once more, in the order in which they ran, and so keeps nothing of
        the forward pass: `checkpoint` says what is kept within a window. (Not so where the
        steps have side effects: these happen once.)
    - `carry_gradient`: a function of the carry that returns it unchanged, but has another
        derivative: it is applied to the carry that enters each step, and so acts on the
        cotangent that leaves it. For one, it may clip.
    - `progress`: show a line with the rate and the remaining time of the forward pass. Silent
        where the standard error is not a terminal, and where there is no forward pass as its
        value is not asked for.

    **Returns:**

    `carry, ys`: the last carry, and all `y` stacked along a leading axis. Leaves of `y` that
    are not numbers or arrays come back as they are, once.

    **Derivative:**

    That of the loop written out, by `jax.lax.scan`, whatever `checkpoint` is; `truncate` and
    `carry_gradient` change it as they say. With `truncate=k` all terms of
    $\partial h_s / \partial h_t$ that cross a multiple of `k` steps are zero. Both modes, all
    orders. For one exception, with rules that are not linear in their cotangent, see "Sharp
    edges".

    **Raises:**

    [`eqx_grads.RuleError`][] if the carry that a step returns differs from the one it was
    given in structure, shapes, dtypes or static leaves, if `xs` have different lengths, if
    `f` does not return a pair, or if steps that can't be replayed are asked to be.
    """
    steps = common_length(xs, length)
    _check_positive("truncate", truncate)
    if truncate is not None and truncate >= steps:
        truncate = None  # there is but one window
    loop = Loop(steps, reverse, unroll, truncate, progress_line(steps) if progress else None)
    arrays: frozenset[int] = frozenset()
    while True:
        try:
            return _run(Step(f, init, xs, carry_gradient, arrays), loop, checkpoint)
        except BecomesArray as numbers:
            arrays |= numbers.places


def _run(step, loop, checkpoint):
    always = isinstance(checkpoint, str) and checkpoint == "replay"
    replay = always or (isinstance(checkpoint, str) and checkpoint == "auto")
    chunk = None if replay else chunk_length(loop.truncate or loop.steps, checkpoint)
    # Without `jit`, JAX's loops are written out, and there is nothing to trace.
    is_traced = loop.steps > 0 and not jax.config.values["jax_disable_jit"]
    out = None
    is_rolled = loop.unroll is False or (loop.unroll == 1 and loop.unroll is not True)
    if is_traced and (is_rolled or not replay):
        if loop.truncate is not None:
            out = run_truncated(step, loop, checkpoint if replay else chunk)
        elif replay:
            out = run_replayed(step, loop, always)
    if out is not None:
        return out
    if is_traced and always:
        raise rule_error(
            "`filter_scan` can't replay these steps.",
            "they have side effects, going forward or backward, talk to the host, know a named "
            "axis, hold something that can't be differentiated, draw random bits with a key "
            "that is not of threefry, or have a `while_loop` in a branch of a `cond`"
            if is_rolled
            else "`unroll` is given",
            do='Use `checkpoint="sqrt"`, a number of steps, or "auto".',
        )
    return run_loop(step, loop, chunk)


def _check_positive(name, value):
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1
    ):
        raise rule_error(
            f"`filter_scan` was given a `{name}` that is not a number of steps.",
            f"it is {value!r:.60}",
            do="Give a positive integer, or `None`.",
        )
