"""Findings of the calls of `tests/hostile`: arguments that were accepted silently, or rejected
in the words of others."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import numpy as np
import pytest


X = jnp.array([0.5, -1.2, 2.0])
KEY = jr.key(0)
DOUBLE = eqg.custom_jvp(lambda x: 2 * x)
DOUBLE.def_jvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))


@pytest.fixture(autouse=True)
def _no_type_checks():
    """As users run it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


REFUSED = {
    "an array for a dtype": (lambda: eqg.cast_gradient(X, X), "a dtype that is not floating"),
    "an array for the dtype of a cell": (
        lambda: eqg.nn.LIFCell(3, 0.9, dtype=X),
        "The `dtype` of `LIFCell` is not a real floating one",
    ),
    "a type for a value": (
        lambda: eqg.replace_gradient(jax.ShapeDtypeStruct((3,), "float32"), X),
        "a surrogate that can't replace the value",
    ),
    "a type for a start": (
        lambda: eqg.fixed_point(jnp.cos, jax.ShapeDtypeStruct((3,), "float32")),
        "a start that is not floating",
    ),
    "an array of no axes for levels": (
        lambda: eqg.ste.fsq(X, jnp.array(5)),
        "`ste.fsq` can't quantize to these levels",
    ),
    "a complex predicate": (
        lambda: eqg.filter_cond(1 + 2j, jnp.sin, jnp.cos, X),
        "`pred` of `filter_cond` is not one boolean or real number",
    ),
    "a scale that is not a number": (
        lambda: eqg.nn.FakeQuantize(4, scale=float("nan")),
        "a scale that is not positive and finite",
    ),
    "nothing to fit a scale to": (
        lambda: eqg.nn.LSQ(4).fit(jnp.zeros(0)),
        "`LSQ.fit` was given nothing to fit a scale to",
    ),
    "numbers without a scale": (
        lambda: eqg.nn.LSQ(4).fit(float("inf")),
        "`LSQ.fit` was given nothing to fit a scale to, or numbers that are not finite",
    ),
    "a size beyond memory": (
        lambda: eqg.nn.GRU(2, 2**40, key=KEY),
        "`GRU` was given a size(?s:.*)less than 2\\^31",
    ),
    "statistics beyond memory": (
        lambda: eqg.GradientStatistics(2**40),
        "`n` of `GradientStatistics` is not a number of steps",
    ),
    "an array for a reduction": (
        lambda: eqg.losses.linear_cross_entropy(
            jnp.ones((1, 2)), jnp.ones((3, 2)), jnp.zeros(1, int), reduction=np.ones(2)
        ),
        "`reduction` of `losses.linear_cross_entropy` is not one of",
    ),
    "too many calls of a rule": (
        lambda: eqg.host_function(np.sin, out=lambda x: x, max_rule_calls=jnp.array(-1)),
        "`max_rule_calls` of `host_function`",
    ),
    "no checks": (
        lambda: eqgt.check_rule(DOUBLE, X, checks=()),
        "`check_rule` was told to check nothing",
    ),
    "nothing to check": (lambda: eqgt.check_rule(None, X), "`fn` of `check_rule` is not a"),
    "an array for names": (
        lambda: eqgt.check_rule(DOUBLE, X, skip=jnp.array(3)),
        "`skip` of `check_rule` are not names",
    ),
    "a key for a seed": (
        lambda: eqgt.check_rule(DOUBLE, X, seed=KEY),
        "`seed` of `check_rule` is not a seed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, match = REFUSED[name]
    with pytest.raises(eqg.RuleError, match=match):
        # Where JAX makes tracers, also of constants.
        jax.eval_shape(lambda: jax.tree.leaves(call()))


def test_half_precision_in_a_trace():
    """JAX converted a constant to a tracer."""
    p = jnp.array([0.2, 0.9], jnp.float16)
    assert jax.jit(lambda: eqg.ste.bernoulli(p, key=KEY))().dtype == jnp.float16


@pytest.mark.parametrize("large", [2**40, 10**30])
def test_large_integers_are_numbers(large):
    """JAX takes no Python integer beyond its own range."""
    root = eqg.implicit(lambda y, a: y**2 - a, tolerance=large)(jnp.sqrt)
    layer = lambda: jax.tree.leaves(eqg.nn.S5(2, 1, 4, max_step=large, key=KEY))
    assert jax.eval_shape(lambda: (jax.grad(root)(4.0), layer()))


def test_option_in_an_array():
    x, weight, labels = jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.array([0, 1, 2])
    loss = lambda i: eqg.losses.linear_cross_entropy(x, weight, labels, ignore_index=i)
    one = jnp.array(1)  # known, and not a tracer
    assert jax.jit(lambda: loss(one) - loss(1))() == 0
