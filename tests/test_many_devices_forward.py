"""Forward mode of recurrent layers: from the states, without a second loop for the value."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads.testing._strip_rules import without_rules

from .many_devices import collectives
from .test_many_devices import _arguments, _layer, _of_layer, _programs, _without_rules


LAYERS = ("GRU", "LSTM", "RNN")


@pytest.mark.parametrize(
    "setting", ["features", pytest.param("hidden", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", LAYERS)
def test_jvp_communicates_no_more_than_without_the_rule(name, setting):
    one, many, static = _arguments(_layer(name), setting)
    forward, plain = (_programs(static, fn)[0] for fn in (_of_layer, _without_rules))
    program = forward.lower(*many).compile()
    eqgt.assert_trees_close(program(*many), plain(*one), tolerance=1e-5)
    got, expected = collectives(program), collectives(plain.lower(*many).compile())
    if setting == "hidden":
        # The states of all steps are gathered once, for the products with the tangents of the
        # weights.
        expected["gathers"] += 1
    assert all(got[kind] <= expected[kind] for kind in ("gathers", "sums", "moves"))
    if setting == "features":
        # In each step for the value, and once for the tangents of the inputs and the weights.
        assert got["sums"] == len(one[1]) + 2


def _tangent_of(run, args, which):
    """The outputs and their tangents, if some of `args` have one."""

    def of_some(*some):
        full = list(args)
        for i, x in zip(which, some, strict=True):
            full[i] = x
        return run(*full)

    some = tuple(args[i] for i in which)
    return jax.jvp(of_some, some, some)


@pytest.mark.parametrize(
    ("name", "which", "reverse"),
    [
        ("GRU", (0,), False),
        ("GRU", (1,), True),
        pytest.param("GRU", (2,), False, marks=pytest.mark.slow),
        pytest.param("GRU", (0, 1, 2), True, marks=pytest.mark.slow),
        ("LSTM", (2,), True),
        pytest.param("LSTM", (0,), True, marks=pytest.mark.slow),
        pytest.param("LSTM", (1,), False, marks=pytest.mark.slow),
        ("RNN", (2,), False),
        pytest.param("RNN", (0,), True, marks=pytest.mark.slow),
        pytest.param("RNN", (1,), False, marks=pytest.mark.slow),
    ],
)
def test_some_tangents_are_zero(name, which, reverse):
    """Of parameters, inputs and first state; in chunks, the last of which is shorter."""
    make = getattr(eqg.nn, name)
    layer = make(3, 40, reverse=reverse, time_major=True, key=jr.key(0))
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    steps, batch = 131, 16
    xs = jr.normal(jr.key(1), (steps, batch, 3))
    h = jr.normal(jr.key(2), (batch, 40))
    state = (h, 0.5 * h) if name == "LSTM" else h
    lengths = jnp.arange(steps - batch, steps)

    def run(params, xs, state):
        return eqx.combine(params, static)(xs, state, lengths=lengths)

    def plain(*args):
        treedef = jax.tree.structure(args)
        fn = lambda *leaves: jax.tree.leaves(run(*jax.tree.unflatten(treedef, leaves)))
        leaves = without_rules(fn)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(run, *args)), leaves)

    args = (params, xs, state)
    got, expected = (jax.jit(lambda f=f: _tangent_of(f, args, which))() for f in (run, plain))
    eqgt.assert_trees_close(got, expected, tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_in_other_transformations(name):
    """Twice, under `vmap` of tangents and of inputs, linearized and transposed."""
    layer = getattr(eqg.nn, name)(2, 3, time_major=True, key=jr.key(0))
    xs, t_xs = jr.normal(jr.key(1), (2, 4, 5, 2))
    run = lambda xs: layer(xs)[0]
    plain = lambda xs: without_rules(lambda xs: [run(xs)])(xs)[0]

    def derivatives(f):
        tangent = lambda xs: jax.jvp(f, (xs,), (t_xs,))[1]
        many = jnp.stack([xs, 2 * xs])
        return (
            jax.jacfwd(f)(xs),
            jax.jvp(tangent, (xs,), (t_xs,)),
            jax.vjp(tangent, xs)[1](f(xs)),
            jax.linearize(f, xs)[1](t_xs),
            jax.vmap(tangent)(many),
            jax.linear_transpose(lambda t: jax.jvp(f, (xs,), (t,))[1], xs)(f(xs)),
            jax.hessian(lambda xs: jnp.sum(f(xs) ** 2))(xs),
        )

    got, expected = (jax.jit(lambda f=f: derivatives(f))() for f in (run, plain))
    eqgt.assert_trees_close(got, expected, tolerance=2e-5)
