"""A `scan` of a traced loss, run as `filter_scan(..., checkpoint=...)` would run it."""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._control_flow.replay import Replayed
from ..._control_flow.scan import named_method
from ..._control_flow.scan_backward import Checkpointed, Loop
from ..._jaxprs.evaluate import evaluate
from ..._jaxprs.structure import Scan, structure


def run_loop(
    scan: Scan, values: Sequence[Any], checkpoint: int | str | None, vmap_is_outside: bool
) -> list[Any]:
    """The outputs of a scan.

    - `vmap_is_outside`: whether to run it as `jax.vmap` of the `filter_scan` of one example.
        Without, it is a `filter_scan` whose steps take the whole batch.
    """
    loop = _as_loop(scan, values)
    method = named_method(checkpoint, scan.length)
    if vmap_is_outside and isinstance(method, Checkpointed):
        outputs = scan.programs[0].out_avals[scan.n_carry :]
        carry, ys = _run_under_vmap(loop, outputs, method.every)
    else:
        carry, ys = method.run(loop)
    return [*carry, *ys]


def may_replay(eqn: Any) -> bool:
    """Whether the steps of a scan can be replayed, and its operations are none for which that
    was measured to be slower."""
    scan = structure(eqn)
    reasons: list[str | None] = []

    def look(values):
        reasons.append(Replayed(only_if_better=True).unsupported(_as_loop(scan, values)))

    jax.eval_shape(look, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars])
    return reasons == [None]


def _as_loop(scan: Any, values: Sequence[Any]) -> Loop:
    (program,) = scan.programs
    consts, rest = values[: scan.n_consts], values[scan.n_consts :]

    def body(carry, xs):
        outs = evaluate(program, [*consts, *carry, *xs])
        return _with_strong_types(outs[: scan.n_carry]), outs[scan.n_carry :]

    init = _with_strong_types(list(rest[: scan.n_carry]))
    xs = list(rest[scan.n_carry :])
    return Loop(body, init, xs, scan.length, scan.reverse, scan.unroll)


def _run_under_vmap(
    loop: Loop, outputs: Sequence[Any], every: int
) -> tuple[list[Any], list[Any]]:
    """What `jax.vmap` makes of a `filter_scan` in chunks.

    In a traced scan, the time axis is first and that of the batch second. But a `vmap` of the
    reshape into chunks puts the batch before the steps of a chunk. So JAX transposes all `xs`
    and `ys` once, and each chunk back.

    - `outputs`: the types of `ys` at one step.
    """
    n, remainder = divmod(loop.steps, every)
    sizes = {jnp.shape(x)[0] for x in loop.init if jnp.ndim(x)}  # or a Python number
    has_batch = lambda x: x.ndim > 0 and x.shape[0] in sizes
    of_xs, of_ys = [has_batch(x[0]) for x in loop.xs], [has_batch(y) for y in outputs]

    def of_examples(fn, arrays, flags):
        fns = (jax.vmap(fn, 1, 1) if flag else fn for flag in flags)
        return [fn(x) for fn, x in zip(fns, arrays, strict=True)]

    def swap(arrays, flags):
        pairs = zip(arrays, flags, strict=True)
        return [jnp.swapaxes(x, 0, 1) if flag else x for x, flag in pairs]

    def split(x):
        return x[: n * every].reshape(n, every, *x.shape[1:])

    def join(y):
        return y.reshape(n * every, *y.shape[2:])

    def chunk(carry, xs, steps, swap):
        def run(carry, xs):
            carry, ys = loop.scan(carry, swap(xs, of_xs), steps)
            return carry, swap(ys, of_ys)

        # What is transposed back is not kept.
        return jax.checkpoint(run, prevent_cse=n < 2)(carry, xs)

    def full(carry):
        xs = of_examples(split, loop.xs, of_xs)
        one = ft.partial(chunk, steps=every, swap=swap)
        carry, ys = jax.lax.scan(one, carry, xs, n, reverse=loop.reverse)
        return carry, of_examples(join, ys, of_ys)

    if remainder == 0:
        return full(loop.init)
    rest = [x[n * every :] for x in loop.xs]
    last = ft.partial(chunk, xs=rest, steps=remainder, swap=lambda arrays, _: arrays)
    first, second = (last, full) if loop.reverse else (full, last)
    carry, ys = first(loop.init)
    carry, more = second(carry)
    pairs = zip(more, ys, strict=True) if loop.reverse else zip(ys, more, strict=True)
    return carry, [jnp.concatenate(pair) for pair in pairs]


def _with_strong_types(carry: list[Any]) -> list[Any]:
    """A carry that is a Python number before the first step is not weakly typed after it."""
    return [x.astype(x.dtype) if getattr(x, "weak_type", False) else x for x in carry]
