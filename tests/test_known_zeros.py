"""Programs with inputs that are known to be zero: no term of these is computed."""

import functools as ft

import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest
from eqx_grads._jaxprs.known_zeros import evaluate_with_zeros


X, BAD = jnp.array([1.0, 2.0, 3.0]), jnp.array([jnp.inf, jnp.nan, -jnp.inf])


def scanned(dead, live):
    def body(carry, x):
        a, b = carry
        return (a * BAD, (2 + x) * b), a * BAD + b

    (a, b), ys = jax.lax.scan(body, (dead, live), jnp.ones(4))
    return a, b, ys


def scanned_as_xs(dead, live):
    return jax.lax.scan(lambda c, t: (c + live, t * BAD + c), live, jnp.stack([dead, dead]))


def looped(dead, live):
    def body(state):
        i, a, b = state
        return i + 1, a * BAD, b + live

    return jax.lax.while_loop(lambda s: s[0] < 3, body, (0, dead, live))


def branched(dead, live):
    return jax.lax.cond(
        X[0] > 0, lambda d, t: (d * BAD, t), lambda d, t: (d, 2 * t), dead, live
    )


def checkpointed(dead, live):
    return jax.checkpoint(lambda d, t: (d * BAD, d * BAD + t))(dead, live)


def nested(dead, live):
    inner = jax.jit(lambda d, t: d * BAD + t)
    return jax.lax.scan(lambda c, _: (c + inner(dead, live), None), live, None, length=2)


PROGRAMS = {
    "product": lambda d, t: (d * BAD, t * X),
    "dot": lambda d, t: jnp.dot(d, BAD) + jnp.dot(t, X),
    "sum": lambda d, t: d * BAD + t,
    "difference": lambda d, t: (d * BAD - t, t - d * BAD),
    "quotient": lambda d, t: d / (1 / BAD) + t,
    "select": lambda d, t: jnp.where(X > 1, d * BAD, t),
    "concatenate": lambda d, t: jnp.concatenate([d * BAD, t]),
    "pad": lambda d, t: jnp.pad(d * BAD, 1)[1:-1] + t,
    "reshape": lambda d, t: (d * BAD).reshape(3, 1).T[0][::-1] + t,
    "index": lambda d, t: (d * BAD)[1] + t.at[0].add((d * BAD)[0]),
    "cast": lambda d, t: (d * BAD).astype(jnp.float16).astype(t.dtype) + t,
    "barrier": lambda d, t: jax.lax.optimization_barrier((d * BAD, t))[1],
    "jit": lambda d, t: jax.jit(lambda d, t: (d * BAD + t, d * BAD))(d, t),
    "custom_jvp": lambda d, t: jax.nn.relu(d * BAD) * 0 + t,
    "scan": scanned,
    "xs of a scan": scanned_as_xs,
    "while": looped,
    "cond": branched,
    "checkpoint": checkpointed,
    "nested": nested,
    "a vector and a scalar": lambda d, t: (d * BAD + t[0], t - (d * BAD)[0], (d * BAD)[0] - t),
    "into zeros": lambda d, t: jnp.zeros(3).at[jnp.array([0, 2])].add(d[:2]) * BAD + t,
    "zeros into it": lambda d, t: d.at[1].set(0.0) * BAD + t,
    "beside zeros": lambda d, t: jnp.concatenate([jnp.zeros(1), d[1:]]) * BAD + t,
    "slice into zeros": lambda d, t: (
        jax.lax.dynamic_update_slice(jnp.zeros(3), d[:2], (0,)) * BAD + t
    ),
    "linear solve": lambda d, t: jnp.linalg.solve(jnp.diag(BAD), d) + t,
    "opaque": lambda d, t: jax.lax.sort((X, d, t), num_keys=1)[1:],
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_zero_input(name, transform, monkeypatch):
    """As with the bad factors replaced by good ones, where the input is an array of zeros."""
    fn = PROGRAMS[name]
    program = jax.make_jaxpr(fn)(X, X)
    given = lambda t: evaluate_with_zeros(program, [None, t])
    got = transform(given)(X)
    monkeypatch.setitem(globals(), "BAD", jnp.ones(3))
    good = jax.tree.leaves(fn(jnp.zeros(3), X))
    for x, expected in zip(got, good, strict=True):
        if x is None:
            assert not jnp.any(expected)
        else:
            eqgt.assert_trees_close(x, expected)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("opaque", "custom_jvp")])
def test_nothing_is_computed_for_it(name):
    """All inputs are zero, and so are all outputs that are linear in them."""
    program = jax.make_jaxpr(PROGRAMS[name])(X, X)
    out = evaluate_with_zeros(program, [None, None])
    inexact = [jnp.issubdtype(t.dtype, jnp.inexact) for t in program.out_avals]
    assert all(x is None for x, flag in zip(out, inexact, strict=True) if flag)


def test_an_output_that_does_not_depend_on_it():
    program = jax.make_jaxpr(lambda d, t: (X + 1, d, t))(X, X)
    x, d, t = evaluate_with_zeros(program, [None, X])
    assert d is None
    eqgt.assert_trees_close((x, t), (X + 1, X))


def test_the_evaluation_can_be_differentiated_and_batched():
    program = jax.make_jaxpr(ft.partial(scanned))(X, X)
    of_live = lambda t: evaluate_with_zeros(program, [None, t])[1]
    eqgt.assert_trees_close(jax.grad(lambda t: jnp.sum(of_live(t)))(X), jnp.full(3, 81.0))
    eqgt.assert_trees_close(
        jax.vmap(of_live)(jnp.stack([X, 2 * X])), 81 * jnp.stack([X, 2 * X])
    )
