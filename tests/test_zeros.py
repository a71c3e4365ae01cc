"""What is not being differentiated is not part of the answer, whatever its value."""

import eqx_grads as eqg
import eqx_grads.tangents as tangents
import jax
import jax.numpy as jnp
import pytest


# The derivative with respect to `y` is infinite or NaN wherever `x` is not positive.
def power(x, y):
    return x**y


def power_tangent(x, y, t_x, t_y):
    return y * x ** (y - 1) * t_x + x**y * jnp.log(x) * t_y


dense = eqg.custom_jvp(power)
dense.def_jvp(lambda p, t: (dense(*p), power_tangent(*p, *t)))

symbolic = eqg.custom_jvp(power)


@symbolic.def_jvp(symbolic_zeros=True)
def _symbolic_jvp(primals, ts):
    (x, y), (t_x, t_y) = primals, ts
    from_x = tangents.scale(t_x, y * x ** (y - 1))
    from_y = tangents.scale(t_y, x**y * jnp.log(x))
    return symbolic(x, y), tangents.add(from_x, from_y)


partials = eqg.elementwise(
    power, (lambda out, x, y: y * x ** (y - 1), lambda out, x, y: out * jnp.log(x))
)

reverse = eqg.custom_vjp(power)
reverse.def_fwd(lambda x, y: (reverse(x, y), (x, y)))


@reverse.def_bwd
def _reverse_bwd(residuals, ct):
    x, y = residuals
    return y * x ** (y - 1) * ct, x**y * jnp.log(x) * ct


RULES = {"dense": dense, "symbolic": symbolic, "elementwise": partials, "reverse": reverse}
# Not for `reverse`, whose forward mode is that of `x ** y` itself.
MODES = {
    "grad": jax.grad,
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "grad(jit)": lambda f: jax.grad(jax.jit(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (1.0,))[1],
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
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


@pytest.mark.parametrize("order", ["jvp", "grad", "jacfwd"])
def test_an_output_that_does_not_move_is_zero_for_what_follows(order):
    """`sqrt` has an infinite slope at 0, which multiplies the tangent of the second output."""

    def loss(x):
        first, second = outputs_jvp(x, jnp.zeros(()))
        return first + jnp.sqrt(second)

    transform = {
        "jvp": lambda x: jax.jvp(loss, (x,), (1.0,))[1],
        "grad": jax.grad(loss),
        "jacfwd": jax.jacfwd(loss),
    }[order]
    assert transform(jnp.array(1.0)) == 2.0


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


def test_symbolic_zeros_in_the_backward_rule():
    seen = []
    f = eqg.custom_vjp(lambda x: (x, {"y": x, "n": 3}))
    f.def_fwd(lambda x: (f(x), None))

    @f.def_bwd(symbolic_zeros=True)
    def bwd(_, cts):
        seen.append(jax.tree.map(lambda ct: ct is None, cts, is_leaf=lambda x: x is None))
        return (tangents.add(cts[0], cts[1]["y"]),)

    assert jax.grad(lambda x: f(x)[0])(1.0) == 1.0
    assert seen.pop() == (False, {"y": True, "n": True})
    assert jax.jit(jax.grad(lambda x: f(x)[1]["y"]))(1.0) == 1.0
    assert seen.pop() == (True, {"y": False, "n": True})


def test_what_a_rule_is_given():
    """By default arrays for all that could move; else `None` for what does not."""
    seen = []

    def rule(primals, ts):
        seen.append(jax.tree.map(lambda t: t is None, ts, is_leaf=lambda t: t is None))
        (tree, y), (t_tree, t_y) = primals, ts
        t_x = None if t_tree["x"] is None else y * t_tree["x"]
        return tree["x"] * y, tangents.add(t_x, tangents.scale(t_y, tree["x"]))

    def grad(f):
        tree = {"n": 3, "name": "n", "count": jnp.array(1)}
        return jax.grad(lambda x: f({**tree, "x": x}, 2.0))(1.0)

    f = eqg.custom_jvp(lambda tree, y: tree["x"] * y)
    f.def_jvp(rule)
    assert grad(f) == 2.0
    nones = {"n": True, "name": True, "count": True}
    assert all(flags == ({**nones, "x": False}, False) for flags in seen)
    seen.clear()
    f.def_jvp(rule, symbolic_zeros=True)
    assert grad(f) == 2.0
    assert all(flags == ({**nones, "x": False}, True) for flags in seen)


@pytest.mark.slow
def test_a_rule_may_apply_its_own_function_to_a_tangent():
    """As a bilinear function does: `f(t_x, y) + f(x, t_y)`."""
    f = eqg.custom_jvp(lambda x, y: x @ y)
    f.def_jvp(lambda p, t: (f(*p), f(t[0], p[1]) + f(p[0], t[1])))
    x, y = jnp.arange(4.0).reshape(2, 2), jnp.ones((2, 2))
    for argnums in (0, 1, (0, 1)):
        for transform in (jax.grad, jax.hessian):
            got = transform(lambda *a: jnp.sum(f(*a) ** 2), argnums)(x, y)
            expected = transform(lambda *a: jnp.sum((a[0] @ a[1]) ** 2), argnums)(x, y)
            assert jax.tree.all(jax.tree.map(jnp.allclose, got, expected))
