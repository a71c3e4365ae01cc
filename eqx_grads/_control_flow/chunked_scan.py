"""A scan over chunks of several steps each."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs.symbolic_sizes import is_symbolic, Size as Size, size_or as size_or


def scan_in_chunks(
    fn: Callable[..., tuple[Any, Any]],
    carry: Any,
    xs: Any,
    inits: Any = None,
    *,
    chunk: Size,
    reverse: bool,
    in_place: bool = False,
) -> tuple[Any, Any]:
    """Run `fn(carry, xs, init) -> carry, ys` on one chunk of steps after another.

    - `xs` are arrays with a leading time axis. `fn` gets `chunk` steps of them at a time.
    - `inits` are arrays with one row for each chunk (see `chunk_init`).
    - `ys` are arrays with a row for each step of the chunk, or with any number of rows.
    - `in_place`: if the last chunk is shorter, the loop over the others slices `xs` instead of
      a copy of `xs` without the last steps. Only for rules, which JAX seldom differentiates in
      reverse mode: it would save each slice.

    If `chunk` does not divide the number of steps, the last chunk is shorter. Returns the last
    carry, and the `ys` of all chunks, one after another. A symbolic number of steps is one
    chunk, as nothing is known to divide it.
    """
    steps = jax.tree.leaves(xs)[0].shape[0]
    part = lambda tree, of: jax.tree.map(lambda x: x[of], tree)
    n, remainder = (0, 1) if is_symbolic(steps) else divmod(steps, chunk)
    if remainder == 0:
        return _run_full(fn, carry, xs, inits, n, chunk, reverse, in_place=False)
    if n == 0:
        return fn(carry, xs, part(inits, 0))
    in_place = in_place and n > 1
    full = xs if in_place else part(xs, slice(n * chunk))
    last, first_inits = part(xs, slice(n * chunk, None)), part(inits, slice(n))
    ys: list[Any] = [None, None]
    for i in (1, 0) if reverse else (0, 1):
        if i == 0:
            run = _run_full(fn, carry, full, first_inits, n, chunk, reverse, in_place=in_place)
        else:
            with jax.named_scope(f"eqg_steps_from_{n * chunk}"):
                run = fn(carry, last, part(inits, n))
        carry, ys[i] = run
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *ys)


def _run_full(fn, carry, xs, inits, n, chunk, reverse, *, in_place):
    """Run `fn` on the first `n` chunks of `xs`, and on no other steps."""
    if n == 1:
        return fn(carry, xs, jax.tree.map(lambda e: e[0], inits))
    ones = jax.tree.map(lambda x: tuple(i for i in range(1, x.ndim) if x.shape[i] == 1), xs)
    # Without axes of length one. XLA gives these another layout, and then copies the whole
    # array to transpose it: openxla/xla#26987 is about that on a GPU, and JAX itself avoids
    # it in `scan` (jax#21433). On a CPU it was seen in JAX 0.10.
    xs = jax.tree.map(jnp.squeeze, xs, ones)
    if in_place:
        slices = jnp.arange(n)
        read = lambda i: jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk), xs
        )
    else:
        slices = jax.tree.map(lambda x: x.reshape(n, chunk, *x.shape[1:]), xs)
        read = lambda xs: xs

    def one(carry, slice_and_init):
        x, init = slice_and_init
        return fn(carry, jax.tree.map(jnp.expand_dims, read(x), ones), init)

    # The name tells `explain_nan` how the steps are numbered, and so does that of the last.
    with jax.named_scope(f"eqg_chunks_of_{chunk}"):
        carry, ys = jax.lax.scan(one, carry, (slices, inits), reverse=reverse)
    return carry, jax.tree.map(lambda y: y.reshape(n * y.shape[1], *y.shape[2:]), ys)


def chunk_init(after: jax.Array, first: jax.Array, *, chunk: Size, reverse: bool) -> jax.Array:
    """The carry at the start of each chunk, given the carry after each step, and the first."""
    if after.shape[0] == 0:
        return after
    if is_symbolic(after.shape[0]):
        return first[None]
    if reverse:
        return jnp.concatenate([after[chunk::chunk], first[None]])
    return jnp.concatenate([first[None], after[chunk - 1 : -1 : chunk]])


def shift_in(after: jax.Array, init: jax.Array, *, reverse: bool) -> jax.Array:
    """The carry before each step of a chunk, given that after each, and the first."""
    if reverse:
        return jnp.concatenate([after[1:], init[None]])
    return jnp.concatenate([init[None], after[:-1]])


def near_divisor(steps: Size, chunk: int | float) -> Size:
    """A divisor of `steps` from 1 / 1.5 to 1.5 times `chunk` if there is one, so that no chunk
    is shorter. Otherwise the number of steps of as few chunks of at most `chunk` steps as there
    can be, so that the last of a few chunks is not much shorter. A symbolic number is one."""
    if is_symbolic(steps):
        return steps
    nearby = range(max(1, math.ceil(chunk / 1.5)), min(steps, math.floor(chunk * 1.5)) + 1)
    divisors = [k for k in nearby if steps % k == 0]
    if not divisors:
        return max(1, math.ceil(steps / math.ceil(max(1, steps / chunk))))
    return min(divisors, key=lambda k: abs(math.log(k / chunk)))
