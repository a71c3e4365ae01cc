"""A gated recurrent unit over time, with a backward pass written by hand.

Three things make it fast. What depends on the inputs only, and all weight gradients, are one
matrix product for a chunk of several steps. Chunks are short enough that all between stays in
the cache. And the loop over steps in between is left with one product and few operands.
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
def gru(w_in, w_state, bias, bias_n, xs, h, valid, *, reverse, keep):
    """All states, `(time, batch, hidden)`, and the last one.

    `xs` is `(time, batch, in)`, `h` is `(batch, hidden)`, and `valid`, if not `None`, is the
    `(time, batch)` mask of the steps that count: at all others the state stays as it is.
    The gates are in the order reset, update, new, as in `equinox.nn.GRUCell`.
    """
    del keep
    return _forward(w_in, w_state, bias, bias_n, xs, h, valid, reverse, "states")[:2]


def _forward(w_in, w_state, bias, bias_n, xs, h, valid, reverse, keep):
    w_in, w_state = w_in.T, w_state.T

    def step(h, inputs):
        from_x, valid = inputs
        r, z, n, h_n = _gates(from_x, h @ w_state, bias_n)
        new = n + z * (h - n)
        h = new if valid is None else jnp.where(valid[:, None], new, h)
        return h, (h, (r, z, n, h_n) if keep == "gates" else ())

    def chunk(h, inputs, _):
        x, valid = inputs
        from_x = split_gates(times(x, w_in, bias), 3)
        last, kept = jax.lax.scan(step, h, (from_x, valid), reverse=reverse)
        return last, kept

    h, (hs, gates) = scan_in_chunks(chunk, h, (xs, valid), chunk=chunk_of(xs), reverse=reverse)
    return hs, h, gates


def _gates(from_x, from_state, bias_n):
    g_r, g_z, g_n = from_x
    h_r, h_z, h_n = split_gates(from_state, 3)
    if bias_n is not None:
        h_n = h_n + jnp.expand_dims(bias_n, range(h_n.ndim - 1))
    r, z = jax.nn.sigmoid(g_r + h_r), jax.nn.sigmoid(g_z + h_z)
    return r, z, jnp.tanh(g_n + r * h_n), h_n


@gru.def_fwd
def gru_fwd(w_in, w_state, bias, bias_n, xs, h, valid, *, reverse, keep):
    args = (w_in, w_state, bias, bias_n, xs, h, valid)
    hs, last, gates = _forward(*args, reverse, keep)
    return (hs, last), (*args, hs, gates)


# With a = (1 - z)(1 - n²) and h' = n + z (h - n), the cotangents of the arguments of the three
# gates are all multiples of the cotangent d of h': a d of `n`, and so r a d of what the state
# adds to it; h_n r (1 - r) a d of `r`; (h - n) z (1 - z) d of `z`. Only d has to be carried.
@gru.def_bwd(symbolic_zeros=True)
def gru_bwd(residuals, cts, *, reverse, perturbed):
    w_in, w_state, bias, bias_n, xs, h_first, valid, hs, gates = residuals
    ct_hs, ct_last = cts
    wants: tuple[Any, ...] = perturbed
    want_in, want_state, want_bias, want_bias_n, want_xs = wants[:5]
    w_in_t, w_state_t = w_in.T, w_state.T

    def step(d, inputs):
        c_r, c_z, c_n, z, ct = inputs
        d = d if ct is None else d + ct
        return d * z + jnp.concatenate([d * c_r, d * c_z, d * c_n], -1) @ w_state, d

    def chunk(carry, inputs, entry):
        d, sums = carry
        x, h_after, ct, gates, valid = inputs
        h = shift_in(h_after, entry, reverse=reverse)
        if gates:
            r, z, n, h_n = gates
        else:
            from_x = split_gates(times(x, w_in_t, bias), 3)
            r, z, n, h_n = _gates(from_x, times(h, w_state_t), bias_n)
        c_x = (1 - z) * (1 - n * n)
        c_z = (h - n) * z * (1 - z)
        c_n = c_x * r
        c_r = c_n * h_n * (1 - r)
        if valid is not None:
            v = valid[:, :, None]
            c_x, c_z, c_n, c_r = (jnp.where(v, c, 0) for c in (c_x, c_z, c_n, c_r))
            z = jnp.where(v, z, 1)
        d, ds = jax.lax.scan(step, d, (c_r, c_z, c_n, z, ct), reverse=not reverse)
        d_r, d_z, d_n = ds * c_r, ds * c_z, ds * c_n
        from_x = jnp.concatenate([d_r, d_z, ds * c_x], -1)
        from_h = jnp.concatenate([d_r, d_z, d_n], -1)
        terms = (
            lambda: weight_gradient(from_x, x),
            lambda: weight_gradient(from_h, h),
            lambda: bias_gradient(from_x),
            lambda: bias_gradient(d_n),
        )
        sums = [None if s is None else s + term() for s, term in zip(sums, terms, strict=True)]
        ct_x = times(from_x, w_in) if want_xs else None
        return (d, sums), ct_x

    d = jnp.zeros_like(hs, shape=hs.shape[1:]) if ct_last is None else ct_last
    sums = [
        accumulator(w_in, want_in, hs),
        accumulator(w_state, want_state, hs),
        accumulator(bias, want_bias, hs),
        accumulator(bias_n, want_bias_n, hs),
    ]
    steps = chunk_of(xs)
    (d, sums), ct_xs = scan_in_chunks(
        chunk,
        (d, sums),
        (xs, hs, ct_hs, gates, valid),
        chunk_init(hs, h_first, chunk=steps, reverse=reverse),
        chunk=steps,
        reverse=not reverse,
    )
    return (*sums, ct_xs, d, None)


@gru.def_vmap
def gru_vmap(axis_size, batched, w_in, w_state, bias, bias_n, xs, h, valid, *, reverse, keep):
    *weights, _, _, _ = batched
    if any(b is True for b in weights):
        return NotImplemented  # a network for each example
    xs, h, valid = fold_batch(axis_size, batched[4:], xs, h, valid)
    hs, last = gru(w_in, w_state, bias, bias_n, xs, h, valid, reverse=reverse, keep=keep)
    return unfold_batch(axis_size, hs, last), True
