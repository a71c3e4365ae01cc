"""A value that says so when it is differentiated."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from eqx_grads import RuleError


pytestmark = pytest.mark.versions


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


def test_a_function_that_closes_over_a_traced_value():
    times = lambda k: eqg.nondifferentiable({"fn": lambda v: v * k}, "The factor")["fn"](3.0)
    assert jax.jit(times)(2.0) == 6.0
    assert jnp.array_equal(jax.vmap(times)(jnp.arange(2.0)), jnp.array([0.0, 3.0]))
    for derive in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(RuleError, match=r"The factor was (.|\n)*at `k`, held"):
            derive(times)(2.0)


def _rule_with(derivative_of_y):
    @eqg.custom_vjp
    def f(x, y):
        return jnp.sin(x) * eqg.nondifferentiable(y, "y")

    f.def_fwd(lambda x, y: (f(x, y), (x, y)))
    f.def_bwd(lambda res, ct: (ct * jnp.cos(res[0]) * res[1], derivative_of_y(res, ct)))
    return f


class _Gate(eqx.Module):
    weight: jax.Array
    frozen: jax.Array

    @eqg.custom_vjp
    def __call__(self, x):
        return self.weight * eqg.nondifferentiable(self.frozen, "`frozen`") * x

    @__call__.def_fwd
    def _call_fwd(self, x):
        return self(x), (self, x)

    @__call__.def_bwd
    def _call_bwd(residuals, ct):
        self, x = residuals
        return eqg.tangents.of(
            self, weight=ct * self.frozen * x
        ), ct * self.weight * self.frozen


_FORMS = {
    "grad": lambda f: jax.grad(f, 1)(1.0, 2.0),
    "grad of both": lambda f: jax.grad(f, (0, 1))(1.0, 2.0)[1],
    "jit(grad)": lambda f: jax.jit(jax.grad(f, 1))(1.0, 2.0),
    "grad(jit)": lambda f: jax.grad(jax.jit(f), 1)(1.0, 2.0),
    "vmap": lambda f: jax.vmap(jax.grad(f, 1), (None, 0))(1.0, jnp.array([2.0]))[0],
    "grad(vmap)": lambda f: jax.grad(
        lambda y: jax.vmap(f, (0, None))(jnp.ones(1), y).sum()
    )(2.0),
    "scan": lambda f: jax.grad(
        lambda y: jax.lax.scan(lambda c, _: (f(c, y), None), 1.0, None, 1)[0]
    )(2.0),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), 1)(1.0, 2.0),
    "second order": lambda f: jax.grad(lambda y: jax.grad(f, 1)(1.0, y) * y)(1.0),
}  # fmt: skip


@pytest.mark.parametrize("form", _FORMS)
def test_a_rule_without_a_derivative_for_it_is_an_error_and_no_silent_zero(form):
    with pytest.raises(RuleError, match="y was differentiated, and must not be"):
        _FORMS[form](_rule_with(lambda res, ct: None))


@pytest.mark.parametrize("form", _FORMS)
def test_a_rule_that_gives_a_derivative_is_used(form):
    expected = _FORMS[form](lambda x, y: jnp.sin(x) * y)
    f = _rule_with(lambda res, ct: ct * jnp.sin(res[0]))
    assert jnp.allclose(_FORMS[form](f), expected)
    zero = _rule_with(lambda res, ct: jnp.zeros_like(res[1]))
    assert _FORMS[form](zero) == 0.0  # an array of zeros is meant


def test_a_field_of_self():
    gate, x = _Gate(jnp.array(2.0), jnp.array(3.0)), jnp.array(0.5)
    with pytest.raises(RuleError, match="`frozen` was differentiated") as caught:
        jax.grad(lambda gate: gate(x))(gate)
    assert "the rule `_Gate._call_bwd` returns no derivative" in caught.value.__notes__[0]
    with pytest.raises(RuleError, match="`frozen` was differentiated"):
        jax.jvp(lambda gate: gate(x), (gate,), (gate,))
    trained, frozen = eqx.partition(gate, _Gate(True, False))
    assert jax.grad(lambda t: eqx.combine(t, frozen)(x))(trained).weight == 1.5
    assert jax.grad(gate)(x) == 6.0
