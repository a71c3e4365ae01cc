"""A gated cell over time, with a backward pass that is split by hand.

It is fast for three reasons. For a chunk of several steps, one matrix product gives the
gradients of all weights and inputs. For a small batch, one matrix product also gives the
products of the weights with the inputs. Chunks are short enough for all intermediate values to
stay in the cache. And the loop of the backward pass is left with one matrix product, and reads
the gates only.

The cell is given by elementwise formulas (`formulas.py`), with their derivation. All else is
here.
"""

from typing import Any, NamedTuple

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
from .padding import where_valid, zero_padding


class Weights(NamedTuple):
    """`x`, `(gates, in)`, and `h`, `(gates, out)`, multiply the input and the state. `bias` is
    added to all gates, `bias_h` to what the state adds to the last one, and `out` is a
    projection of the output, `(out, hidden)`."""

    x: Any
    h: Any
    bias: Any
    bias_h: Any = None
    out: Any = None


@custom_vjp
def split_scan(w, xs, state, valid, *, formulas, reverse, keep):
    """All outputs, `(time, batch, out)`, and the last state.

    `xs` is `(time, batch, in)`, `state` a tuple of `(batch, ...)`, and `valid`, if not `None`,
    is the `(time, batch)` mask of the steps that count: at all others the state does not
    change. The backward pass recomputes the gates if `keep` is "states", not "gates".
    """
    del keep
    ys, _, last = _forward(w, xs, state, valid, formulas, reverse, ())
    return ys, last


@compile_eager_calls
def _forward(w, xs, state, valid, formulas, reverse, keep):
    """All outputs; of the rest of the states and of the gates what is kept; the last state."""
    w_t, length = _transposed(w), forward_chunk(xs, state[-1].shape[1])

    def step(state, inputs):
        x, valid = inputs
        if length is None and formulas.of_sum:
            both = matmul_of_step(x, state[0], w_t.x, w_t.h, w.bias)
            gates = formulas.gates(split_gates(both, formulas.n))
        else:
            x = _from_x(w_t, formulas, x) if length is None else x
            gates = _gates(w_t, formulas, x, state[0])
        out, *rest = formulas.next(gates, state)
        out = out if w.out is None else out @ w_t.out
        new = where_valid(valid, (out, *rest), state)
        kept = new[1:] if "states" in keep else (), gates if "gates" in keep else ()
        return new, (new[0], *kept)

    def chunk(state, inputs, _):
        x, valid = inputs
        return jax.lax.scan(step, state, (_from_x(w_t, formulas, x), valid), reverse=reverse)

    if length is None:
        last, (ys, *kept) = jax.lax.scan(step, state, (xs, valid), reverse=reverse)
    else:
        last, (ys, *kept) = scan_in_chunks(
            chunk, state, (xs, valid), chunk=length, reverse=reverse, in_place=True
        )
    return ys, kept, last


def _transposed(w):
    """The matrices transposed, once: a product in a loop with `w.T` is slower on a CPU."""
    return w._replace(x=w.x.T, h=w.h.T, out=None if w.out is None else w.out.T)


def _from_x(w_t, formulas, x):
    """The part of each gate from the input, for one step or for all steps of a chunk at
    once."""
    return split_gates(matmul_steps(x, w_t.x, w_t.bias), formulas.n)


def _gates(w_t, formulas, from_x, h):
    *from_h, last = split_gates(matmul_steps(h, w_t.h), formulas.n)
    if w_t.bias_h is not None:
        last = last + jnp.expand_dims(w_t.bias_h, range(last.ndim - 1))
    from_h = *from_h, last
    if formulas.of_sum:
        return formulas.gates([x + h for x, h in zip(from_x, from_h, strict=True)])
    return formulas.gates(from_x, from_h)


@split_scan.def_fwd
def _split_scan_fwd(w, xs, state, valid, *, formulas, reverse, keep):
    kept = ("states", "gates") if keep == "gates" and not formulas.of_states else ("states",)
    ys, (rest, gates), last = _forward(w, xs, state, valid, formulas, reverse, kept)
    return (ys, last), (w, xs, state, valid, (ys, *rest), gates)


# A loop over the steps of a chunk computes the cotangents of the states, with one matrix
# product for each step:
#
#     d_state = (direct part) + Vᵀ d_h
#
# The factors depend on no cotangent. They are computed in that loop, in which they are written
# nowhere; where a state is small, they are computed for all steps at once, before the loop, and
# so are the cotangents of the gates after it (`is_small`), unless there is one factor, made of
# states. Then the gradients of weights and inputs are one matrix product for all steps of the
# chunk.
@split_scan.def_bwd(symbolic_zeros=True)
@compile_eager_calls
def _split_scan_bwd(residuals, cts, *, formulas, reverse, perturbed):
    w, xs, first, valid, states, gates = residuals
    ct_ys, ct_last = cts
    w_t, small = _transposed(w), is_small(first[0]) and not formulas.of_states

    def step(d, inputs):
        operands, ct, valid = inputs
        d = (d[0] if ct is None else d[0] + ct, *d[1:])
        factors = operands if small else formulas.factors(*operands)
        ct_h, ct_x, direct = _pull(w, formulas, d, factors, valid)
        through = ct_h @ w.h
        first = through if direct[0] is None else direct[0] + through
        before = where_valid(valid, (first, *direct[1:]), d)
        return before, d if small else (ct_h, ct_x, None if w.out is None else d[0])

    def chunk(carry, inputs, entries):
        d, sums = carry
        x, after, gates, ct, valid = inputs
        before = jax.tree.map(lambda a, e: shift_in(a, e, reverse=reverse), after, entries)
        if not (gates or formulas.of_states):
            gates = _gates(w_t, formulas, _from_x(w_t, formulas, x), before[0])
        operands = (gates, before, after)
        if small:
            operands = formulas.factors(*operands)
        d, out = jax.lax.scan(step, d, (operands, ct, valid), reverse=not reverse)
        if small:
            out = (*_pull(w, formulas, out, operands, valid)[:2], out[0])
        ct_h, ct_last_x, ct_out = out
        others, ct_last_h = jnp.split(
            ct_h, [ct_h.shape[-1] * (formulas.n - 1) // formulas.n], -1
        )
        ct_x = ct_h if ct_last_x is None else jnp.concatenate([others, ct_last_x], -1)
        unprojected = None if w.out is None else formulas.next(gates, before)[0]
        sums = add_gradients(
            sums,
            (weight_gradient, ct_x, x),
            (weight_gradient, ct_h, before[0]),
            (bias_gradient, ct_x),
            (bias_gradient, ct_last_h),
            (weight_gradient, zero_padding(ct_out, valid), unprojected),
        )
        return (d, sums), matmul_steps(ct_x, w.x) if perturbed[1] else None

    pairs = zip(first, ct_last, strict=True)
    d = tuple(jnp.zeros_like(s) if ct is None else ct for s, ct in pairs)
    length = chunk_length(xs, first[-1].shape[1])
    init = lambda after, first: chunk_init(after, first, chunk=length, reverse=reverse)
    (d, sums), ct_xs = scan_in_chunks(
        chunk,
        (d, [zero_sum(x, p, states[0]) for x, p in zip(w, perturbed[0], strict=True)]),
        (xs, states, gates, ct_ys, valid),
        tuple(map(init, states, first)),
        chunk=length,
        reverse=not reverse,
        in_place=True,
    )
    return Weights(*sums), ct_xs, d, None


def _pull(w, formulas, d, factors, valid):
    """From the cotangents of the states after a step, or after all steps of a chunk, three
    cotangents: of the part of the gates from the states before; of the part of the last gate
    from the input, if it differs; and of the states before, without the part through the
    gates."""
    if w.out is not None:
        d = (d[0] @ w.out, *d[1:])
    cts, last_x, direct = formulas.pull(d, factors)
    return zero_padding(jnp.concatenate(cts, -1), valid), zero_padding(last_x, valid), direct


@split_scan.def_vmap
def _split_scan_vmap(axis_size, batched, *args, **options):
    return vmap_into_batch(split_scan, axis_size, batched, args, **options)
