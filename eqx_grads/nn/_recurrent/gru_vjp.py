"""A gated recurrent unit over time, with a backward pass written by hand.

It is fast for three reasons. The gradients of all weights and inputs are one matrix product for
a chunk of several steps, and for a small batch so are the products of the weights with the
inputs. Chunks are short enough for all intermediate values to stay in the cache. And the loop
of the backward pass is left with one matrix product, and reads the gates only.
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
    matmul_steps,
    split_gates,
    vmap_into_batch,
    weight_gradient,
    zero_sum,
)


@custom_vjp
def gru(w_in, w_state, bias, bias_n, xs, h, valid, *, reverse, keep):
    """All states, `(time, batch, hidden)`, and the last one.

    `xs` is `(time, batch, in)`, `h` is `(batch, hidden)`, and `valid`, if not `None`, is the
    `(time, batch)` mask of the steps that count: at all others the state does not change.
    The gates are in the order reset, update, new, as in `equinox.nn.GRUCell`.
    """
    del keep
    return _forward(w_in, w_state, bias, bias_n, xs, h, valid, reverse, "states")[:2]


@compile_eager_calls
def _forward(w_in, w_state, bias, bias_n, xs, h, valid, reverse, keep):
    w_in, w_state = w_in.T, w_state.T
    products = lambda x: split_gates(matmul_steps(x, w_in, bias), 3)
    length = forward_chunk(xs, h.shape[1])

    def step(h, inputs):
        x, valid = inputs
        from_x = products(x) if length is None else x
        r, z, n, h_n = _gates(from_x, h @ w_state, bias_n)
        new = n + z * (h - n)
        h = new if valid is None else jnp.where(valid[:, None], new, h)
        return h, (h, (r, z, n, h_n) if keep == "gates" else ())

    def chunk(h, inputs, _):
        x, valid = inputs
        return jax.lax.scan(step, h, (products(x), valid), reverse=reverse)

    if length is None:
        h, (hs, gates) = jax.lax.scan(step, h, (xs, valid), reverse=reverse)
    else:
        h, (hs, gates) = scan_in_chunks(
            chunk, h, (xs, valid), chunk=length, reverse=reverse, in_place=True
        )
    return hs, h, gates


def _gates(from_x, from_state, bias_n):
    """The gates `r`, `z` and `n`, and `h_n`, which is what the state adds to `n`."""
    x_r, x_z, x_n = from_x
    h_r, h_z, h_n = split_gates(from_state, 3)
    if bias_n is not None:
        h_n = h_n + jnp.expand_dims(bias_n, range(h_n.ndim - 1))
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    return r, z, jnp.tanh(x_n + r * h_n), h_n


@gru.def_fwd
def gru_fwd(w_in, w_state, bias, bias_n, xs, h, valid, *, reverse, keep):
    args = (w_in, w_state, bias, bias_n, xs, h, valid)
    hs, last, gates = _forward(*args, reverse, keep)
    return (hs, last), (*args, hs, gates)


# The backward pass. One step is, with `x_*` and `h_*` the products of the weights with the
# input and with the state, biases included:
#
#     r = sigmoid(x_r + h_r)    z = sigmoid(x_z + h_z)    n = tanh(x_n + r h_n)
#     h' = n + z (h - n)
#
# Let d be the cotangent of h'. The cotangents of the gates' arguments are multiples of d:
#
#     of x_n:          c_x d,    c_x = (1 - z) (1 - n²)
#     of h_n:          c_n d,    c_n = c_x r
#     of x_r and h_r:  c_r d,    c_r = c_x h_n r (1 - r)
#     of x_z and h_z:  c_z d,    c_z = (h - n) z (1 - z)
#
# and the cotangent of h, with V the weights of the state, is
#
#     z d + Vᵀ [c_r d, c_z d, c_n d].
#
# The factors c_* depend on no cotangent. A loop over the steps of a chunk computes d, with one
# matrix product for each step. The factors are computed in that loop too, in which they are
# written nowhere; where a state is small, they are computed for all steps at once, before the
# loop (`is_small`). Then the gradients of weights and inputs are again one matrix product for
# all steps of the chunk.
@gru.def_bwd(symbolic_zeros=True)
@compile_eager_calls
def gru_bwd(residuals, cts, *, reverse, perturbed):
    w_in, w_state, bias, bias_n, xs, h_first, valid, hs, gates = residuals
    ct_hs, ct_last = cts
    w_in_t, w_state_t = w_in.T, w_state.T
    *perturbed_weights, perturbed_xs = perturbed[:5]
    first = is_small(h_first)
    step = ft.partial(_backward_step, w_state, factors_first=first)

    def chunk(carry, inputs, h_entry):
        d, sums = carry
        x, h_after, ct, gates, valid = inputs
        h = shift_in(h_after, h_entry, reverse=reverse)
        if not gates:
            from_x = split_gates(matmul_steps(x, w_in_t, bias), 3)
            gates = _gates(from_x, matmul_steps(h, w_state_t), bias_n)
        operands = _factors(h, gates, valid) if first else (h, gates, valid)
        d, out = jax.lax.scan(step, d, (operands, ct), reverse=not reverse)
        ct_from_h, ct_n = _cotangents(out, operands) if first else out
        ct_rz, ct_h_n = jnp.split(ct_from_h, [2 * w_state.shape[1]], -1)
        ct_from_x = jnp.concatenate([ct_rz, ct_n], -1)
        sums = add_gradients(
            sums,
            (weight_gradient, ct_from_x, x),
            (weight_gradient, ct_from_h, h),
            (bias_gradient, ct_from_x),
            (bias_gradient, ct_h_n),
        )
        return (d, sums), matmul_steps(ct_from_x, w_in) if perturbed_xs else None

    d = jnp.zeros_like(h_first) if ct_last is None else ct_last
    weights = (w_in, w_state, bias, bias_n)
    length = chunk_length(xs, hs.shape[-1])
    (d, sums), ct_xs = scan_in_chunks(
        chunk,
        (d, [zero_sum(w, p, hs) for w, p in zip(weights, perturbed_weights, strict=True)]),
        (xs, hs, ct_hs, gates, valid),
        chunk_init(hs, h_first, chunk=length, reverse=reverse),
        chunk=length,
        reverse=not reverse,
        in_place=True,
    )
    return (*sums, ct_xs, d, None)


def _factors(h: jax.Array, gates: Any, valid: jax.Array | None):
    """The factors of `d`, for one step or for all steps of a chunk. A step that does not count
    has the derivative of the identity."""
    r, z, n, h_n = gates
    c_x = (1 - z) * (1 - n * n)
    c_z = (h - n) * z * (1 - z)
    c_n = c_x * r
    c_r = c_n * h_n * (1 - r)
    if valid is not None:
        v = valid[..., None]
        c_x, c_z, c_n, c_r = (jnp.where(v, c, 0) for c in (c_x, c_z, c_n, c_r))
        z = jnp.where(v, z, 1)
    return c_r, c_z, c_x, c_n, z


def _cotangents(d, factors):
    """Those of the products with the state, and that of `x_n`."""
    c_r, c_z, c_x, c_n, _ = factors
    return jnp.concatenate([d * c_r, d * c_z, d * c_n], -1), d * c_x


def _backward_step(w_state, d, inputs, *, factors_first) -> tuple[jax.Array, Any]:
    operands, ct = inputs
    d = d if ct is None else d + ct
    factors = operands if factors_first else _factors(*operands)
    cts = _cotangents(d, factors)
    return d * factors[-1] + cts[0] @ w_state, d if factors_first else cts


@gru.def_vmap
def gru_vmap(axis_size, batched, *args, **options):
    return vmap_into_batch(gru, axis_size, batched, args, **options)
