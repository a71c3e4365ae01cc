"""Spiking neurons over time, with a backward pass that is split by hand.

It is chunked over time as the backward pass of gated cells is. The residuals of the recurrence
are the spikes, which are the outputs, and the potentials less the adaptation. From these, the
backward pass computes all else that it needs.
"""

import dataclasses
import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ..._control_flow import compile_eager_calls
from ..._control_flow.accelerators import steps_of_chunk
from ..._control_flow.chunked_scan import (
    chunk_init,
    near_divisor,
    scan_in_chunks,
    shift_in,
    Size,
    size_or,
)
from ..._rules.custom_vjp import custom_vjp
from ..._rules.explicit_sharding import distribute_like, explicit_spec
from ..._rules.float_args import widen
from .._recurrent.chunked_matmuls import (
    add_gradients,
    bias_gradient,
    matmul_steps,
    vmap_into_batch,
    weight_gradient,
    zero_sum,
)
from .._recurrent.padding import where_valid, zero_padding
from .dynamics import fire, integrate, LIFState, step


def chunk_length(xs: Array, neurons: int) -> Size:
    """The number of steps of a chunk: all of them if their potentials fit in the cache.
    Otherwise enough rows for a matrix product to be efficient, and no more, as a chunk has
    about eight arrays of intermediate values."""
    steps, batch = xs.shape[0], size_or(xs.shape[1], 64)
    per_step = max(batch, 1) * neurons * xs.dtype.itemsize
    if size_or(steps * per_step, 2**21) <= 2**20:
        return max(steps, 1)
    fits = max(2**17 / per_step, 448 / max(batch, 1))
    return steps_of_chunk(steps, 8 * per_step, near_divisor(steps, min(fits, 128)))


@custom_vjp
def spiking_scan(w_in, bias, w_state, dynamics, xs, state, valid, *, reverse):
    """The outputs of all steps, `(time, batch, *hidden)`, and the last state.

    `xs` is `(time, batch, in)` and `valid`, if not `None`, is the `(time, batch)` mask of the
    steps that count: at all others the state does not change, and the output is not used.
    Without `w_in`, the inputs are the currents, `(time, batch, *hidden)`. The outputs are the
    spikes, or the potentials of neurons that do not spike.
    """
    args = (w_in, bias, w_state, dynamics, xs, state, valid)
    (ys, _, _), last = _forward(*args, reverse, keeps_potentials=False)
    return ys, last


@compile_eager_calls
def _forward(w_in, bias, w_state, d, xs, state, valid, reverse, keeps_potentials):
    """The outputs and, if they are kept, the potentials less the adaptation of all steps; the
    rest of the states before each chunk; the last state."""

    def one(state, inputs):
        x, valid = inputs
        if w_state is not None:
            x = x + state.spikes @ w_state.T
        # By `vmap`, as a surrogate of the user may be a function of the neurons of one example.
        new = jax.vmap(step, (None, 0, 0))(d, x, state)
        new = where_valid(valid, new, state)
        outputs = new.membrane if d.threshold is None else new.spikes
        return new, (outputs, _less_adaptation(d, new) if keeps_potentials else None)

    def chunk(state, inputs, _):
        x, valid = inputs
        x = x if w_in is None else matmul_steps(x, w_in.T, bias)
        last, kept = jax.lax.scan(one, state, (x, valid), reverse=reverse)
        entry = state.current, state.adaptation
        return last, (*kept, jax.tree.map(lambda s: s[None], entry))

    length = chunk_length(xs, math.prod(state.membrane.shape[1:]))
    last, kept = scan_in_chunks(
        chunk, state, (xs, valid), chunk=length, reverse=reverse, in_place=True
    )
    return kept, last


def _less_adaptation(d, state):
    """By how much the potential exceeds the adaptation. The spike depends on nothing else, so
    that the backward pass need not compute the adaptation if no constant is learned."""
    if d.rho is None:
        return state.membrane
    return jax.vmap(lambda u, a: u - d.strength * a)(state.membrane, state.adaptation)


@spiking_scan.def_fwd
def spiking_scan_fwd(w_in, bias, w_state, dynamics, xs, state, valid, *, reverse):
    args = (w_in, bias, w_state, dynamics, xs, state, valid)
    kept, last = _forward(*args, reverse, keeps_potentials=dynamics.threshold is not None)
    return (kept[0], last), (*args, *kept)


# The backward pass. A step is two functions: `integrate` gives the potentials, currents and
# traces u', i', a', and `fire` the spikes s' = step(v'), where v' = u' - theta - gamma a'. Let
# S, U, I, A be the cotangents of s', u', i', a', from later steps and from the output, and g
# the slope of the surrogate at v'. Then
#
#     V = g S is the cotangent of v',    U += V,    A -= gamma V,
#
# and the transpose of `integrate`, which is linear, maps (U, I, A) to the cotangents of the
# state before the step and of x. The cotangent of s gets V^T X for the recurrent connections.
#
# The slopes g do not depend on a cotangent: they are computed for all steps of a chunk at once.
# Then a loop over the steps computes the cotangents. Then the gradients of weights, inputs and
# constants are one matrix product, or one sum, for the chunk.
@spiking_scan.def_bwd(symbolic_zeros=True)
@compile_eager_calls
def spiking_scan_bwd(residuals, cts, *, reverse, perturbed):
    w_in, bias, w_state, d, xs, first, valid, ys, potentials, entries = residuals
    ct_ys, ct_last = cts
    weights, potentials = (w_in, bias, w_state), ys if potentials is None else potentials
    last = _last_cotangents(d, w_state, first, ct_last)
    carries_spikes = last.spikes is not None
    constant_sums = jax.tree.map(lambda p, c: zero_sum(c, p, ys), perturbed[3], d)
    learns = bool(jax.tree.leaves(constant_sums))

    back = ft.partial(_backward_step, d, w_state, learns)

    def chunk(carry, inputs, entry):
        ct_state, sums, constant_sums = carry
        x, y, potential, ct_y, valid = inputs
        before, after = _states_of_chunk(d, y, potential, entry, first, valid, reverse)
        slope = None if d.threshold is None else _of_each(_slope)(d, potential)
        ct_spikes = None if d.threshold is None else zero_padding(ct_y, valid)
        loop_ct = ct_y
        if d.threshold is not None and not carries_spikes:
            # One array for the loop to read, not two.
            slope, loop_ct = None if ct_y is None else slope * ct_y, None
        inputs = (before, slope, loop_ct, valid)
        ct_state, (ct_x, of_steps) = jax.lax.scan(back, ct_state, inputs, reverse=not reverse)
        sums = add_gradients(
            sums,
            (weight_gradient, ct_x, x),
            (bias_gradient, ct_x),
            (weight_gradient, ct_x, before.spikes),
        )
        if learns:
            ct_after, carried = of_steps
            cts = ct_after, carried if carries_spikes else ct_spikes
            gradients = _constant_gradients(d, constant_sums, before, after, cts)
            add = lambda s, g: s + distribute_like(g, s, explicit_spec(s))
            constant_sums = jax.tree.map(add, constant_sums, gradients)
        if not perturbed[4]:
            ct_x = None
        elif w_in is not None:
            ct_x = matmul_steps(ct_x, w_in)
        return (ct_state, sums, constant_sums), ct_x

    length = chunk_length(xs, math.prod(ys.shape[2:]))
    init = ft.partial(chunk_init, chunk=length, reverse=reverse)
    starts = None if first.spikes is None else init(ys, first.spikes)
    entries = (starts, init(potentials, _less_adaptation(d, first)), *entries)
    sums = [zero_sum(w, p, ys) for w, p in zip(weights, perturbed[:3], strict=True)]
    (ct_state, sums, constant_sums), ct_xs = scan_in_chunks(
        chunk,
        (last, sums, constant_sums),
        (xs, ys, potentials, ct_ys, valid),
        entries,
        chunk=length,
        reverse=not reverse,
        in_place=True,
    )
    return (*sums, constant_sums, ct_xs, ct_state, None)


def _last_cotangents(d, w_state, first, ct_last):
    """The cotangents of the last state, as the loop carries them. The spikes have `None` if
    nothing after a step depends on them but the output and a reset that is detached."""
    depends = not d.detach_reset or w_state is not None or d.rho is not None
    if not (depends or ct_last.spikes is not None):
        first = dataclasses.replace(first, spikes=None)
    zero = jnp.zeros_like(first.membrane)
    cotangent = lambda s, ct: None if s is None else zero if ct is None else ct
    return jax.tree.map(cotangent, first, ct_last, is_leaf=lambda x: x is None)


def _backward_step(d, w_state, learns, ct, inputs):
    """From the cotangents of the state after a step to the cotangents of the state before it;
    the cotangents of the input and, if a constant is learned, of the results of `integrate` and
    `fire`. If spikes are not carried, `slope` is multiplied with their cotangent already."""
    before, slope, ct_y, valid = inputs
    ct_membrane, ct_adaptation, ct_spikes = ct.membrane, ct.adaptation, None
    if d.threshold is None:
        ct_membrane = _add(ct_membrane, ct_y)
    elif slope is not None:
        if ct.spikes is not None:
            ct_spikes = _add(ct.spikes, ct_y)
            slope = slope * ct_spikes
        ct_membrane = ct_membrane + slope
        if ct_adaptation is not None:
            less = lambda ct, v: ct - d.strength * v
            ct_adaptation = jax.vmap(less)(ct_adaptation, slope)
    after = LIFState(None, ct_membrane, ct.current, ct_adaptation)
    integrate_batch = jax.vmap(ft.partial(integrate, d))
    _, transpose = jax.vjp(integrate_batch, jnp.zeros_like(ct_membrane), before)
    ct_x, ct_before = transpose(after)
    ct_spikes_before = None
    if ct.spikes is not None:
        through_weights = 0 if w_state is None else ct_x @ w_state
        ct_spikes_before = ct_before.spikes + through_weights
    ct_before = dataclasses.replace(ct_before, spikes=ct_spikes_before)
    of_step = ct_x, (after, ct_spikes) if learns else None
    masked = zero_padding(of_step, valid)
    return where_valid(valid, ct_before, ct), masked


def _add(a: Any, b: Any) -> Any:
    return a if b is None else a + b


def _of_each(fn):
    """`fn(dynamics, state)`, which is a function of one step of one example, over a chunk."""
    return jax.vmap(jax.vmap(fn, (None, 0)), (None, 0))


def _states_of_chunk(d, y, potential, entry, first, valid, reverse):
    """The states before and after each step. Unused parts are not computed."""
    spikes, potential_before, current_before, adaptation_before = entry
    shift = ft.partial(shift_in, reverse=reverse)
    spikes = None if d.threshold is None else shift(y, spikes)
    before = LIFState(spikes, shift(potential, potential_before))
    after = LIFState(None, potential)
    if d.rho is not None:

        def one(a, inputs):
            s, valid = inputs
            new = where_valid(valid, jax.vmap(lambda a, s: d.rho * a + s)(a, s), a)
            return new, new

        def add(state, a):
            added = _of_each(lambda d, a: d.strength * a)(d, a)
            return LIFState(state.spikes, state.membrane + added, None, a)

        adaptation = jax.lax.scan(one, adaptation_before, (spikes, valid), reverse=reverse)[1]
        before = add(before, shift(adaptation, adaptation_before))
        after = add(after, adaptation)
    if d.alpha is not None:
        # The number added to the potential, from the potentials before and after the step.
        without = dataclasses.replace(d, alpha=None, rho=None)
        current = after.membrane - _of_each(_without_input)(without, before).membrane
        current = where_valid(valid, current, first.current[None])
        before = dataclasses.replace(before, current=shift(current, current_before))
    return before, after


def _without_input(d, state):
    return integrate(d, jnp.zeros((), state.membrane.dtype), state)


def _slope(d, potential):
    of_potential = lambda u: fire(d, LIFState(None, u))
    return jax.jvp(of_potential, (potential,), (jnp.ones_like(potential),))[1]


def _constant_gradients(d, sums, before, after, cts):
    """The gradients of the constants that have a sum, of a chunk: a sum over its steps and
    examples."""
    wide = lambda x: widen(x) if eqx.is_inexact_array(x) else x
    d, before, after, (ct_after, ct_spikes) = jax.tree.map(wide, (d, before, after, cts))
    is_learned = jax.tree.map(lambda s: s is not None, sums, is_leaf=lambda x: x is None)
    learned, rest = eqx.partition(d, is_learned)
    # Under `shard_map`, each device has its own sum, as this zero has.
    learned = jax.tree.map(lambda c, s: c + jnp.zeros_like(s), learned, sums)

    def outputs(learned):
        d = eqx.combine(learned, rest)
        new = _of_each(_without_input)(d, before)
        return new if ct_spikes is None else (new, _of_each(fire)(d, after))

    _, pull_back = jax.vjp(outputs, learned)
    return pull_back(ct_after if ct_spikes is None else (ct_after, ct_spikes))[0]


@spiking_scan.def_vmap
def spiking_scan_vmap(axis_size, batched, *args, **options):
    return vmap_into_batch(spiking_scan, axis_size, batched, args, **options)
