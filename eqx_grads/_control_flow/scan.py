"""`filter_scan`: its arguments, and the choice of its method (`"auto"` included)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._errors import bad_argument, check_flags, check_function, rule_error
from .._jaxprs.current_trace import is_jit_disabled
from .._jaxprs.eager_calls import compile_eager_calls
from .._rules.float_args import as_count, as_integer
from .carry import as_array_if_varying, common_length, is_sliced
from .chunked_scan import near_divisor
from .replay import Replayed
from .replay_choice import log_choice
from .replay_split import cannot_replay
from .scan_backward import (
    AbstractMethod,
    Checkpointed,
    cut_loop,
    Loop,
    Online,
    Plain,
    Truncated,
    with_wide_sums,
)
from .scan_body import ScanBody
from .visible_steps import steps_are_visible


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
    online: bool | str = False,
    carry_gradient: Callable[[PyTree], PyTree] | None = None,
) -> tuple[PyTree, PyTree]:
    r"""Scan over any PyTrees, and choose what is saved for the backward pass.

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
            # Saves 10 carries and the residuals of 10 steps, not the residuals of 100 steps.
            h, _ = eqg.filter_scan(
                lambda h, x: (cell(x, h), None), jnp.zeros(4), xs, checkpoint="sqrt"
            )
            return jnp.sum(h)

        print(gradient(cell).weight_hh.shape)
        ```

        ```text
        (12, 4)
        ```

    **Arguments:**

    - `f`: called as `f(carry, x)`, returns `carry, y`. A function, a bound method or a
        Module; the values that it closes over are differentiated as anywhere else.
    - `init`: the first carry, any PyTree. Arrays, floats and complex numbers vary from step to
        step. All other leaves (activation functions, strings, ...) are static: every step
        returns them unchanged. A Python integer or boolean is static if every step returns
        it unchanged, and an array otherwise.
    - `xs`: any PyTree. Arrays have a leading time axis, and each step gets its slice. Every
        step gets all other leaves unchanged.
    - `length`: the number of steps. Needed only if `xs` has no array.
    - `reverse`: run from the last step to the first.
    - `unroll`: as for `jax.lax.scan`. Seldom worth it: measure.
    - `checkpoint`: what the backward pass saves, and what it recomputes: see the table below.
    - `truncate`: truncate backpropagation to windows of this many steps. No derivative of the
        carry passes from one window to the previous one. The scan saves one carry for each
        window, and recomputes its steps; `checkpoint` says what it saves within a window.
        Steps with side effects, or with collectives over a named axis, are not run again:
        `checkpoint` then applies to the whole scan.
    - `online`: `True` computes the derivative in the order of time, by real-time recurrent
        learning. It is exact, and saves the inputs only. Each element of the next carry may
        depend on the same element of the carry only, as in [`eqx_grads.nn.LRU`][],
        [`eqx_grads.nn.MinGRU`][], [`eqx_grads.nn.LIFCell`][] and other elementwise
        recurrences. `"e-prop"` accepts all steps, and drops the derivative of the carry that
        is not elementwise: an approximation, in reverse mode only. A gradient in `xs` is an
        error. See [Online learning](../guides/memory.md#online-learning).
    - `carry_gradient`: a function of the carry, whose derivative replaces the identity's. It
        acts on the cotangent that leaves each step, and may clip it, for example by
        [`eqx_grads.clip_gradient`][]. The values that it returns are not used.

    **Choices of `checkpoint`:**

    Here $T$ is the number of steps (or `truncate`), $c$ the size of a carry, and $r$ the size
    of the residuals of a step. Residuals are the intermediate values that the derivative needs.

    | value | saved | recomputed | memory | when to use it |
    |---|---|---|---|---|
    | `None` | the residuals of all steps | nothing | $T r$ | where it fits |
    | `k` | every `k`-th carry | all steps, `k` at a time | $T c / k + k r$ | long scans |
    | `"sqrt"` | as `k`, about $\sqrt T$ | as `k` | $\sqrt T (c + r)$ | no tuning |
    | `"replay"` | all carries | all steps, 16 to 64 at once | $T c + 64 r$ | small batches |
    | `"auto"` | as `"replay"` or `None` | | | to try first |

    `"replay"` recomputes steps in parallel, by `jax.vmap` over time, and forms the gradients
    of the weights in a few large matrix products. Some steps can't be replayed: steps with
    side effects, or calls of the host or of `jax.ffi`. The same holds for random bits of a
    generator other than threefry, and for a `while_loop` in a `cond` or in another
    `while_loop`. `"replay"` then raises an error. It also checks the derivative of the step,
    when a derivative is taken.

    `"auto"` is `"replay"` where that is possible, needs less memory than `None`, and is likely
    to be faster. If JAX's default backend is not a CPU, this is always likely. On a CPU, it is
    likely if each weight has a gradient, and the matrix products of a step multiply it with at
    most 20 rows (of the batch). It is not likely in a step with a convolution or a look-up. A
    step with branches or a `jax.checkpoint` is never replayed. The logger `"eqx_grads"`
    reports the choice at the level `DEBUG`, when the scan is traced. It does so again when the
    derivative is traced, if weights without a gradient change the choice.

    $T c / k + k r$ is smallest at $k = \sqrt{T c / r}$, which [`eqx_grads.explain_memory`][]
    finds. The compiled program needs some more memory, so differences of a few percent
    say little.

    Eager calls with the same `f` and arguments of the same types are compiled once. As in
    `jax.lax.scan`, a function is the same if it is the same Python object. What it reads from
    its closure or from global variables keeps the values of the first call. A Module is the
    same if its class and its static parts are equal. Pass changing values in `init` or `xs`.

    **Returns:**

    `carry, ys`: the last carry, and all `y` stacked along a leading axis. Leaves of `y` that
    are not numbers or arrays come back unchanged, once.

    **Derivative:**

    The derivative of the loop written out, for each `checkpoint` and for `online=True`, in both
    modes and to all orders. `truncate`, `online="e-prop"` and `carry_gradient` change it as
    described. With `truncate=k`, all terms of $\partial h_s / \partial h_t$ that cross a
    multiple of `k` steps are zero. For an exception, with rules that are not linear in their
    cotangent, see [Sharp edges](../guides/sharp-edges.md).

    **Raises:**

    [`eqx_grads.RuleError`][], which says why, if

    - a step returns a carry with another structure, shape, dtype or static leaf;
    - `f` does not return a pair, or the arrays in `xs` have different lengths;
    - `carry_gradient` returns another structure, shape or dtype than it was given;
    - `checkpoint` is `"replay"`, and the steps can't be replayed;
    - `online` is given, and the derivative can't be computed online.
    """
    check_function(f, "f", "filter_scan")
    check_flags("filter_scan", reverse=reverse)
    if carry_gradient is not None:
        check_function(carry_gradient, "carry_gradient", "filter_scan")
    unroll = _as_unroll(unroll)
    if length is not None:
        do = "Give a non-negative integer that is known while tracing."
        length = as_count("filter_scan", "length", length, least=0, do=do)
    steps = common_length("`filter_scan`", xs, is_sliced, length)
    if truncate is not None:
        truncate = as_count("filter_scan", "truncate", truncate)
    # In an eager call, numbers that vary are operands, as arrays are.
    init = jax.tree.map(as_array_if_varying, init)
    options = checkpoint, truncate, online
    return _run(f, carry_gradient, init, xs, steps, reverse, unroll, options)


@compile_eager_calls
def _run(f, carry_gradient, init, xs, steps, reverse, unroll, options):
    checkpoint, truncate, online = options
    if truncate is not None and isinstance(steps, int) and truncate >= steps:
        truncate = None  # there is only one window
    method = named_method(checkpoint, steps if truncate is None else truncate)
    method = _online_method(online, checkpoint, truncate) or method
    body = ScanBody(f, xs, carry_gradient)
    init = body.settle(init, xs)
    # A rule gets operands that all vary alike.
    is_call = isinstance(method, Replayed | Online)
    arrays = (body.varying_arrays if is_call else body.cast_arrays)(init, xs)
    method, loop = _choose(method, Loop(body, *arrays, steps, reverse, unroll), truncate)
    return body.outputs(*method.run(loop))


def named_method(checkpoint: int | str | None, steps: Any) -> AbstractMethod:
    """What `checkpoint` asks for, in a scan or a window of so many steps."""
    if checkpoint is None:
        return Plain()
    if isinstance(checkpoint, str) and checkpoint in ("replay", "auto"):
        return Replayed(only_if_better=checkpoint == "auto")
    is_sqrt = isinstance(checkpoint, str) and checkpoint == "sqrt"
    every = as_integer(checkpoint) or 0
    if not is_sqrt and every < 1:
        raise rule_error(
            "`filter_scan` was given a `checkpoint` that it does not know.",
            f"it is {checkpoint!r:.60}",
            do='Give a number of steps, "sqrt", "replay", "auto" or `None`.',
        )
    if not isinstance(steps, int):
        raise rule_error(
            "`filter_scan` can't divide these steps into chunks.",
            f"`checkpoint` is {checkpoint!r}, and the number of steps is symbolic",
            do='Use `checkpoint=None` or "auto".',
        )
    if is_sqrt:
        return Checkpointed(near_divisor(steps, math.sqrt(steps))) if steps > 3 else Plain()
    return Checkpointed(min(every, steps)) if steps > 0 else Plain()


def _online_method(online: Any, checkpoint: Any, truncate: Any) -> Online | None:
    if online is False:
        return None
    if online is not True and not (isinstance(online, str) and online == "e-prop"):
        do = 'Give `True`, "e-prop" or `False`.'
        raise bad_argument("filter_scan", "online", "known", online, do)
    if checkpoint is not None or truncate is not None:
        raise rule_error(
            "An online `filter_scan` saves its inputs only, so there is nothing to choose.",
            f"`checkpoint` is {checkpoint!r:.60}, `truncate` is {truncate!r:.60}",
            do="Leave them out, or leave out `online`.",
        )
    return Online(approximate=online == "e-prop")


def _choose(
    method: AbstractMethod, loop: Loop, window: int | None
) -> tuple[AbstractMethod, Loop]:
    """The method, and the loop that it runs.

    If the method can't run the loop, `"auto"` becomes plain scan, and `"replay"` an error that
    says why. If no step may run again, truncation is part of the body.
    """
    if isinstance(method, Online) and loop.steps != 0:
        reason = loop.why_not_again
        if reason is not None:
            raise rule_error(
                "These steps can't run in an online `filter_scan`.",
                reason,
                do="Use `truncate` or `checkpoint`.",
            )
        # The exact method has the derivative of the steps themselves.
        is_visible = steps_are_visible() and not method.approximate
        return (Plain() if is_visible else method), loop
    cut = loop if window is None else cut_loop(loop, window)
    plain = method if isinstance(method, Checkpointed) else Plain()
    if steps_are_visible():
        # One loop over the steps, and not over chunks of them.
        plain = Plain() if isinstance(plain, Plain) else Checkpointed(1)
        return plain, dataclasses.replace(cut, unroll=1)
    # Without `jit`, JAX's loops are written out, and there is nothing to trace.
    if loop.steps == 0 or is_jit_disabled():
        return plain, cut
    if window is not None and loop.why_not_again is not None:
        window, loop = None, cut
    loop = loop if window is None else with_wide_sums(loop)
    part = loop if window is None else dataclasses.replace(loop, steps=window)
    if isinstance(method, Replayed) and (reason := method.unsupported(part)) is not None:
        if not method.only_if_better:
            raise cannot_replay(reason)
        log_choice(loop.steps, loop.init, f"plain scan, as {reason}")
        method = Plain()
    return (method if window is None else Truncated(window, method)), loop


def _as_unroll(unroll: Any) -> int | bool:
    """The number of steps, or whether to write out the whole loop, for which JAX also has 0."""
    if isinstance(unroll, bool | np.bool_):
        return bool(unroll)
    do = "Give a bool, or an integer of at least zero: zero is the whole loop."
    return as_count("filter_scan", "unroll", unroll, least=0, do=do) or True
