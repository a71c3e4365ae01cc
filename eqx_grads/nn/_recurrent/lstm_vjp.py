"""A long short-term memory over time, with a backward pass written by hand.

In chunks of time, as `gru_vjp.py`.
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
    split_gates,
    times,
    unfold_batch,
    weight_gradient,
)


@custom_vjp
def lstm(w_in, w_state, bias, xs, state, valid, *, reverse, keep):
    """All hidden states, `(time, batch, hidden)`, and the last pair of hidden and cell state.

    `xs` is `(time, batch, in)`, `state` a pair of `(batch, hidden)`, and `valid`, if not
    `None`, is the `(time, batch)` mask of the steps that count: at all others the state stays
    as it is. The gates are in the order in, forget, cell, out, as in `equinox.nn.LSTMCell`.
    """
    del keep
    hs, _, last = _forward(w_in, w_state, bias, xs, state, valid, reverse, "nothing")
    return hs, last


def _forward(w_in, w_state, bias, xs, state, valid, reverse, keep):
    w_in, w_state = w_in.T, w_state.T

    def step(state, inputs):
        h_before, c_before = state
        from_x, valid = inputs
        i, f, g, o = _gates(from_x, split_gates(h_before @ w_state, 4))
        c = f * c_before + i * g
        h = o * jnp.tanh(c)
        if valid is not None:
            v = valid[:, None]
            h, c = jnp.where(v, h, h_before), jnp.where(v, c, c_before)
        kept = {"nothing": (), "states": (c,), "gates": (c, (i, f, g, o))}[keep]
        return (h, c), (h, *kept)

    def chunk(state, inputs, _):
        x, valid = inputs
        from_x = split_gates(times(x, w_in, bias), 4)
        last, kept = jax.lax.scan(step, state, (from_x, valid), reverse=reverse)
        return last, kept

    last, (hs, *kept) = scan_in_chunks(
        chunk, state, (xs, valid), chunk=chunk_of(xs), reverse=reverse
    )
    return hs, kept, last


def _gates(from_x, from_h):
    i, f, g, o = (x + h for x, h in zip(from_x, from_h, strict=True))
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)


@lstm.def_fwd
def lstm_fwd(w_in, w_state, bias, xs, state, valid, *, reverse, keep):
    hs, kept, last = _forward(w_in, w_state, bias, xs, state, valid, reverse, keep)
    return (hs, last), (w_in, w_state, bias, xs, state, valid, hs, kept)


# The cotangents of the arguments of the gates are multiples of those of the states: of `c`
# for in, forget and cell, of `h` for out. Only these two have to be carried.
@lstm.def_bwd(symbolic_zeros=True)
def lstm_bwd(residuals, cts, *, reverse, perturbed):
    w_in, w_state, bias, xs, first, valid, hs, (cs, *gates) = residuals
    ct_hs, (ct_h, ct_c) = cts
    wants: tuple[Any, ...] = perturbed
    want_in, want_state, want_bias, want_xs = wants[:4]
    w_in_t, w_state_t = w_in.T, w_state.T
    width = w_in.shape[1]

    def step(carry, inputs):
        d_h, d_c = carry
        per_c, c_h, f, ct, valid = inputs
        d_h = d_h if ct is None else d_h + ct
        j_i, j_f, j_g, j_o = per_c
        in_c = d_c + d_h * c_h
        d = jnp.concatenate([in_c * j_i, in_c * j_f, in_c * j_g, d_h * j_o], -1)
        passed_h, passed_c = d @ w_state, in_c * f
        if valid is not None:
            v = valid[:, None]
            passed_h = jnp.where(v, passed_h, d_h)
            passed_c = jnp.where(v, passed_c, d_c)
        return (passed_h, passed_c), (d_h, in_c)

    def chunk(carry, inputs, entry):
        ds, sums = carry
        x, h_after, c_after, ct, gates, valid = inputs
        h_entry, c_entry = entry
        h = shift_in(h_after, h_entry, reverse=reverse)
        c = shift_in(c_after, c_entry, reverse=reverse)
        if gates:
            ((i, f, g, o),) = gates
        else:
            from_x = split_gates(times(x, w_in_t, bias), 4)
            i, f, g, o = _gates(from_x, split_gates(times(h, w_state_t), 4))
        tanh_c = jnp.tanh(c_after)
        per_c = [g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)]
        c_h = o * (1 - tanh_c * tanh_c)
        if valid is not None:
            per_c = [jnp.where(valid[:, :, None], j, 0) for j in per_c]
        ds, (d_h, d_c) = jax.lax.scan(step, ds, (per_c, c_h, f, ct, valid), reverse=not reverse)
        *of_c, of_h = per_c
        d = jnp.concatenate([*(d_c * j for j in of_c), d_h * of_h], -1)
        sum_weights, sum_bias = sums
        if sum_weights is not None:
            sum_weights = sum_weights + weight_gradient(d, jnp.concatenate([x, h], -1))
        if sum_bias is not None:
            sum_bias = sum_bias + bias_gradient(d)
        ct_x = times(d, w_in) if want_xs else None
        return (ds, (sum_weights, sum_bias)), ct_x

    zero = jnp.zeros_like(hs, shape=hs.shape[1:])
    ds = tuple(zero if ct is None else ct for ct in (ct_h, ct_c))
    # One product for both weights, unless one of them is frozen: then it is seldom both.
    both = jnp.concatenate([w_in, w_state], 1) if want_in or want_state else None
    sums = (accumulator(both, both is not None, hs), accumulator(bias, want_bias, hs))
    steps = chunk_of(xs)
    entries = [
        chunk_init(after, first, chunk=steps, reverse=reverse)
        for after, first in zip((hs, cs), first, strict=True)
    ]
    (ds, (ct_both, ct_bias)), ct_xs = scan_in_chunks(
        chunk,
        (ds, sums),
        (xs, hs, cs, ct_hs, gates, valid),
        entries,
        chunk=steps,
        reverse=not reverse,
    )
    ct_in, ct_state = (None, None) if ct_both is None else jnp.split(ct_both, [width], 1)
    return ct_in, ct_state, ct_bias, ct_xs, ds, None


@lstm.def_vmap
def lstm_vmap(axis_size, batched, w_in, w_state, bias, xs, state, valid, *, reverse, keep):
    *weights, _, _, _ = batched
    if any(b is True for b in weights):
        return NotImplemented  # a network for each example
    xs, state, valid = fold_batch(axis_size, batched[3:], xs, state, valid)
    hs, last = lstm(w_in, w_state, bias, xs, state, valid, reverse=reverse, keep=keep)
    return unfold_batch(axis_size, hs, last), True
