"""Layers over time: what their entries share, and a plain scan as the reference."""

import functools as ft
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry


# Options of an entry whose layer has a full entry already.
CHEAP = {
    "orders": ("value", "vjp"), "transforms": False, "costs": False, "precisions": ("float64",),
}  # fmt: skip


def with_arrays(layer, cells):
    """The layer with the arrays in `cells[i][j]`, a dictionary by the names of the fields."""
    for i, directions in enumerate(cells):
        for j, arrays in enumerate(directions):
            for name, array in arrays.items():
                field = operator.attrgetter(name)
                where = lambda layer, i=i, j=j, field=field: field(layer.cells[i][j])
                layer = eqx.tree_at(where, layer, array)
    return layer


def layer(make, initial="initial_state", calls=None, **options):
    """A function of the arrays of a layer, made by `make(dtype=, key=, **options)`.

    `first` are initial states that are learned, and `state` one that is passed.
    """

    def fn(xs, cells, state=None, lengths=None, first=None, key=None):
        made = make(key=jr.key(0), dtype=xs.dtype, **options)
        arrays = jax.tree.leaves(eqx.filter(made.cells, eqx.is_inexact_array))
        assert len(arrays) == sum(len(c) for directions in cells for c in directions)
        made = with_arrays(made, cells)
        assert (getattr(made, initial) is None) == (first is None)
        if first is not None:
            made = eqx.tree_at(lambda made: getattr(made, initial), made, first)
        if calls is not None:
            return calls(made, xs)
        if xs.ndim == 4:
            call = lambda xs, state, n: made(xs, state, lengths=n)
            return jax.vmap(call)(xs, state, lengths)
        key = None if key is None else jr.wrap_key_data(key)
        return made(xs, state, lengths=lengths, key=key, inference=key is None)

    return fn


def plain(step, zero, *, reverse=False, time_major=False, dropout=0.0, then=lambda y: y):
    """The same by `jax.lax.scan`, of `step(arrays, x, state)`, which returns state and output.

    `zero(arrays)` is the first state of a cell.
    """

    def of_one(cells, key, xs, states, length):
        """One sequence, and one state for each cell."""
        states, last = iter(states), []
        for i, directions in enumerate(cells):
            if i > 0 and key is not None:
                key, subkey = jr.split(key)
                xs = jnp.where(jr.bernoulli(subkey, 1 - dropout, xs.shape), xs, 0)
                xs = xs / (1 - dropout)
            outs = []
            for arrays, backward in zip(directions, (reverse, not reverse), strict=False):
                run = ft.partial(one, arrays, length)
                times = jnp.arange(len(xs))
                end, ys = jax.lax.scan(run, next(states), (times, xs), reverse=backward)
                outs.append(then(ys))
                last.append(end)
            xs = jnp.concatenate(outs, -1)
        return xs, last

    def one(arrays, length, state, inputs):
        t, x = inputs
        new, y = step(arrays, x, state)
        if length is not None:
            new = jax.tree.map(lambda n, s: jnp.where(t < length, n, s), new, state)
            y = jnp.where(t < length, y, 0)
        return new, y

    def of_batch(xs, cells, state=None, lengths=None, first=None, key=None):
        if xs.ndim == 4:
            return jax.vmap(lambda x, s, n: of_batch(x, cells, s, n))(xs, state, lengths)
        flat = [arrays for directions in cells for arrays in directions]
        stack = lambda states: jax.tree.map(lambda *s: jnp.stack(s), *states)
        if key is not None:
            key = jr.wrap_key_data(key)
        if state is None and first is None:
            first = zero(flat[0]) if len(flat) == 1 else stack([zero(c) for c in flat])
        unstack = lambda tree, i: tree if len(flat) == 1 else jax.tree.map(lambda s: s[i], tree)
        restack = lambda ends: ends[0] if len(flat) == 1 else stack(ends)

        def run(xs, state, length):
            states = [unstack(state, i) for i in range(len(flat))]
            ys, last = of_one(cells, key, xs, states, length)
            return ys, restack(last)

        if xs.ndim == 2:
            return run(xs, first if state is None else state, lengths)
        axis = int(time_major)
        over_states = 0 if len(flat) == 1 else 1
        in_axes = (axis, None if state is None else over_states, None if lengths is None else 0)
        many = jax.vmap(run, in_axes, (axis, over_states))
        return many(xs, first if state is None else state, lengths)

    return of_batch


def draws(seed):
    """A function `normal(*shape, scale=1)`, of numbers that are the same in every run."""
    rng = np.random.default_rng(seed)
    return lambda *shape, scale=1.0: scale * rng.normal(size=shape)


def enter(name, fn, xs, cells, state, lengths, *args, half=None, time_major=False, **options):
    """Enter a layer, with garbage after the lengths. `half` are inputs with long sums."""
    if lengths is not None and xs.ndim < 4:
        bad, counts = padding(xs, lengths, time_major)
        options |= {"garbage": (bad, cells, state, lengths, *args), "counts": counts}
    if half is not None:
        options |= {"half": (*half, None, None, *args)}
    entry(name, fn, xs, cells, state, lengths, *args, **options)


def padding(xs, lengths, time_major=False):
    """Inputs with infinities and NaN after the lengths, and which outputs count."""
    steps = xs.shape[0] if time_major or xs.ndim == 2 else xs.shape[1]
    valid = np.arange(steps) < np.expand_dims(lengths, -1)
    valid = valid.T if time_major else valid
    junk = np.resize([np.nan, np.inf, -np.inf], xs.shape)
    mask = valid[..., None]

    def counts(out):
        ones = jax.tree.map(lambda s: np.ones(s.shape, bool), out[1])
        return np.broadcast_to(mask, out[0].shape), ones

    return np.where(mask, xs, junk), counts
