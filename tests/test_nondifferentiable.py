"""A value that says so when it is differentiated."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from eqx_grads import RuleError


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        jax.jacfwd,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0]),
        lambda f: lambda x: jax.vmap(jax.grad(f))(x[None]),
    ],
)
def test_raises(transform):
    f = lambda x: x * eqg.nondifferentiable(x, "the step size")
    with pytest.raises(RuleError, match="the step size was differentiated, and must not be"):
        transform(f)(jnp.array(1.0))


def test_names_the_leaf():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    loss = lambda b: jnp.sum(
        eqg.nondifferentiable({"m": eqx.tree_at(lambda m: m.bias, linear, b)})["m"].bias
    )
    with pytest.raises(
        RuleError, match=r"This value was differentiated.*\n  at x\['m'\].bias\n"
    ):
        jax.grad(loss)(jnp.ones(2))


def test_lets_everything_else_through():
    f = lambda x, y: x * eqg.nondifferentiable(y, "y")
    assert jax.grad(f)(2.0, 3.0) == 3.0
    assert jax.jit(f)(2.0, 3.0) == 6.0
    assert jax.grad(lambda x: x * eqg.nondifferentiable(jax.lax.stop_gradient(x)))(2.0) == 2.0
    assert jnp.array_equal(jax.vmap(f)(jnp.ones(2), jnp.ones(2)), jnp.ones(2))
    tree = (1, "text", jnp.tanh, None, jax.random.key(0))
    assert eqg.nondifferentiable(tree)[:4] == tree[:4]


def test_a_function_that_closes_over_a_traced_value():
    times = lambda k: eqg.nondifferentiable({"fn": lambda v: v * k}, "The factor")["fn"](3.0)
    assert jax.jit(times)(2.0) == 6.0
    assert jnp.array_equal(jax.vmap(times)(jnp.arange(2.0)), jnp.array([0.0, 3.0]))
    for derive in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(RuleError, match=r"The factor was (.|\n)*at `k`, held"):
            derive(times)(2.0)
