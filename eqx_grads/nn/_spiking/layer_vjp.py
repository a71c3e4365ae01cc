"""Spiking neurons over time, with a backward pass written by hand.

Chunked over time as `_recurrent/gru_vjp.py` is. The residuals of the recurrence are the spikes,
which are the outputs, and the membrane potentials of all steps or of those before each chunk;
the backward pass recomputes the others. It also recomputes the slopes of the surrogate, the
currents and the adaptation.
"""

import functools as ft
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..._control_flow import compile_eager_calls
from ..._control_flow.chunked_scan import (
    chunk_init,
    near_divisor,
    scan_in_chunks,
    shift_in,
    Size,
    size_or,
)
from ..._rules.custom_vjp import custom_vjp
from ...surrogates import spike
from .._recurrent.chunked_matmuls import (
    add_gradients,
    bias_gradient,
    matmul_steps,
    vmap_into_batch,
    weight_gradient,
    zero_sum,
)
from .dynamics import decayed, Dynamics, NeuronState, over_threshold, reset_by, step


def chunk_length(xs: Array, hidden_size: int) -> Size:
    """The number of steps of a chunk: all of them if their potentials fit in the cache.
    Otherwise enough rows for a matrix product to be efficient, and no more, as a chunk has
    about eight arrays of intermediate values."""
    steps, batch = xs.shape[0], size_or(xs.shape[1], 64)
    per_step = max(batch, 1) * hidden_size * xs.dtype.itemsize
    if size_or(steps * per_step, 2**21) <= 2**20:
        return max(steps, 1)
    fits = max(2**17 / per_step, 320 / max(batch, 1))
    return near_divisor(steps, min(fits, 128))


@custom_vjp
def spiking(w_in, bias, w_state, dynamics, xs, state, valid, *, reverse, keep):
    """The outputs of all steps, `(time, batch, hidden)`, and the last state.

    `xs` is `(time, batch, in)` and `valid`, if not `None`, is the `(time, batch)` mask of the
    steps that count: at all others the state does not change. Without `w_in`, the inputs are
    the currents. The outputs are the spikes, or the potentials of neurons that do not spike.
    """
    del keep
    args = (w_in, bias, w_state, dynamics, xs, state, valid)
    (ys, _, _), last = _forward(*args, reverse, "spikes")
    return ys, last


@compile_eager_calls
def _forward(w_in, bias, w_state, dynamics, xs, state, valid, reverse, keep):
    """The outputs and, if they are kept, the potentials of all steps; the rest of the states
    before each chunk; the last state."""
    keeps_all = keep == "membranes" and dynamics.threshold is not None

    def one(state, inputs):
        x, valid = inputs
        if w_state is not None:
            x = x + state.spikes.astype(x.dtype) @ w_state.T
        new = _next_state(dynamics, x, state, valid)
        return new, (_outputs(new), new.membrane if keeps_all else None)

    def chunk(state, inputs, _):
        x, valid = inputs
        last, (ys, membranes) = jax.lax.scan(
            one, state, (_from_inputs(w_in, bias, x), valid), reverse=reverse
        )
        entry = state._replace(spikes=None, membrane=None if keeps_all else state.membrane)
        return last, (ys, membranes, jax.tree.map(lambda s: s[None], entry))

    length = chunk_length(xs, state.membrane.shape[1])
    last, kept = scan_in_chunks(
        chunk, state, (xs, valid), chunk=length, reverse=reverse, in_place=True
    )
    return kept, last


def _from_inputs(w_in, bias, x):
    """What the inputs add to the currents, for all steps of a chunk at once."""
    return x if w_in is None else matmul_steps(x, w_in.T, bias)


def _next_state(dynamics, x, state, valid):
    """A step of all examples, in the dtypes of the state."""
    wide = jax.tree.map(lambda s: s.astype(x.dtype), state)
    new = jax.vmap(step, (None, 0, 0))(dynamics, x, wide).cast_like(state)
    if valid is None:
        return new
    return jax.tree.map(lambda n, s: jnp.where(valid[:, None], n, s), new, state)


def _outputs(state):
    return state.membrane if state.spikes is None else state.spikes


@spiking.def_fwd
def spiking_fwd(w_in, bias, w_state, dynamics, xs, state, valid, *, reverse, keep):
    args = (w_in, bias, w_state, dynamics, xs, state, valid)
    kept, last = _forward(*args, reverse, keep)
    return (kept[0], last), (*args, *kept)


# The backward pass. One step is, with the symbols of `LIFCell`, `ALIFCell` and `CuBaLIFCell`,
# the current V s + x of a recurrent network, and r for the spikes of the reset:
#
#     i' = alpha i + x + V s            (without synaptic currents, i' = x + V s)
#     a' = rho a + s
#     u' = beta (1 - r) u + i'          or, if it subtracts,  u' = beta u + i' - theta r
#     v' = u' - theta - gamma a'        s' = step(v')
#
# Let S, U, I, A be the cotangents of s', u', i', a', from later steps and from the output, and
# g the slope of the surrogate at v'. In this order,
#
#     cotangent of v':  g S,    U += g S,    A -= gamma g S,    I += U,
#
# and the cotangents of the state before the step are
#
#     of u:  beta (1 - r) U, or beta U             of i:  alpha I             of a:  rho A
#     of s:  A + Vᵀ I, and unless the reset is detached  - beta u U, or - theta U
#
# The slopes g do not depend on a cotangent: they are computed for all steps of a chunk at once.
# Then a loop over the steps computes I, and S, U and A if they are needed. Then the gradients
# of weights, inputs and constants are one matrix product, or one sum, for the chunk.
@spiking.def_bwd(symbolic_zeros=True)
@compile_eager_calls
def spiking_bwd(residuals, cts, *, reverse, perturbed):
    w_in, bias, w_state, dynamics, xs, first, valid, ys, membranes, entries = residuals
    ct_ys, ct_last = cts
    learned = perturbed[3]
    back = ft.partial(_backward_step, dynamics, w_state, _wanted(dynamics, learned))
    recompute = ft.partial(_membranes, w_in, bias, w_state, dynamics, reverse=reverse)

    def chunk(carry, inputs, entry):
        ct_state, sums, ct_surrogate = carry
        x, y, membrane, ct_y, valid = inputs
        ct_y = None if ct_y is None else ct_y.astype(x.dtype)
        if membrane is None:
            membrane = recompute(x, y, entry, valid)
        before, after = _states_of_chunk(
            dynamics, y, membrane, entry, first.current, valid, x.dtype, reverse
        )
        slope, ct_output = _slopes(dynamics, after, valid), ct_y
        if ct_state.spikes is None and slope is not None:
            # One array for the loop to read, not two.
            slope, ct_output = None if ct_y is None else slope * ct_y, None
        inputs = (_for_reset(dynamics, before), slope, ct_output, valid)
        step = lambda ct, inputs: jax.vmap(back)(ct, inputs[0])
        counted = inputs, x[:, :0]  # says how many steps there are, even without inputs
        ct_state, cts = jax.lax.scan(step, ct_state, counted, reverse=not reverse)
        sums = add_gradients(
            sums,
            (weight_gradient, cts.x, x),
            (bias_gradient, cts.x),
            (weight_gradient, cts.x, before.spikes),
            *_constant_gradients(dynamics, cts, before),
        )
        ct_spikes = _masked(ct_y, valid) if ct_state.spikes is None else cts.spikes
        ct_surrogate = _add_surrogate(ct_surrogate, dynamics, learned, after, ct_spikes)
        if not perturbed[4]:
            return (ct_state, sums, ct_surrogate), None
        ct_x = cts.x if w_in is None else matmul_steps(cts.x, w_in)
        return (ct_state, sums, ct_surrogate), ct_x

    length = chunk_length(xs, ys.shape[2])
    init = ft.partial(chunk_init, chunk=length, reverse=reverse)
    if membranes is not None:
        entries = entries._replace(membrane=init(membranes, first.membrane))
    carry = (
        _last_cotangents(dynamics, w_state, ct_last, first, valid, xs.dtype),
        _zero_sums((w_in, bias, w_state), dynamics, perturbed, ys),
        jax.tree.map(jnp.zeros_like, eqx.filter(dynamics.surrogate, learned.surrogate)),
    )
    (ct_state, sums, ct_surrogate), ct_xs = scan_in_chunks(
        chunk,
        carry,
        (xs, ys, membranes, ct_ys, valid),
        entries._replace(spikes=None if first.spikes is None else init(ys, first.spikes)),
        chunk=length,
        reverse=not reverse,
        in_place=True,
    )
    return (*sums[:3], _like(dynamics, sums[3:], ct_surrogate), ct_xs, ct_state, None)


def _last_cotangents(d, w_state, ct_last, first, valid, dtype):
    """The cotangents of the last state, as the loop carries them. That of spikes is `None` if
    nothing after a step has a gradient with respect to its spikes, but for the output."""
    zero = jnp.zeros_like(first.membrane, dtype)
    of = lambda ct: zero if ct is None else ct.astype(dtype)
    through_reset = d.reset != "none" and not d.detach_reset
    has_spikes = d.threshold is not None and (
        through_reset
        or w_state is not None
        or d.rho is not None
        or valid is not None
        or ct_last.spikes is not None
    )
    return NeuronState(
        of(ct_last.spikes) if has_spikes else None,
        of(ct_last.membrane),
        None if d.alpha is None else of(ct_last.current),
        None if d.rho is None else of(ct_last.adaptation),
    )


class _StepCotangents(NamedTuple):
    """Cotangents of one step: of its input, and of what is computed from that in turn."""

    x: Any
    membrane: Any
    over_threshold: Any
    spikes: Any
    current: Any
    adaptation: Any


def _wanted(d, learned):
    """Which of them are needed after the loop."""
    is_learned = lambda flags: any(f is True for f in jax.tree.leaves(flags))
    return _StepCotangents(
        x=True,
        membrane=is_learned((learned.beta, learned.threshold)),
        over_threshold=is_learned(learned.threshold),
        spikes=is_learned(learned.surrogate),
        current=is_learned(learned.alpha),
        adaptation=is_learned(learned.rho),
    )


def _for_reset(d, before):
    """The part of the states that the loop backward needs."""
    is_zero = d.reset == "zero"
    return (
        before.spikes if is_zero else None,
        before.membrane if is_zero and not d.detach_reset else None,
    )


def _backward_step(d, w_state, wanted, ct_state, inputs):
    """From the cotangents of the state after a step to those before it, of one example."""
    (spikes, membrane), slope, ct_y, valid = inputs
    ct_s, ct_u, ct_i, ct_a = ct_state
    ct_v = None
    if d.threshold is None:
        ct_u = _add(ct_u, ct_y)
    else:
        ct_s = _add(ct_s, ct_y)
        ct_v = slope if ct_s is None or slope is None else slope * ct_s
    after = NeuronState(ct_s if ct_state.spikes is not None else None, ct_u, ct_i, ct_a)
    ct_u = _add(ct_u, ct_v)
    if ct_a is not None and ct_v is not None:
        ct_a = ct_a - d.strength * ct_v
    ct_i = ct_u if ct_i is None else ct_i + ct_u
    of_step = _StepCotangents(ct_i, ct_u, ct_v, ct_s, ct_i, ct_a)
    keep = lambda ct, is_wanted: _masked(ct, valid) if is_wanted else None
    of_step = _StepCotangents(*map(keep, of_step, wanted))

    ct_decayed = ct_u
    if d.reset == "zero":
        ct_decayed = ct_decayed * (1 - reset_by(d, spikes))
    before = NeuronState(
        None
        if after.spikes is None
        else _spikes_before(d, w_state, ct_u, ct_i, ct_a, membrane),
        d.beta * ct_decayed,
        None if d.alpha is None else d.alpha * ct_i,
        None if d.rho is None else d.rho * ct_a,
    )
    if valid is not None:
        before = jax.tree.map(lambda b, a: jnp.where(valid, b, a), before, after)
    return before, of_step


def _spikes_before(d, w_state, ct_u, ct_i, ct_a, membrane):
    """The cotangent of the spikes before a step: through the adaptation, the recurrent
    connections and the reset."""
    total = jnp.zeros_like(ct_u) if ct_a is None else ct_a
    if w_state is not None:
        total = total + ct_i @ w_state
    if d.reset == "zero" and not d.detach_reset:
        total = total - d.beta * (membrane * ct_u)
    if d.reset == "subtract" and not d.detach_reset:
        total = total - d.threshold * ct_u
    return total


def _add(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _masked(ct, valid):
    """Zero at steps that do not count. The mask has the first axes of `ct`."""
    if ct is None or valid is None:
        return ct
    return jnp.where(jnp.expand_dims(valid, range(valid.ndim, ct.ndim)), ct, 0)


# ---------------------------------------------------------------- the states of a chunk


def _membranes(w_in, bias, w_state, d, x, y, entry, valid, *, reverse):
    """The potentials after each step, computed again. The spikes are those of the forward pass,
    as rounding might change them."""
    if d.threshold is None:
        return y
    currents = _from_inputs(w_in, bias, x)
    if w_state is not None:
        before = shift_in(y, entry.spikes, reverse=reverse)
        currents = currents + matmul_steps(before.astype(x.dtype), w_state.T)

    def one(state, inputs):
        x, y, valid = inputs
        new = _next_state(d, x, state, valid)._replace(spikes=y)
        return new, new.membrane

    return jax.lax.scan(one, entry, (currents, y, valid), reverse=reverse)[1]


def _states_of_chunk(d, y, membrane, entry, first_current, valid, dtype, reverse):
    """The states before and after each step, in the dtype of the computation."""
    shift = lambda s, first: shift_in(s, first, reverse=reverse).astype(dtype)
    spikes = None if d.threshold is None else shift(y, entry.spikes)
    before = NeuronState(spikes, shift(membrane, entry.membrane), None, None)
    after = NeuronState(None, membrane.astype(dtype), None, None)
    if d.alpha is not None:
        current = _over_steps(_current_of_step)(d, before, after.membrane)
        if valid is not None:
            current = jnp.where(valid[:, :, None], current, first_current[None].astype(dtype))
        before = before._replace(current=shift(current, entry.current.astype(dtype)))
    if d.rho is not None:
        first = entry.adaptation.astype(dtype)
        adaptation = _adaptations(d, before.spikes, first, valid, reverse)
        before = before._replace(adaptation=shift(adaptation, first))
        after = after._replace(adaptation=adaptation)
    return before, after


def _over_steps(fn):
    """`fn(dynamics, *arrays)`, which is of one step of one example, over all of a chunk."""

    def of_chunk(d, *arrays):
        axes = (None, *(0 for _ in arrays))
        return jax.vmap(jax.vmap(fn, axes), axes)(d, *arrays)

    return of_chunk


def _current_of_step(d, before, membrane):
    """The current that was added to the potential, from the potentials before and after."""
    current = membrane - decayed(d, before)
    if d.reset == "subtract":
        current = current + reset_by(d, before.spikes) * d.threshold
    return current


def _adaptations(d, spikes, first, valid, reverse):
    """The adaptation after each step."""

    def one(a, inputs):
        s, valid = inputs
        new = jax.vmap(lambda rho, a, s: rho * a + s, (None, 0, 0))(d.rho, a, s)
        new = new if valid is None else jnp.where(valid[:, None], new, a)
        return new, new

    return jax.lax.scan(one, first, (spikes, valid), reverse=reverse)[1]


def _slopes(d, after, valid):
    """The slopes of the surrogate, zero at steps that do not count."""
    return None if d.threshold is None else _masked(_over_steps(_slope)(d, after), valid)


def _slope(d, after):
    v = over_threshold(d, after.membrane, after.adaptation)
    return jax.jvp(lambda v: spike(v, d.surrogate), (v,), (jnp.ones_like(v),))[1]


# ---------------------------------------------------------------- gradients of the constants


_CONSTANTS = ("beta", "alpha", "rho", "threshold")


def _zero_sums(weights, dynamics, perturbed, ys):
    """The sums over no steps, of the weights and then of `_CONSTANTS`."""
    sums = [zero_sum(w, p, ys) for w, p in zip(weights, perturbed[:3], strict=True)]
    for name in _CONSTANTS:
        constant = getattr(dynamics, name)
        # One for each neuron. The sum over these, for a single constant, is the decorator's.
        neurons = None if constant is None else jnp.zeros_like(ys, shape=ys.shape[2:])
        sums.append(zero_sum(neurons, getattr(perturbed[3], name), ys))
    return sums


def _like(dynamics, constants, surrogate):
    """Cotangents of `_CONSTANTS` and of the surrogate, as those of the `Dynamics`."""
    return Dynamics(
        **dict(zip(_CONSTANTS, constants, strict=True)),
        surrogate=surrogate,
        reset=dynamics.reset,
        detach_reset=dynamics.detach_reset,
    )


def _constant_gradients(d, cts, before):
    """The gradients of `_CONSTANTS`, as `add_gradients` takes them."""
    product = lambda ct, x: bias_gradient(ct * x)
    return (
        (lambda: bias_gradient(cts.membrane * _over_steps(_before_decay)(d, before)),),
        (product, cts.current, before.current),
        (product, cts.adaptation, before.adaptation),
        (lambda: _threshold_gradient(d, cts, before),),
    )


def _before_decay(d, before):
    if d.reset == "zero":
        return before.membrane * (1 - reset_by(d, before.spikes))
    return before.membrane


def _threshold_gradient(d, cts, before):
    total = jnp.zeros_like(cts.membrane)
    if cts.over_threshold is not None:
        total = total - cts.over_threshold
    if d.reset == "subtract":
        total = total - reset_by(d, before.spikes) * cts.membrane
    return bias_gradient(total)


def _add_surrogate(total, d, learned, after, ct_spikes):
    """Add the gradient of the surrogate's fields that are learned."""
    if ct_spikes is None or not jax.tree.leaves(total):
        return total
    fields, rest = eqx.partition(d.surrogate, learned.surrogate)

    def spikes(fields):
        with_fields = eqx.tree_at(lambda d: d.surrogate, d, eqx.combine(fields, rest))
        fire = lambda d, s: spike(over_threshold(d, s.membrane, s.adaptation), d.surrogate)
        return _over_steps(fire)(with_fields, after)

    return jax.tree.map(jnp.add, total, jax.vjp(spikes, fields)[1](ct_spikes)[0])


@spiking.def_vmap
def spiking_vmap(axis_size, batched, *args, **options):
    return vmap_into_batch(spiking, axis_size, batched, args, **options)
