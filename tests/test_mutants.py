"""What no other quick test noticed in a mutant of the library (`make mutants`)."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from .helpers import assert_close


# ---------------------------------------------------------------- recurrent layers


@pytest.mark.parametrize(
    ("make", "batch", "mapped"),
    [
        *[(nn.GRU, batch, name) for batch in (None, 2) for name in ("xs", "state", "lengths")],
        (nn.LSTM, 2, "state"),
        (nn.RNN, 2, "state"),
    ],
)
def test_vmap_over_one_argument_of_a_recurrent_layer(make, batch, mapped, getkey):
    """The arguments that are not mapped are the same for every example."""
    layer = make(3, 4, key=getkey())
    sizes = () if batch is None else (batch,)
    xs = jr.normal(getkey(), (*sizes, 5, 3))
    state = jax.tree.map(lambda s: jr.normal(getkey(), s.shape), layer(xs)[1])
    lengths = jnp.full(sizes, 4)
    several = lambda x: jnp.stack([x, x + 0.3, -x])
    args = {"xs": xs, "state": state, "lengths": lengths}
    args[mapped] = jax.tree.map(several, args[mapped])
    if mapped == "lengths":
        args["lengths"] = jnp.stack([lengths, lengths - 2, lengths - 4])
    axes = {name: 0 if name == mapped else None for name in args}

    def call(layer, xs, state, lengths):
        return layer(xs, state, lengths=lengths)

    def vmapped(layer, xs, state):
        axes_of_args = (None, *axes.values())
        return eqx.filter_vmap(call, in_axes=axes_of_args)(layer, xs, state, args["lengths"])

    def one_by_one(layer, xs, state):
        given = {"xs": xs, "state": state, "lengths": args["lengths"]}
        example = lambda i: given | {mapped: jax.tree.map(lambda x: x[i], given[mapped])}
        outs = [call(layer, **example(i)) for i in range(3)]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *outs)

    def both(f):
        def loss(inputs):
            out = f(*inputs)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

        run = eqx.filter_value_and_grad(loss, has_aux=True)
        return eqx.filter_jit(run)((layer, args["xs"], args["state"]))

    assert_close(both(vmapped), both(one_by_one), tolerance=1e-5)


# ---------------------------------------------------------------- scans


@pytest.mark.parametrize("reverse", [False, True])
def test_truncation_of_steps_that_run_once_keeps_the_derivative_of_the_first_carry(reverse):
    """A step with an effect is not run again, so its own loop is cut: at every window but the
    first, which the first carry enters."""
    xs = jnp.linspace(-1.0, 1.0, 7)

    def loss(h, effect):
        def step(h, x):
            if effect:
                jax.debug.callback(lambda: None)
            h = jnp.tanh(0.7 * h + x)
            return h, h

        return jnp.sum(eqg.filter_scan(step, h, xs, truncate=3, reverse=reverse)[1])

    def first_window(h):
        steps = xs[::-1] if reverse else xs
        total = 0.0
        for x in steps[:3]:
            h = jnp.tanh(0.7 * h + x)
            total += h
        return total

    expected = jax.grad(first_window)(0.3)
    assert abs(expected) > 0.1
    assert_close(jax.grad(loss)(0.3, True), expected)
    assert_close(jax.grad(loss)(0.3, False), expected)
