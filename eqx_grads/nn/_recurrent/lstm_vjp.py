"""A long short-term memory over time, with a backward pass written by hand.

Chunked over time as `gru_vjp.py` is.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp

from ..._control_flow import compile_eager_calls
from ..._control_flow.chunked_scan import chunk_init, scan_in_chunks, shift_in
from ..._rules.custom_vjp import custom_vjp
from .chunked_matmuls import (
    add_gradients,
    bias_gradient,
    chunk_length,
    forward_chunk,
    is_small,
    matmul_of_step,
    matmul_steps,
    split_gates,
    vmap_into_batch,
    weight_gradient,
    zero_sum,
)


@custom_vjp
def lstm(w_in, w_state, bias, xs, state, valid, *, reverse, keep):
    """All hidden states, `(time, batch, hidden)`, and the last pair of hidden and cell state.

    `xs` is `(time, batch, in)`, `state` a pair of `(batch, hidden)`, and `valid`, if not
    `None`, is the `(time, batch)` mask of the steps that count: at all others the state does
    not change. The gates are in the order in, forget, cell, out, as in
    `equinox.nn.LSTMCell`.
    """
    del keep
    hs, _, last = _forward(w_in, w_state, bias, xs, state, valid, reverse, "nothing")
    return hs, last


@compile_eager_calls
def _forward(w_in, w_state, bias, xs, state, valid, reverse, keep):
    w_in, w_state = w_in.T, w_state.T
    length = forward_chunk(xs, state[0].shape[1])

    def step(state, inputs):
        h_before, c_before = state
        x, valid = inputs
        if length is None:
            both = matmul_of_step(x, h_before, w_in, w_state, bias)
            i, f, g, o = _gates(split_gates(both, 4))
        else:
            i, f, g, o = _gates(_add(x, split_gates(h_before @ w_state, 4)))
        c = f * c_before + i * g
        h = o * jnp.tanh(c)
        if valid is not None:
            v = valid[:, None]
            h, c = jnp.where(v, h, h_before), jnp.where(v, c, c_before)
        kept = {"nothing": (), "states": (c,), "gates": (c, (i, f, g, o))}[keep]
        return (h, c), (h, *kept)

    def chunk(state, inputs, _):
        x, valid = inputs
        from_x = split_gates(matmul_steps(x, w_in, bias), 4)
        return jax.lax.scan(step, state, (from_x, valid), reverse=reverse)

    if length is None:
        last, (hs, *kept) = jax.lax.scan(step, state, (xs, valid), reverse=reverse)
    else:
        last, (hs, *kept) = scan_in_chunks(
            chunk, state, (xs, valid), chunk=length, reverse=reverse, in_place=True
        )
    return hs, kept, last


def _add(from_x, from_h):
    return [x + h for x, h in zip(from_x, from_h, strict=True)]


def _gates(arguments):
    i, f, g, o = arguments
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)


@lstm.def_fwd
def lstm_fwd(w_in, w_state, bias, xs, state, valid, *, reverse, keep):
    hs, kept, last = _forward(w_in, w_state, bias, xs, state, valid, reverse, keep)
    return (hs, last), (w_in, w_state, bias, xs, state, valid, hs, kept)


# The backward pass. One step is, with a = W x + V h + b the arguments of the four gates:
#
#     i = sigmoid(a_i)    f = sigmoid(a_f)    g = tanh(a_g)    o = sigmoid(a_o)
#     c' = f c + i g      h' = o tanh(c')
#
# Let d_h be the cotangent of h', and d_c the cotangent of c' from the step after. Since h' is a
# function of c', the whole cotangent of c' is
#
#     d = d_c + k d_h,    k = o (1 - tanh²(c'))
#
# and the cotangents of the gates' arguments are multiples of d and d_h:
#
#     of a_i:  j_i d,    j_i = g i (1 - i)
#     of a_f:  j_f d,    j_f = c f (1 - f)
#     of a_g:  j_g d,    j_g = i (1 - g²)
#     of a_o:  j_o d_h,  j_o = tanh(c') o (1 - o)
#
# The cotangents of the state before the step are
#
#     of c:  f d,        of h:  Vᵀ [j_i d, j_f d, j_g d, j_o d_h].
#
# The factors k and j_* depend on no cotangent. A loop over the steps of a chunk computes d_h
# and d, with one matrix product for each step, and the factors, as in `gru_vjp.py`. Then the
# gradients of weights and inputs are one matrix product for all steps of the chunk.
@lstm.def_bwd(symbolic_zeros=True)
@compile_eager_calls
def lstm_bwd(residuals, cts, *, reverse, perturbed):
    w_in, w_state, bias, xs, first, valid, hs, (cs, *gates) = residuals
    ct_hs, (ct_h, ct_c) = cts
    w_in_t, w_state_t = w_in.T, w_state.T
    *perturbed_weights, perturbed_xs = perturbed[:4]
    factors_first = is_small(first[0])
    step = ft.partial(_backward_step, w_state, factors_first=factors_first)

    def chunk(carry, inputs, entries):
        cts, sums = carry
        x, h_after, c_after, ct, gates, valid = inputs
        h_entry, c_entry = entries
        h = shift_in(h_after, h_entry, reverse=reverse)
        c = shift_in(c_after, c_entry, reverse=reverse)
        if gates:
            (of_chunk,) = gates
        else:
            from_x = split_gates(matmul_steps(x, w_in_t, bias), 4)
            of_chunk = _gates(_add(from_x, split_gates(matmul_steps(h, w_state_t), 4)))
        operands: Any = (c, c_after, of_chunk)
        if factors_first:
            operands = _factors(*operands)
        cts, out = jax.lax.scan(step, cts, (operands, ct, valid), reverse=not reverse)
        d_gates: Any = out
        if factors_first:
            d_gates = _cotangents(out[0], out[1], operands, valid)
        sums = add_gradients(
            sums,
            (weight_gradient, d_gates, x),
            (weight_gradient, d_gates, h),
            (bias_gradient, d_gates),
        )
        return (cts, sums), matmul_steps(d_gates, w_in) if perturbed_xs else None

    zero = jnp.zeros_like(first[0])
    cts = tuple(zero if ct is None else ct for ct in (ct_h, ct_c))
    weights = (w_in, w_state, bias)
    length = chunk_length(xs, hs.shape[-1])
    entries = [
        chunk_init(after, before_all, chunk=length, reverse=reverse)
        for after, before_all in zip((hs, cs), first, strict=True)
    ]
    (cts, sums), ct_xs = scan_in_chunks(
        chunk,
        (cts, [zero_sum(w, p, hs) for w, p in zip(weights, perturbed_weights, strict=True)]),
        (xs, hs, cs, ct_hs, gates, valid),
        entries,
        chunk=length,
        reverse=not reverse,
        in_place=True,
    )
    return (*sums, ct_xs, cts, None)


def _factors(c, c_after, gates):
    """The factors `j`, `k` and `f`, for one step or for all steps of a chunk."""
    i, f, g, o = gates
    tanh_c = jnp.tanh(c_after)
    j = [g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)]
    return j, o * (1 - tanh_c * tanh_c), f


def _cotangents(d_h, d, factors, valid):
    """Those of the gates' arguments: zero at a step that does not count."""
    *j_c, j_o = factors[0]
    cts = jnp.concatenate([*(d * j for j in j_c), d_h * j_o], -1)
    return cts if valid is None else jnp.where(valid[..., None], cts, 0)


def _backward_step(w_state, cts, inputs, *, factors_first) -> tuple[Any, Any]:
    d_h, d_c = cts
    operands, ct, valid = inputs
    d_h = d_h if ct is None else d_h + ct
    factors = operands if factors_first else _factors(*operands)
    _, k, f = factors
    d = d_c + d_h * k
    d_gates = _cotangents(d_h, d, factors, valid)
    ct_h, ct_c = d_gates @ w_state, d * f
    if valid is not None:
        v = valid[:, None]
        ct_h, ct_c = jnp.where(v, ct_h, d_h), jnp.where(v, ct_c, d_c)
    return (ct_h, ct_c), (d_h, d) if factors_first else d_gates


@lstm.def_vmap
def lstm_vmap(axis_size, batched, *args, **options):
    return vmap_into_batch(lstm, axis_size, batched, args, **options)
