"""A long short-term memory with a projected hidden state over time, with a backward pass
written by hand.

Chunked over time as `lstm_vjp.py` is.
"""

import functools as ft

import jax
import jax.numpy as jnp

from ..._control_flow import compile_eager_calls
from ..._control_flow.chunked_scan import chunk_init, scan_in_chunks, shift_in
from ..._rules.custom_vjp import custom_vjp
from .chunked_matmuls import (
    add_gradients,
    bias_gradient,
    chunk_length,
    matmul_steps,
    split_gates,
    vmap_into_batch,
    weight_gradient,
    zero_sum,
)


@custom_vjp
def projected_lstm(w_in, w_state, bias, w_out, xs, state, valid, *, reverse):
    """All hidden states, `(time, batch, proj)`, and the last pair of hidden and cell state.

    The arguments are those of `lstm`, and `w_out`, the projection, `(proj, hidden)`.
    """
    hs, _, last = _forward(w_in, w_state, bias, w_out, xs, state, valid, reverse)
    return hs, last


@compile_eager_calls
def _forward(w_in, w_state, bias, w_out, xs, state, valid, reverse):
    w_in, w_state, w_out = w_in.T, w_state.T, w_out.T

    def step(state, inputs):
        h_before, c_before = state
        from_x, valid = inputs
        from_h = split_gates(h_before @ w_state, 4)
        i, f, g, o = (x + h for x, h in zip(from_x, from_h, strict=True))
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * c_before + i * g
        h = (o * jnp.tanh(c)) @ w_out
        if valid is not None:
            v = valid[:, None]
            h, c = jnp.where(v, h, h_before), jnp.where(v, c, c_before)
        return (h, c), (h, (c, (i, f, g, o)))

    def chunk(state, inputs, _):
        x, valid = inputs
        from_x = split_gates(matmul_steps(x, w_in, bias), 4)
        return jax.lax.scan(step, state, (from_x, valid), reverse=reverse)

    last, (hs, kept) = scan_in_chunks(
        chunk,
        state,
        (xs, valid),
        chunk=chunk_length(xs, state[1].shape[1]),
        reverse=reverse,
        in_place=True,
    )
    return hs, kept, last


@projected_lstm.def_fwd
def projected_lstm_fwd(w_in, w_state, bias, w_out, xs, state, valid, *, reverse):
    args = (w_in, w_state, bias, w_out, xs, state, valid)
    hs, kept, last = _forward(*args, reverse)
    return (hs, last), (*args, hs, kept)


# The backward pass. One step is that of `lstm_vjp.py` with m in place of h', and h' = P m:
#
#     c' = f c + i g      m = o tanh(c')      h' = P m
#
# Let d_h be the cotangent of h'. That of m is d_m = Pᵀ d_h, and the rest is as there, with d_m
# in place of d_h. The gradient of P is the sum over the steps of the outer products of d_h
# and m.
@projected_lstm.def_bwd(symbolic_zeros=True)
@compile_eager_calls
def projected_lstm_bwd(residuals, cts, *, reverse, perturbed):
    w_in, w_state, bias, w_out, xs, first, valid, hs, (cs, gates) = residuals
    ct_hs, (ct_h, ct_c) = cts
    *perturbed_weights, perturbed_xs = perturbed[:5]
    step = ft.partial(_backward_step, w_state, w_out)

    def chunk(carry, inputs, entries):
        cts, sums = carry
        x, h_after, c_after, ct, (i, f, g, o), valid = inputs
        h = shift_in(h_after, entries[0], reverse=reverse)
        c = shift_in(c_after, entries[1], reverse=reverse)
        tanh_c = jnp.tanh(c_after)
        j = [g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)]
        k = o * (1 - tanh_c * tanh_c)
        if valid is not None:
            j = [jnp.where(valid[:, :, None], j_gate, 0) for j_gate in j]
        cts, (d_h, d_gates) = jax.lax.scan(step, cts, (j, k, f, ct, valid), reverse=not reverse)
        if valid is not None:
            d_h = jnp.where(valid[:, :, None], d_h, 0)
        sums = add_gradients(
            sums,
            (weight_gradient, d_gates, x),
            (weight_gradient, d_gates, h),
            (bias_gradient, d_gates),
            (weight_gradient, d_h, o * tanh_c),
        )
        return (cts, sums), matmul_steps(d_gates, w_in) if perturbed_xs else None

    zeros = jax.tree.map(jnp.zeros_like, first)
    pairs = zip((ct_h, ct_c), zeros, strict=True)
    cts = tuple(zero if ct is None else ct for ct, zero in pairs)
    weights = zip((w_in, w_state, bias, w_out), perturbed_weights, strict=True)
    length = chunk_length(xs, cs.shape[2])
    entries = [
        chunk_init(after, before_all, chunk=length, reverse=reverse)
        for after, before_all in zip((hs, cs), first, strict=True)
    ]
    (cts, sums), ct_xs = scan_in_chunks(
        chunk,
        (cts, [zero_sum(weight, p, hs) for weight, p in weights]),
        (xs, hs, cs, ct_hs, gates, valid),
        entries,
        chunk=length,
        reverse=not reverse,
        in_place=True,
    )
    return (*sums, ct_xs, cts, None)


def _backward_step(w_state, w_out, cts, inputs):
    d_h, d_c = cts
    (j_i, j_f, j_g, j_o), k, f, ct, valid = inputs
    d_h = d_h if ct is None else d_h + ct
    d_m = d_h @ w_out
    d = d_c + d_m * k
    d_gates = jnp.concatenate([d * j_i, d * j_f, d * j_g, d_m * j_o], -1)
    ct_h, ct_c = d_gates @ w_state, d * f
    if valid is not None:
        v = valid[:, None]
        ct_h, ct_c = jnp.where(v, ct_h, d_h), jnp.where(v, ct_c, d_c)
    return (ct_h, ct_c), (d_h, d_gates)


@projected_lstm.def_vmap
def projected_lstm_vmap(axis_size, batched, *args, **options):
    return vmap_into_batch(projected_lstm, axis_size, batched, args, **options)
