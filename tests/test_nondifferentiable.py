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


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_rule_around_a_rule(around):
    inner = around(_rule_with(lambda res, ct: None))
    f = eqg.custom_vjp(lambda x, y: inner(x, y))
    f.def_fwd(lambda x, y: (f(x, y), (x, y)))
    f.def_bwd(lambda res, ct: (ct * jnp.cos(res[0]) * res[1], None))
    assert jnp.allclose(jax.grad(f)(1.0, 2.0), 2 * jnp.cos(1.0))
    for derive in (jax.grad, lambda f, n: jax.jit(jax.grad(f, n))):
        with pytest.raises(RuleError, match="y was differentiated, and must not be"):
            derive(f, 1)(1.0, 2.0)


def test_a_loop_without_a_transpose():
    def power(x, y):
        step = lambda state: (state[0] * eqg.nondifferentiable(y, "y"), state[1] + 1)
        return jax.lax.while_loop(lambda state: state[1] < 3, step, (x, 0))

    f = eqg.custom_vjp(power)
    f.def_fwd(lambda x, y: (f(x, y), y))
    f.def_bwd(lambda y, cts: (cts[0] * y**3, None))
    assert jax.grad(lambda x: f(x, 2.0)[0])(1.0) == 8.0
    with pytest.raises(RuleError, match="y was differentiated, and must not be"):
        jax.grad(lambda y: f(1.0, y)[0])(2.0)


def test_a_rule_of_what_is_not_perturbed_runs():
    f = _rule_with(lambda res, ct: None)
    assert jnp.allclose(jax.grad(f)(1.0, 2.0), 2 * jnp.cos(1.0))
    assert jax.grad(lambda y: f(1.0, jax.lax.stop_gradient(y)))(2.0) == 0.0


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


def test_a_forward_rule_that_ignores_its_tangent():
    @eqg.custom_jvp
    def f(x, y):
        return x * eqg.nondifferentiable(y, "y")

    f.def_jvp(lambda primals, tangents: (f(*primals), primals[1] * tangents[0]))
    assert jax.grad(f)(3.0, 2.0) == 2.0
    for derive in (jax.grad, jax.jacfwd):
        with pytest.raises(RuleError, match="y was differentiated"):
            derive(f, (0, 1))(3.0, 2.0)
        with pytest.raises(RuleError, match="y was differentiated"):
            derive(f, 1)(3.0, 2.0)


@pytest.mark.parametrize(
    "f",
    [
        eqg.elementwise(
            lambda x, y: x * eqg.nondifferentiable(y, "y"), lambda out, x, y: (y, None)
        ),
        eqg.custom_gradient(
            lambda x, y: (x * eqg.nondifferentiable(y, "y"), lambda ct: (ct * y, None))
        ),
    ],
)
def test_shorthands(f):
    assert jax.grad(f)(3.0, 2.0) == 2.0
    with pytest.raises(RuleError, match="y was differentiated"):
        jax.grad(f, 1)(3.0, 2.0)


def test_residuals_that_must_not_be_differentiated_are_so_at_second_order_only():
    f = eqg.custom_vjp(lambda x, y: jnp.sin(x) * y)
    f.def_fwd(lambda x, y: (f(x, y), eqg.nondifferentiable((x, y), "a residual")))
    f.def_bwd(lambda res, ct: (ct * jnp.cos(res[0]) * res[1], None))
    assert jnp.allclose(jax.grad(f)(1.0, 2.0), 2 * jnp.cos(1.0))
    for derive in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(RuleError, match="a residual was differentiated"):
            derive(jax.grad(f))(1.0, 2.0)
