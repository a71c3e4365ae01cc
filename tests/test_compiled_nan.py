"""Gradients that are finite operation by operation, and not if they are compiled as a whole."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest


# XLA has to optimize: with FMA instructions, `x - mean(x)` of equal numbers is not zero.
pytestmark = pytest.mark.cost
POLICY = 'zero_safe(loss, policy="zero")`'


def deviation(params, std=jnp.std):
    w, b = params
    equal = jnp.full((3, 5, 2), 0.3) @ w + b[None, None]
    return jnp.sum(std(equal, axis=1))


def _is_finite(grads):
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_policy_is_advised_if_the_compiled_gradient_is_finite(seed):
    params = jax.random.normal(jax.random.key(seed), (2, 12)), jnp.full(12, 0.1)
    safe = eqg.zero_safe(deviation, policy="zero")
    assert _is_finite(jax.grad(safe)(params))
    is_finite = _is_finite(jax.jit(jax.grad(safe))(params))
    report = str(eqg.explain_nan(deviation, params))
    assert "eqg.safe.std(x)" in report
    assert (POLICY in report) == is_finite
    report = eqg.explain_nan(safe, params)
    assert bool(report) == (not is_finite)
    assert ("Compiled as a whole" in str(report)) == (not is_finite)


def test_a_loss_that_is_infinite_if_it_is_compiled():
    """Operation by operation, the argument of the outer logarithm is a rounding error."""
    loss = lambda x: jnp.log(jnp.abs(jnp.log(jnp.exp(x)) - x))
    finite = [x for x in jnp.linspace(0.1, 5, 50) if jnp.isfinite(loss(x))]
    differing = [x for x in finite if jnp.isinf(jax.jit(loss)(x))]
    # A compiler that rounds as JAX does leaves nothing to report.
    report = eqg.explain_nan(loss, (differing or finite)[0])
    assert bool(report) == bool(differing)
    assert not report.found
    assert ("The loss is -inf" in report.headline) == bool(differing)
    assert ("Compiled as a whole" in str(report)) == bool(differing)


def test_nothing_is_said_of_a_gradient_that_is_finite_compiled():
    params = jax.random.normal(jax.random.key(0), (2, 12)), jnp.full(12, 0.1)
    mended = lambda params: deviation(params, eqg.safe.std)
    assert _is_finite(jax.jit(jax.grad(mended))(params))
    report = eqg.explain_nan(mended, params)
    assert not report
    assert not any("Compiled" in remark for remark in report.remarks)
    on_arguments = lambda x: jnp.sum(jnp.std(x, axis=0))
    assert POLICY in str(eqg.explain_nan(on_arguments, jnp.ones((4, 2))))
