"""Time in chunks: a loop over pieces of several steps each."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def scan_in_chunks(
    fn: Callable[..., tuple[Any, Any]],
    carry: Any,
    xs: Any,
    entries: Any = None,
    *,
    chunk: int,
    reverse: bool,
) -> tuple[Any, Any]:
    """Run `fn(carry, xs, entry) -> carry, ys` on one chunk of time after another.

    - `xs` are arrays with a leading time axis, of which `fn` is given `chunk` steps at a time.
    - `entries` are arrays with one row for each chunk (see `chunk_entries`).

    If `chunk` does not divide the number of steps, the last piece of time is shorter. Returns
    the last carry, and the `ys` of all times.
    """
    steps = jax.tree.leaves(xs)[0].shape[0]
    n, rest = divmod(steps, chunk)
    row = lambda i: jax.tree.map(lambda e: e[i], entries)

    def full(carry):
        # Without a short piece, there is nothing to copy.
        pieces = xs if rest == 0 else jax.tree.map(lambda x: x[: n * chunk], xs)
        if n == 1:
            return fn(carry, pieces, row(0))
        ones = jax.tree.map(
            lambda x: tuple(i for i in range(1, x.ndim) if x.shape[i] == 1), pieces
        )

        def one(carry, piece_and_entry):
            piece, entry = piece_and_entry
            piece = jax.tree.map(jnp.expand_dims, piece, ones)
            return fn(carry, piece, entry)

        # Without axes of length one, which XLA moves about, and then copies the whole array.
        pieces = jax.tree.map(jnp.squeeze, pieces, ones)
        pieces = jax.tree.map(lambda x: x.reshape(n, chunk, *x.shape[1:]), pieces)
        full_entries = entries if rest == 0 else jax.tree.map(lambda e: e[:n], entries)
        carry, ys = jax.lax.scan(one, carry, (pieces, full_entries), reverse=reverse)
        return carry, jax.tree.map(lambda y: y.reshape(n * chunk, *y.shape[2:]), ys)

    if rest == 0:
        return full(carry)
    if n == 0:
        return fn(carry, xs, row(0))
    short = jax.tree.map(lambda x: x[n * chunk :], xs)
    if reverse:
        carry, short_ys = fn(carry, short, row(n))
        carry, ys = full(carry)
    else:
        carry, ys = full(carry)
        carry, short_ys = fn(carry, short, row(n))
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ys, short_ys)


def chunk_entries(after: jax.Array, first: jax.Array, *, chunk: int, reverse: bool):
    """What a loop carried into each chunk, given what it had after each step, and first."""
    if after.shape[0] == 0:
        return after
    if reverse:
        return jnp.concatenate([after[chunk::chunk], first[None]])
    return jnp.concatenate([first[None], after[chunk - 1 : -1 : chunk]])


def before(after: jax.Array, entry: jax.Array, *, reverse: bool) -> jax.Array:
    """What the loop carried before each step of a chunk, given that after each."""
    if reverse:
        return jnp.concatenate([after[1:], entry[None]])
    return jnp.concatenate([entry[None], after[:-1]])


def near_divisor(steps: int, chunk: int | float) -> int:
    """A divisor of `steps` within a factor of 1.5 if there is one: no piece is then short,
    and nothing has to be copied."""
    nearby = range(max(1, math.ceil(chunk / 1.5)), min(steps, math.floor(chunk * 1.5)) + 1)
    divisors = [k for k in nearby if steps % k == 0]
    if not divisors:
        return max(1, min(steps, round(chunk)))
    return min(divisors, key=lambda k: abs(math.log(k / chunk)))
