"""A vanilla recurrent network over time, with a backward pass written by hand.

In chunks of time, as `gru_vjp.py`. The slope of either activation function follows from its
value, so the states are all that is kept.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..._control_flow.chunked_scan import chunk_init, scan_in_chunks, shift_in
from ..._rules.custom_vjp import custom_vjp
from .chunked_matmuls import (
    accumulator,
    bias_gradient,
    chunk_of,
    fold_batch,
    times,
    unfold_batch,
    weight_gradient,
)


ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}
_SLOPES = {"tanh": lambda h: 1 - h * h, "relu": lambda h: (h > 0).astype(h.dtype)}


@custom_vjp
def rnn(w_in, w_state, bias, xs, h, valid, *, reverse, activation):
    """All states, `(time, batch, hidden)`, and the last one. Arguments as in `gru`."""
    w_in, w_state = w_in.T, w_state.T

    def step(h, inputs):
        from_x, valid = inputs
        new = ACTIVATIONS[activation](from_x + h @ w_state)
        h = new if valid is None else jnp.where(valid[:, None], new, h)
        return h, h

    def chunk(h, inputs, _):
        x, valid = inputs
        last, hs = jax.lax.scan(step, h, (times(x, w_in, bias), valid), reverse=reverse)
        return last, hs

    last, hs = scan_in_chunks(chunk, h, (xs, valid), chunk=chunk_of(xs), reverse=reverse)
    return hs, last


@rnn.def_fwd
def rnn_fwd(w_in, w_state, bias, xs, h, valid, *, reverse, activation):
    options = {"reverse": reverse, "activation": activation}
    hs, last = rnn(w_in, w_state, bias, xs, h, valid, **options)
    return (hs, last), (w_in, w_state, bias, xs, h, valid, hs)


@rnn.def_bwd(symbolic_zeros=True)
def rnn_bwd(residuals, cts, *, reverse, activation, perturbed):
    w_in, w_state, bias, xs, h, valid, hs = residuals
    ct_hs, ct_last = cts
    wants: tuple[Any, ...] = perturbed
    want_in, want_state, want_bias, want_xs = wants[:4]

    def step(d, inputs):
        slope, ct, valid = inputs
        d = d if ct is None else d + ct
        d_pre = d * slope
        passed = d_pre @ w_state
        return passed if valid is None else jnp.where(valid[:, None], passed, d), d_pre

    def chunk(carry, inputs, entry):
        d, (sum_in, sum_state, sum_bias) = carry
        x, h_after, ct, valid = inputs
        slope = _SLOPES[activation](h_after)
        if valid is not None:
            slope = jnp.where(valid[:, :, None], slope, 0)
        d, d_pre = jax.lax.scan(step, d, (slope, ct, valid), reverse=not reverse)
        if sum_in is not None:
            sum_in = sum_in + weight_gradient(d_pre, x)
        if sum_state is not None:
            sum_state = sum_state + weight_gradient(
                d_pre, shift_in(h_after, entry, reverse=reverse)
            )
        if sum_bias is not None:
            sum_bias = sum_bias + bias_gradient(d_pre)
        ct_x = times(d_pre, w_in) if want_xs else None
        return (d, (sum_in, sum_state, sum_bias)), ct_x

    d = jnp.zeros_like(hs, shape=hs.shape[1:]) if ct_last is None else ct_last
    sums = (
        accumulator(w_in, want_in, hs),
        accumulator(w_state, want_state, hs),
        accumulator(bias, want_bias, hs),
    )
    steps = chunk_of(xs)
    (d, sums), ct_xs = scan_in_chunks(
        chunk,
        (d, sums),
        (xs, hs, ct_hs, valid),
        chunk_init(hs, h, chunk=steps, reverse=reverse),
        chunk=steps,
        reverse=not reverse,
    )
    return (*sums, ct_xs, d, None)


@rnn.def_vmap
def rnn_vmap(axis_size, batched, w_in, w_state, bias, xs, h, valid, *, reverse, activation):
    *weights, _, _, _ = batched
    if any(b is True for b in weights):
        return NotImplemented  # a network for each example
    xs, h, valid = fold_batch(axis_size, batched[3:], xs, h, valid)
    hs, last = rnn(w_in, w_state, bias, xs, h, valid, reverse=reverse, activation=activation)
    return unfold_batch(axis_size, hs, last), True
