"""An argument that is not being differentiated is not part of the answer, whatever its
value."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest


pytestmark = [pytest.mark.versions, pytest.mark.x64]


# The derivative with respect to `y` is infinite or NaN wherever `x` is not positive.
def power(x, y):
    return x**y


dense = eqg.custom_jvp(power)


@dense.def_jvp
def _dense_jvp(primals, ts):
    (x, y), (t_x, t_y) = primals, ts
    return dense(x, y), y * x ** (y - 1) * t_x + x**y * jnp.log(x) * t_y


partials = eqg.elementwise(
    power, (lambda out, x, y: y * x ** (y - 1), lambda out, x, y: out * jnp.log(x))
)

reverse = eqg.custom_vjp(power)
reverse.def_fwd(lambda x, y: (reverse(x, y), (x, y)))


@reverse.def_bwd
def _reverse_bwd(residuals, ct):
    x, y = residuals
    return y * x ** (y - 1) * ct, x**y * jnp.log(x) * ct


RULES = {"dense": dense, "elementwise": partials, "reverse": reverse}
# Not for `reverse`, whose forward mode is that of `x ** y` itself.
MODES = {
    "grad": jax.grad,
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "vmap(grad)": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))[0],
    "scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 1)[0]
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "cond": lambda f: jax.grad(lambda x: jax.lax.cond(x < 5, f, f, x)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_dead_argument(rule, mode):
    """With respect to `x` alone, at a point where the term of `y` is NaN."""
    f = RULES[rule]
    for x in (0.0, -2.0):
        assert MODES[mode](lambda x: f(x, 2.0))(jnp.array(x)) == 2 * x


@pytest.mark.parametrize("rule", RULES)
def test_dead_argument_at_second_order(rule):
    f = RULES[rule]
    for transform in (
        jax.hessian,
        lambda f: jax.grad(jax.grad(f)),
        lambda f: jax.jit(jax.hessian(f)),
    ):
        assert transform(lambda x: f(x, 3.0))(jnp.array(2.0)) == 12.0
        assert transform(lambda x: f(x, 2.0))(jnp.array(-2.0)) == 2.0


def test_the_other_argument_is_as_it_should_be():
    for f in RULES.values():
        assert jnp.isnan(jax.grad(f, 1)(-2.0, 2.0))


def outputs(x, y):
    return x, y


outputs_jvp = eqg.custom_jvp(outputs)
outputs_jvp.def_jvp(lambda p, t: (outputs_jvp(*p), (2 * t[0], 3 * t[1])))


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
def test_an_output_that_does_not_move_is_zero_for_what_follows(derivative):
    """`sqrt` has an infinite slope at 0, which multiplies the tangent of the second output."""

    def loss(x):
        first, second = outputs_jvp(x, jnp.zeros(()))
        return first + jnp.sqrt(second)

    assert derivative(loss)(jnp.array(1.0)) == 2.0


both = eqg.custom_vjp(lambda x: (x, x))
both.def_fwd(lambda x: (both(x), x))
both.def_bwd(lambda x, cts: (2 * cts[0] + jnp.inf * cts[1],))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacrev])
def test_dead_output(transform):
    """The cotangent of an output that nobody uses: zero times infinity does not arise."""
    assert transform(lambda x: both(x)[0])(1.0) == 2.0
    assert transform(lambda x: jax.vmap(both)(jnp.stack([x, x]))[0].sum())(1.0) == 4.0
    assert transform(lambda x: both(x)[1])(1.0) == jnp.inf


def test_dead_output_of_a_rule_that_is_not_linear():
    """Nothing may be dropped there: the rule gets an array of zeros, and is just called."""
    f = eqg.custom_vjp(lambda x: (x, x))
    f.def_fwd(lambda x: ((x, x), None))
    f.def_bwd(lambda _, cts: (jnp.clip(cts[0], -1.0, 1.0) + jnp.cos(cts[1]),))
    assert jax.grad(lambda x: 10 * f(x)[0])(1.0) == 2.0
