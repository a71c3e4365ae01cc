"""A scan that saves only its carries; its backward pass recomputes many steps in parallel.

Given the carries, no step depends on the one before it any more. The backward pass computes
the body again for a whole chunk of steps with `jax.vmap`, which makes one large matrix product
of many small ones. Only the cotangent of the carry is computed step by step
(`replay_split.py`).
"""

import dataclasses
import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .._jaxprs.operands import at, fill, flagged
from .._rules.custom_vjp import custom_vjp
from .._rules.rule import try_to_trace
from .._tangent_spaces import as_array_list, sum_dtype
from .chunked_scan import chunk_init, scan_in_chunks, shift_in
from .replay_choice import (
    log_choice,
    replay_chunk,
    why_never_better,
    why_not_better,
    why_not_for_gradients,
    why_not_recomputed,
    why_not_vectorized,
)
from .replay_split import cannot_replay, SplitVjp
from .scan_backward import AbstractMethod, Loop
from .traced_body import TracedBody


@dataclasses.dataclass(frozen=True)
class Replayed(AbstractMethod):
    """Save all carries and nothing else, and recompute many steps at once. If
    `only_if_better`: where this is estimated to be faster, or to need less memory."""

    only_if_better: bool = False

    def unsupported(self, loop: Loop) -> str | None:
        """Why the loop can't be replayed, or is not; `None` if it is."""
        reason = loop.why_not_again
        if reason is not None:
            return reason
        if loop.unroll is True or (loop.unroll is not False and loop.unroll != 1):
            return "`unroll` is given"
        reason = why_not_vectorized(loop.program[0])
        if reason is not None:
            return f"a step {reason}"
        return _why_plain(loop.traced[0], loop.steps) if self.only_if_better else None

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        body, consts, init = loop.traced
        if self.only_if_better:
            choice = f"a replay, of {replay_chunk(body, loop.steps)} steps at once"
            log_choice(loop.steps, body.carry_types, choice)
        how = _Replay(body, loop.reverse, self.only_if_better)
        return replayed_scan(consts, init, loop.xs, loop.step_index, how=how)


class _Replay(NamedTuple):
    body: TracedBody
    reverse: bool
    only_if_better: bool

    def scan(self, step: Any, init: Any, xs: Any, step_index: Any) -> tuple[Any, Any]:
        # The step index is sliced too: without `xs`, it says how many steps there are.
        of_slices = lambda carry, x: step(carry, x[1])
        return jax.lax.scan(of_slices, init, (step_index, xs), reverse=self.reverse)


def _why_not_replayed(vjp: ClosedJaxpr) -> str | None:
    """Why the derivative of a step, with all of its rules, can't be computed for many steps at
    once. The steps themselves don't tell: a rule may draw random bits, or loop."""
    return why_not_recomputed(vjp.effects, mesh_axes=True) or why_not_vectorized(vjp)


def _why_plain(body: TracedBody, steps: int) -> str | None:
    """Why `"auto"` does not replay a scan of a batch of known size."""
    reason = why_never_better(body)
    if reason is not None:
        return reason
    vjp = try_to_trace(body.trace_vjp)
    if vjp is None:  # plain scan raises the error, if somebody differentiates in that input
        return "a step has no reverse derivative in some of its inputs"
    reason = why_not_better(body, vjp, steps)
    if reason is not None:
        return reason
    reason = _why_not_replayed(vjp)
    return None if reason is None else f"a step {reason}"


@custom_vjp
def replayed_scan(
    consts: list[Any], init: list[Any], xs: list[Any], step_index: Any, *, how: _Replay
):
    """The last carry, and all `ys`."""
    return how.scan(ft.partial(how.body, consts), init, xs, step_index)


# `ScanBody.varying_arrays` has cast the operands, and a constant must stay as `body` has it.
replayed_scan._rules.varies_alike = False


@replayed_scan.def_fwd
def _replayed_scan_fwd(consts, init, xs, step_index, *, how, perturbed: tuple[Any, ...]):
    reason = why_not_for_gradients(how.body, perturbed[0]) if how.only_if_better else None
    if reason is not None:
        log_choice(len(step_index), how.body.carry_types, f"plain scan, as {reason}")
        return NotImplemented
    y_of_carry = how.body.y_of_carry()
    values = how.body.with_values_of_rules(*perturbed[:-1])

    def saving_body(carry, x):
        new, y = values(consts, carry, x)
        # A carry that is also an output is saved once, as the output.
        is_y = zip(new, y_of_carry, strict=True)
        return new, (y, [c if j is None else None for c, j in is_y])

    last, (ys, saved) = how.scan(saving_body, init, xs, step_index)
    after = [s if j is None else ys[j] for s, j in zip(saved, y_of_carry, strict=True)]
    return (last, ys), (consts, as_array_list(init), xs, step_index, after)


@replayed_scan.def_bwd(symbolic_zeros=True)
def _replayed_scan_bwd(residuals, cts, *, how, perturbed: tuple[Any, ...]):
    body, reverse = how.body, how.reverse
    consts, init, xs, step_index, after = residuals
    ct_last, ct_ys = cts
    perturbed_consts, _, perturbed_xs, _ = perturbed
    is_there = lambda cts: [ct is not None for ct in cts]
    carried = body.carried(*perturbed[:-1])
    reached = body.with_cotangents(is_there(ct_last), is_there(ct_ys))
    carry_indices = [i for i in body.differentiable() if carried[i] and reached[i]]
    y_indices = flagged(is_there(ct_ys))
    split = SplitVjp(body, carry_indices, y_indices, perturbed_consts, perturbed_xs)
    reason = _why_not_replayed(split.program)
    if reason is not None:
        raise cannot_replay(f"the backward pass of a step {reason}")

    def one_chunk(carry, inputs, before):
        index, x, after, ct_y = inputs
        carries = [shift_in(a, b, reverse=reverse) for a, b in zip(after, before, strict=True)]
        steps = index.shape[0]
        return split.pull_back(carry, consts, carries, x, ct_y, steps, reverse=not reverse)

    last = zip(at(init, carry_indices), at(ct_last, carry_indices), strict=True)
    ct_carry = [jnp.zeros_like(c) if ct is None else ct for c, ct in last]
    const_indices = flagged(perturbed_consts)
    sums = [jnp.zeros_like(c, sum_dtype(c.dtype)) for c in at(consts, const_indices)]
    chunk = replay_chunk(body, step_index.shape[0])
    before = [
        chunk_init(a, c, chunk=chunk, reverse=reverse) for a, c in zip(after, init, strict=True)
    ]
    (ct_carry, sums), ct_xs = scan_in_chunks(
        one_chunk,
        (ct_carry, sums),
        (step_index, xs, after, at(ct_ys, y_indices)),
        before,
        chunk=chunk,
        reverse=not reverse,
        in_place=True,
    )
    return (
        fill([None] * len(consts), const_indices, sums),
        fill([None] * len(init), carry_indices, ct_carry),
        fill([None] * len(xs), flagged(perturbed_xs), ct_xs),
        None,
    )


@replayed_scan.def_vmap
def _replayed_scan_vmap(size, batched, *args, how):
    """`"auto"` decides again for the whole batch."""

    def run(consts, init, xs, step_index, *, body):
        steps = step_index.shape[0]
        reason = _why_plain(body, steps) if how.only_if_better else None
        if reason is None:
            return replayed_scan(consts, init, xs, step_index, how=how._replace(body=body))
        log_choice(steps, body.carry_types, f"plain scan, as {reason}")
        return how.scan(ft.partial(body, consts), init, xs, step_index)

    return how.body.scan_of_batch(run, size, batched, *args)
