"""A scan in windows that no derivative passes between: truncated backpropagation.

Let `(h_{t+1}, y_t) = f(W, h_t, x_t)` run in windows of `k` steps. The cotangents `d_t` of the
carries `h_t` obey

    d_t = (dh_{t+1}/dh_t)^T d_{t+1} + (dy_t/dh_t)^T ct_y_t,

and truncation replaces `d_{t+1}` by zero where step `t + 1` is the first of a window. So the
scan over the windows stops the gradient of the carry, saves the carry that enters each window,
and computes the window again when its outputs have cotangents.

The last window is not in that scan, as it has the cotangent of the last carry. If the outputs
have no cotangent, the scan has no derivative, and saves nothing.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp

from .._tangent_spaces import is_differentiable, sum_dtype
from .scan_backward import AbstractMethod, Loop


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
        parts = [list(map(join, ys)), last_ys]
        return carry, list(map(_concatenate, *(parts[::-1] if loop.reverse else parts)))


def _concatenate(a, b):
    return jnp.concatenate([a, b])


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
