"""Functions that are another function in float64: random draws, branches on a dtype."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads.testing._oracle import is_same_program


X = jnp.array([0.2, -0.4], "float32")
CHECKS = ("primal", "forward", "reverse")


def _dropout(key, x):
    return eqx.nn.Dropout(0.5)(jnp.ones_like(x), key=key)


DRAWS = {
    "bernoulli": lambda key, x: jr.bernoulli(key, 0.5, x.shape).astype(x.dtype),
    "normal": lambda key, x: jr.normal(key, x.shape, x.dtype),
    "uniform": lambda key, x: jr.uniform(key, x.shape, x.dtype),
    "gumbel": lambda key, x: jr.gumbel(key, x.shape, x.dtype),
    "dropout": _dropout,
}
# Those for which float64 draws zeros only, and the user's precision does not; another one.
QUICK = [("bernoulli", 3), ("bernoulli", 6), ("dropout", 6), ("normal", 0)]
SEEDS = [
    pytest.param(draw, seed, marks=() if (draw, seed) in QUICK else pytest.mark.slow)
    for draw in DRAWS
    for seed in range(10)
]


def _reverse(draw, factor):
    @eqg.custom_vjp
    def fn(x, key):
        return draw(key, x) * jnp.sin(x)

    fn.def_fwd(lambda x, key: (fn(x, key), (x, key)))
    fn.def_bwd(lambda saved, ct: (factor * ct * _slope(draw, *saved), None))
    return fn


def _forward(draw, factor):
    @eqg.custom_jvp
    def fn(x, key):
        return draw(key, x) * jnp.sin(x)

    fn.def_jvp(lambda p, t: (fn(*p), factor * _slope(draw, *p) * t[0]))
    return fn


def _slope(draw, x, key):
    return draw(key, x) * jnp.cos(x)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [_forward, _reverse])
@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_a_factor_in_the_rule_of_a_random_function(rule, name, seed):
    draw, key = DRAWS[name], jr.key(seed)
    right = eqgt.check_rule(rule(draw, 1.0), X, key, checks=CHECKS)
    assert all(f.tolerance <= 1e-4 for f in right.findings if f.tolerance is not None)
    wrong = eqgt.check_rule(rule(draw, 7.0), X, key, checks=CHECKS, raises=False)
    is_zero = not np.any(draw(key, X))
    assert wrong.passed == is_zero


def _with_slope(fn, slope):
    rule = eqg.custom_jvp(fn)
    rule.def_jvp(lambda p, t: (rule(*p), slope(*p) * t[0]))
    return rule


def _sin_in_single(x):
    return jnp.sin(x) if x.dtype == jnp.float32 else x**2


def test_a_branch_on_the_dtype():
    eqgt.check_rule(_with_slope(_sin_in_single, jnp.cos), X, checks=CHECKS)
    report = eqgt.check_rule(
        _with_slope(_sin_in_single, lambda x: 2 * x), X, checks=CHECKS, raises=False
    )
    assert {failure.check for failure in report.failures} == {"forward", "reverse"}


def test_programs_that_differ_in_rounding_only():
    def traced(fn, dtype):
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return jax.make_jaxpr(fn)(jnp.ones(3, dtype))

    def same(fn):
        return is_same_program(traced(fn, "float32"), traced(fn, "float64"))

    assert same(lambda x: jnp.sum(jax.nn.softplus(0.1 * x)) + np.float32(1 / 3))
    assert same(jax.jit(lambda x: jnp.sin(x) + 2.0))
    assert not same(lambda x: jr.normal(jr.key(0), x.shape, x.dtype))
    assert not same(lambda x: x * (2.0 if x.dtype == jnp.float32 else 3.0))
    assert not same(lambda x: jax.jit(jnp.sin if x.dtype == jnp.float32 else jnp.cos)(x))
