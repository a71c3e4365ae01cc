"""How the backward pass of a scan gets its residuals: saved, or recomputed.

A method is a frozen class: `unsupported` says what it can't do, and `run` does the rest.
`Replayed` is in `replay.py`, and all others are here.
"""

import abc
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .._jaxprs.symbolic_sizes import is_symbolic
from .._tangent_spaces import is_differentiable, sum_dtype
from .chunked_scan import scan_in_chunks
from .traced_body import close_body, trace_body, TracedBody
from .vectorize import why_not_recomputed


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan of lists of arrays, for which a method is chosen.

    - `body(carry, x)` returns `carry, y`. If `counts`, `x` is `(step index, x)`.
    - `closed` is the body after closure conversion, if it has been traced before: the traced
        body, and what it closes over.
    """

    body: Callable[[Any, Any], tuple[list[Any], list[Any]]]
    init: list[Any]
    xs: list[Any]
    steps: Any  # an integer, or symbolic
    reverse: bool
    unroll: int | bool
    counts: bool = False
    closed: tuple[TracedBody, list[Any]] | None = None

    @property
    def step_index(self) -> jax.Array:
        """The index of each step in the order in which they run."""
        index = jnp.arange(self.steps)
        return index[::-1] if self.reverse else index

    @property
    def inputs(self) -> Any:
        """All that the body gets slices of."""
        return (self.step_index, self.xs) if self.counts else self.xs

    def scan(self, carry: list[Any], inputs: Any, steps: Any) -> tuple[list[Any], list[Any]]:
        """Run so many steps. `inputs` has a slice for each."""
        options = {"reverse": self.reverse, "unroll": self.unroll}
        if jax.tree.leaves(inputs):  # JAX takes a symbolic number from the slices only
            return jax.lax.scan(self.body, carry, inputs, **options)
        if is_symbolic(steps):
            body = lambda carry, _: self.body(carry, inputs)
            return jax.lax.scan(body, carry, jnp.zeros((steps, 0)), **options)
        return jax.lax.scan(self.body, carry, inputs, steps, **options)

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
        if self.closed is not None:
            return *self.closed, self.init
        program, init = self.program
        return *close_body(program, len(init)), init


class AbstractMethod(abc.ABC):
    """How a scan prepares its backward pass: what it saves, and what it computes again."""

    @abc.abstractmethod
    def unsupported(self, loop: Loop) -> str | None:
        """Why this method can't run the loop, in one sentence; `None` if it can."""

    @abc.abstractmethod
    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        """The last carry, and all `ys`."""


@dataclasses.dataclass(frozen=True)
class Plain(AbstractMethod):
    """Save what the derivative of each step needs: `jax.lax.scan`.

    JAX traces the body, so that all that it closes over, named axes, shardings and effects are
    handled there.
    """

    def unsupported(self, loop: Loop) -> str | None:
        return None

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        return loop.scan(loop.init, loop.inputs, loop.steps)


@dataclasses.dataclass(frozen=True)
class Checkpointed(AbstractMethod):
    """Save the carry of each `every`-th step, and recompute so many steps at a time."""

    every: int

    def unsupported(self, loop: Loop) -> str | None:
        return None

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        # Within a loop, XLA can't undo the recomputation by common subexpression elimination.
        prevent_cse = loop.steps < 2 * self.every
        is_unrolled = loop.unroll is True or loop.unroll > 1
        if self.every == 1 and not is_unrolled:
            # Chunks of one step have an axis of length one, for which XLA copies all of `xs`.
            body = jax.checkpoint(loop.body, prevent_cse=prevent_cse)
            return dataclasses.replace(loop, body=body).scan(loop.init, loop.inputs, loop.steps)

        def one_chunk(carry, inputs, _):
            index, inputs = inputs
            # Not `static_argnums`, with which JAX keeps the tracers that the body closes over.
            scan = ft.partial(loop.scan, steps=index.shape[0])
            return jax.checkpoint(scan, prevent_cse=prevent_cse)(carry, inputs)

        # The index says how many steps there are, even without `xs`.
        inputs = (loop.step_index, loop.inputs)
        options = {"chunk": self.every, "reverse": loop.reverse}
        return scan_in_chunks(one_chunk, loop.init, inputs, **options)


@dataclasses.dataclass(frozen=True)
class Online(AbstractMethod):
    """Save the inputs only, and compute the derivatives of the carry forward in time.

    - `approximate`: e-prop, which drops all but the diagonal of the derivative of the carry.
    """

    approximate: bool

    def unsupported(self, loop: Loop) -> str | None:
        return loop.why_not_again

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        from .._online.online_scan import online_scan, OnlineOptions  # only if asked for

        body, consts, init = loop.traced
        step: Any = loop.body  # of the user
        for_errors = tuple(step.carry_paths()), step.place()
        options = OnlineOptions(self.approximate, *for_errors, loop.reverse, loop.unroll)
        return online_scan(consts, init, loop.xs, loop.step_index, body=body, options=options)


TRUNCATION = "eqg_truncate"  # in the name stack of what cuts the derivative


@dataclasses.dataclass(frozen=True)
class Truncated(AbstractMethod):
    """Save the first carry of each window, and recompute a window by the method `inner`."""

    inner: AbstractMethod
    window: int

    def unsupported(self, loop: Loop) -> str | None:
        return loop.why_not_again or self.inner.unsupported(loop)

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        """There are more steps than in one window."""
        body, consts, init = loop.traced
        n_last = loop.steps % self.window or self.window

        def run_window(wide, carry, inputs):
            index, xs = inputs
            own = [w.astype(c.dtype) for w, c in zip(wide, consts, strict=True)]
            closed, run = (body, own), ft.partial(body, own)
            options = loop.reverse, loop.unroll
            return self.inner.run(Loop(run, carry, xs, index.shape[0], *options, closed=closed))

        def one(carry, inputs):
            carry, ys = jax.checkpoint(run_window, prevent_cse=False)(wide, carry, inputs)
            with jax.named_scope(TRUNCATION):
                return jax.lax.stop_gradient(carry), ys

        # The cotangents of half precision are summed in single precision.
        wide = [c.astype(sum_dtype(c.dtype)) if is_differentiable(c) else c for c in consts]
        inputs = (loop.step_index, loop.xs)
        first, last = slice(None, -n_last), slice(-n_last, None)
        if loop.reverse:
            first, last = slice(n_last, None), slice(None, n_last)
        n = loop.steps // self.window - (n_last == self.window)
        split = lambda x: x[first].reshape(n, self.window, *x.shape[1:])
        join = lambda x: x.reshape(n * self.window, *x.shape[2:])
        windows = jax.tree.map(split, inputs)
        carry, ys = jax.lax.scan(one, init, windows, reverse=loop.reverse)
        inputs = jax.tree.map(lambda x: x[last], inputs)
        carry, last_ys = jax.checkpoint(run_window)(wide, carry, inputs)
        parts = [list(map(join, ys)), last_ys][:: -1 if loop.reverse else 1]
        return carry, list(map(jnp.concatenate, zip(*parts, strict=True)))


def cut_loop(loop: Loop, window: int) -> Loop:
    """The loop, with a body that cuts the derivative of its carry at the start of each window.

    The derivative equals the derivative of `Truncated`, but the steps are in the program
    itself: nothing is recomputed, so everything is saved.
    """

    def body(carry, x):
        index, x = x
        cut = (index % window == 0) & (index > 0)
        return loop.body([_cut_where(cut, c) for c in carry], x)

    return dataclasses.replace(loop, body=body, counts=True)


def _cut_where(cut, carry):
    """No derivative passes where `cut`; also none that is NaN."""
    if not is_differentiable(carry):
        return carry
    with jax.named_scope(TRUNCATION):
        return jnp.where(cut, jax.lax.stop_gradient(carry), carry)
