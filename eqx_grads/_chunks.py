"""Time in chunks: a loop over pieces of several steps each."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def scan_in_chunks(
    fn: Callable[..., tuple[Any, Any, Any]],
    carry: Any,
    xs: Any,
    per_chunk: Any = None,
    *,
    chunk: int,
    reverse: bool,
) -> tuple[Any, Any, Any]:
    """Run `fn(carry, xs, entry) -> carry, ys, exit` on one chunk of time after another.

    - `xs` are arrays with a leading time axis, of which `fn` is given `chunk` steps at a time.
    - `per_chunk` is what another such loop over the same times returned for its chunks (its
        `exit`s), and `entry` is the part of it for this chunk.

    If `chunk` does not divide the number of steps, the last piece of time is shorter. Returns
    the last carry, the `ys` of all times, and the `exit`s.
    """
    steps = jax.tree.leaves(xs)[0].shape[0]
    n, rest = divmod(steps, chunk)
    entries, entry = (None, None) if per_chunk is None else per_chunk

    def full(carry):
        one = lambda carry, x: _as_pair(fn(carry, *x))
        # Without a short piece, there is nothing to copy.
        pieces = xs if rest == 0 else jax.tree.map(lambda x: x[: n * chunk], xs)
        if n == 1:
            carry, (ys, exits) = one(carry, (pieces, jax.tree.map(lambda x: x[0], entries)))
            return carry, ys, jax.tree.map(lambda x: x[None], exits)
        pieces = jax.tree.map(lambda x: x.reshape(n, chunk, *x.shape[1:]), pieces)
        carry, (ys, exits) = jax.lax.scan(one, carry, (pieces, entries), reverse=reverse)
        return carry, jax.tree.map(lambda y: y.reshape(n * chunk, *y.shape[2:]), ys), exits

    if rest == 0:
        carry, ys, exits = full(carry)
        return carry, ys, (exits, None)
    short_xs = xs if n == 0 else jax.tree.map(lambda x: x[n * chunk :], xs)
    if n == 0:
        carry, ys, exit = fn(carry, short_xs, entry)
        return carry, ys, (None, exit)
    if reverse:
        carry, short_ys, exit = fn(carry, short_xs, entry)
        carry, ys, exits = full(carry)
    else:
        carry, ys, exits = full(carry)
        carry, short_ys, exit = fn(carry, short_xs, entry)
    ys = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ys, short_ys)
    return carry, ys, (exits, exit)


def _as_pair(result):
    carry, ys, exit = result
    return carry, (ys, exit)


def near_divisor(steps: int, chunk: int | float) -> int:
    """A divisor of `steps` within a factor of 1.5 if there is one: no piece is then short,
    and nothing has to be copied."""
    nearby = range(max(1, math.ceil(chunk / 1.5)), min(steps, math.floor(chunk * 1.5)) + 1)
    divisors = [k for k in nearby if steps % k == 0]
    if not divisors:
        return max(1, min(steps, round(chunk)))
    return min(divisors, key=lambda k: abs(math.log(k / chunk)))
