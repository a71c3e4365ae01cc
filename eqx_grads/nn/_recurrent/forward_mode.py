"""What forward mode of GRU, LSTM and RNN shares.

All states are known then. So the terms of a tangent that do not depend on the tangent of the
state are matrix products over chunks of time, as in the backward pass, and the loop is left
with one product for each step. It computes no value, and so does not repeat what devices
exchange.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..._control_flow.chunked_scan import chunk_init, scan_in_chunks, shift_in
from .chunked_matmuls import chunk_length, matmul_steps


def scan_tangents(
    fn: Callable[..., tuple[Any, Any]],
    t_first: Any,
    xs: jax.Array,
    inputs: Any,
    states: Any,
    first: Any,
    *,
    reverse: bool,
) -> tuple[Any, Any]:
    """`fn(t_state, inputs, before, after) -> t_state, t_states` for one chunk after another.

    `before` and `after` are the states before and after each step of the chunk. `t_first` may
    have `None` for zero.
    """
    hidden = jax.tree.leaves(states)[0].shape[-1]
    length = chunk_length(xs, hidden)

    def chunk(t_state, operands, entries):
        inputs, after = operands
        before = jax.tree.map(lambda s, e: shift_in(s, e, reverse=reverse), after, entries)
        return fn(t_state, inputs, before, after)

    t_first = jax.tree.map(lambda s, t: jnp.zeros_like(s) if t is None else t, first, t_first)
    return scan_in_chunks(
        chunk,
        t_first,
        (inputs, states),
        jax.tree.map(
            lambda s, h: chunk_init(s, h, chunk=length, reverse=reverse), states, first
        ),
        chunk=length,
        reverse=reverse,
    )


def tangent_of_products(
    x: jax.Array,
    t_x: jax.Array | None,
    weight: jax.Array,
    t_weight: jax.Array | None,
    t_bias: jax.Array | None = None,
) -> jax.Array | None:
    """The tangent of `x @ weight.T + bias` for all steps of a chunk. `None` is zero."""
    out = None if t_x is None else matmul_steps(t_x, weight.T)
    if t_weight is not None:
        out = sum_of(out, matmul_steps(x, t_weight.T))
    if t_bias is not None:
        out = sum_of(out, jnp.expand_dims(t_bias, range(x.ndim - t_bias.ndim)))
    return out


def sum_of(a: Any, b: Any) -> Any:
    """The sum of two arrays, either of which may be `None` for zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
