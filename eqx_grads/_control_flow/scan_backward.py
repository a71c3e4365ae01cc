"""How the backward pass of a scan gets its residuals: saved, or recomputed.

A method is a frozen class. `Replayed` is in `replay.py`, and all others are here.
"""

import abc
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .._jaxprs.dependence import consts_as_inputs
from .._jaxprs.symbolic_sizes import as_length, is_symbolic
from .._tangent_spaces import as_array_list, is_differentiable, sum_dtype
from .chunked_scan import scan_in_chunks
from .replay_choice import why_not_recomputed
from .traced_body import trace_body, TracedBody


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan of lists of arrays, for which a method is chosen. `body(carry, x)` returns
    `carry, y`."""

    body: Callable[[Any, Any], tuple[list[Any], list[Any]]]
    init: list[Any]
    xs: list[Any]
    steps: Any  # an integer, or symbolic
    reverse: bool
    unroll: int | bool

    @property
    def step_index(self) -> jax.Array:
        """The index of each step in the order in which they run."""
        index = jnp.arange(self.steps)
        return index[::-1] if self.reverse else index

    def run(self) -> tuple[list[Any], list[Any]]:
        """By `jax.lax.scan`."""
        steps, options = as_length(self.steps), {"reverse": self.reverse, "unroll": self.unroll}
        return jax.lax.scan(self.body, self.init, self.xs, steps, **options)

    @ft.cached_property
    def program(self) -> tuple[ClosedJaxpr, list[Any]]:
        """The jaxpr of the body, and the first carry in the dtypes that it has there."""
        x_types = jax.eval_shape(lambda: [x[0] for x in self.xs])
        return trace_body(self.body, self.init, x_types)

    @property
    def why_not_again(self) -> str | None:
        """Why its steps can't be run again, in parts; `None` if they can."""
        if is_symbolic(self.steps):
            return "the number of steps is symbolic"
        reason = why_not_recomputed(self.program[0].effects)
        return None if reason is None else f"a step {reason}"

    @ft.cached_property
    def traced(self) -> tuple[TracedBody, list[Any], list[Any]]:
        """The traced body, what it closes over, and the first carry."""
        program, init = self.program
        consts = as_array_list(program.consts)
        body = TracedBody(consts_as_inputs(program), len(consts), len(init))
        return body, consts, init


class AbstractMethod(abc.ABC):
    """How a scan prepares its backward pass: what it saves, and what it computes again."""

    @abc.abstractmethod
    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        """The last carry, and all `ys`."""


@dataclasses.dataclass(frozen=True)
class Plain(AbstractMethod):
    """Save what the derivative of each step needs: `jax.lax.scan`.

    JAX traces the body, so that all that it closes over, named axes, shardings and effects are
    handled there.
    """

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        return loop.run()


@dataclasses.dataclass(frozen=True)
class Checkpointed(AbstractMethod):
    """Save the carry of each `every`-th step, and recompute so many steps at a time.

    - `inner`: the method of these steps.
    - `cut`: no derivative passes through the carry that leaves them.
    """

    every: int
    inner: AbstractMethod = Plain()
    cut: bool = False

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        # Within a loop, XLA can't undo the recomputation by common subexpression elimination.
        prevent_cse = loop.steps < 2 * self.every
        is_unrolled = loop.unroll is True or loop.unroll > 1

        def again(run, *args):
            carry, ys = jax.checkpoint(run, prevent_cse=prevent_cse)(*args)
            with jax.named_scope(TRUNCATION if self.cut else ""):
                return (jax.lax.stop_gradient(carry) if self.cut else carry), ys

        if self.every == 1 and not is_unrolled:
            # Chunks of one step have an axis of length one, for which XLA copies all of `xs`.
            return dataclasses.replace(loop, body=ft.partial(again, loop.body)).run()

        # Not `static_argnums`, with which JAX keeps the tracers that the body closes over.
        def run(steps, carry, xs):
            return self.inner.run(dataclasses.replace(loop, init=carry, xs=xs, steps=steps))

        def one_chunk(carry, inputs, _):
            xs, others = inputs
            return again(ft.partial(run, (xs or others)[0].shape[0]), carry, xs)

        # The index says how many steps there are, even without `xs`.
        inputs = loop.xs, [] if loop.xs else [loop.step_index]
        options = {"chunk": self.every, "reverse": loop.reverse}
        return scan_in_chunks(one_chunk, loop.init, inputs, **options)


@dataclasses.dataclass(frozen=True)
class Online(AbstractMethod):
    """Save the inputs only, and compute the derivatives of the carry forward in time.

    - `approximate`: e-prop, which drops all but the diagonal of the derivative of the carry.
    """

    approximate: bool

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        from .._online.online_scan import online_scan, OnlineOptions  # only if asked for

        body, consts, init = loop.traced
        names: Any = loop.body.names_for_errors()  # pyright: ignore[reportFunctionMemberAccess]
        given: Any = (self.approximate, *names, loop.reverse, loop.unroll)
        options = OnlineOptions(*given)
        return online_scan(consts, init, loop.xs, loop.step_index, body=body, options=options)


@dataclasses.dataclass(frozen=True)
class Truncated(AbstractMethod):
    """Cut the derivative of the carry after each window, and save the carry there. `inner` is
    the method of the steps of a window."""

    window: int
    inner: AbstractMethod

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        """The last window, whose carry is not cut, is apart from the loop over all others. So
        this loop needs no cotangent of a carry."""
        n = (loop.steps - 1) // self.window * self.window
        border, order = (loop.steps - n, -1) if loop.reverse else (n, 1)
        first, last = [slice(border), slice(border, None)][::order]
        part = lambda of, **changes: dataclasses.replace(
            loop, xs=[x[of] for x in loop.xs], **changes
        )
        in_windows = Checkpointed(self.window, self.inner, cut=True)
        carry, ys = in_windows.run(part(first, steps=n))
        last_window = part(last, steps=loop.steps - n, init=carry)
        carry, last_ys = Checkpointed(last_window.steps, self.inner).run(last_window)
        parts = [ys, last_ys][::order]
        return carry, list(map(jnp.concatenate, zip(*parts, strict=True)))


TRUNCATION = "eqg_truncate"  # in the name stack of what cuts the derivative


def cut_loop(loop: Loop, window: int) -> Loop:
    """The loop, with a body that cuts the derivative of its carry at the start of each window,
    for steps that can't run again. The index of the step is the first of its `xs`."""

    def body(carry, x):
        index, *x = x
        cut = (index % window == 0) & (index > 0)
        return loop.body([_cut_where(cut, c) for c in carry], x)

    return dataclasses.replace(loop, body=body, xs=[loop.step_index, *loop.xs])


def with_wide_sums(loop: Loop) -> Loop:
    """The loop, where the cotangents of all that it closes over are summed in single precision,
    also those of half precision."""
    step, consts, init = loop.traced
    wide = [c.astype(sum_dtype(c.dtype)) if is_differentiable(c) else c for c in consts]
    if all(w.dtype == c.dtype for w, c in zip(wide, consts, strict=True)):
        return loop
    dtypes = [c.dtype for c in consts]
    narrow = lambda: [w.astype(d) for w, d in zip(wide, dtypes, strict=True)]
    return dataclasses.replace(loop, body=lambda *args: step(narrow(), *args), init=init)


def _cut_where(cut, carry):
    """No derivative passes where `cut`; also none that is NaN."""
    if not is_differentiable(carry):
        return carry
    with jax.named_scope(TRUNCATION):
        return jnp.where(cut, jax.lax.stop_gradient(carry), carry)
