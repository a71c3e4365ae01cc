"""A vanilla recurrent network over time, with a backward pass written by hand.

Chunked over time as `gru_vjp.py` is.
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
    forward_chunk,
    matmul_of_step,
    matmul_steps,
    vmap_into_batch,
    weight_gradient,
    zero_sum,
)


ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}
_SLOPES = {"tanh": lambda h: 1 - h * h, "relu": lambda h: (h > 0).astype(h.dtype)}


@custom_vjp
def rnn(w_in, w_state, bias, xs, h, valid, *, reverse, activation):
    """All states, `(time, batch, hidden)`, and the last one. Arguments as in `gru`."""
    return _forward(w_in, w_state, bias, xs, h, valid, reverse, activation)


@compile_eager_calls
def _forward(w_in, w_state, bias, xs, h, valid, reverse, activation):
    w_in, w_state = w_in.T, w_state.T
    length = forward_chunk(xs, h.shape[1])

    def step(h, inputs):
        x, valid = inputs
        if length is None:
            argument = matmul_of_step(x, h, w_in, w_state, bias)
        else:
            argument = x + h @ w_state
        new = ACTIVATIONS[activation](argument)
        h = new if valid is None else jnp.where(valid[:, None], new, h)
        return h, h

    def chunk(h, inputs, _):
        x, valid = inputs
        return jax.lax.scan(step, h, (matmul_steps(x, w_in, bias), valid), reverse=reverse)

    if length is None:
        last, hs = jax.lax.scan(step, h, (xs, valid), reverse=reverse)
    else:
        last, hs = scan_in_chunks(
            chunk, h, (xs, valid), chunk=length, reverse=reverse, in_place=True
        )
    return hs, last


@rnn.def_fwd
def rnn_fwd(w_in, w_state, bias, xs, h, valid, *, reverse, activation):
    options = {"reverse": reverse, "activation": activation}
    hs, last = rnn(w_in, w_state, bias, xs, h, valid, **options)
    return (hs, last), (w_in, w_state, bias, xs, h, valid, hs)


# The backward pass. With d the cotangent of h' = phi(a), a = W x + V h + b:
#
#     cotangent of a:  s d,    s = phi'(a)
#     cotangent of h:  Vᵀ (s d)
#
# The slope s is a function of h' for either phi: 1 - h'² and h' > 0. So the states are the only
# residuals of the recurrence.
@rnn.def_bwd(symbolic_zeros=True)
@compile_eager_calls
def rnn_bwd(residuals, cts, *, reverse, activation, perturbed):
    w_in, w_state, bias, xs, h_first, valid, hs = residuals
    ct_hs, ct_last = cts
    *perturbed_weights, perturbed_xs = perturbed[:4]
    step = ft.partial(_backward_step, w_state)

    def chunk(carry, inputs, h_entry):
        d, sums = carry
        x, h_after, ct, valid = inputs
        slope = _SLOPES[activation](h_after)
        if valid is not None:
            slope = jnp.where(valid[:, :, None], slope, 0)
        d, ct_a = jax.lax.scan(step, d, (slope, ct, valid), reverse=not reverse)
        h = shift_in(h_after, h_entry, reverse=reverse)
        sums = add_gradients(
            sums,
            (weight_gradient, ct_a, x),
            (weight_gradient, ct_a, h),
            (bias_gradient, ct_a),
        )
        return (d, sums), matmul_steps(ct_a, w_in) if perturbed_xs else None

    d = jnp.zeros_like(h_first) if ct_last is None else ct_last
    weights = (w_in, w_state, bias)
    length = chunk_length(xs, hs.shape[-1])
    (d, sums), ct_xs = scan_in_chunks(
        chunk,
        (d, [zero_sum(w, p, hs) for w, p in zip(weights, perturbed_weights, strict=True)]),
        (xs, hs, ct_hs, valid),
        chunk_init(hs, h_first, chunk=length, reverse=reverse),
        chunk=length,
        reverse=not reverse,
        in_place=True,
    )
    return (*sums, ct_xs, d, None)


def _backward_step(w_state, d, inputs):
    slope, ct, valid = inputs
    d = d if ct is None else d + ct
    ct_a = d * slope
    ct_h = ct_a @ w_state
    return ct_h if valid is None else jnp.where(valid[:, None], ct_h, d), ct_a


@rnn.def_vmap
def rnn_vmap(axis_size, batched, *args, **options):
    return vmap_into_batch(rnn, axis_size, batched, args, **options)
