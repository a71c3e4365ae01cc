"""Rules that are called by way of themselves, and what is inside the primitives they use.

Found by running other libraries' test suites against this one.
"""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import assert_close, fails_with_remat3, REMAT3_HAS_NO_TRANSPOSE


pytestmark = pytest.mark.versions


def quotient(inner):
    """`x / y`, whose rule applies it to tangents, in some surroundings."""
    divide = eqg.custom_jvp(lambda x, y: x / y)

    @divide.def_jvp
    def rule(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return divide(x, y), inner(divide)(t_x, y) - divide(x * t_y, y * y)

    return divide


SURROUNDINGS = {
    "none": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda t, y: jax.vmap(f, (0, None))(t[None], y)[0],
    "scan": lambda f: lambda t, y: jax.lax.scan(lambda c, _: (f(c, y), None), t, None, 1)[0],
    "checkpoint": lambda f: jax.checkpoint(f),
}


@pytest.mark.parametrize(
    "argnums",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), (0, 1)],
)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_rule_that_applies_its_own_function_to_a_tangent(surroundings, argnums, request):
    if surroundings == "checkpoint" and argnums != 1:
        fails_with_remat3(request, REMAT3_HAS_NO_TRANSPOSE)
    f, plain = quotient(SURROUNDINGS[surroundings]), lambda x, y: x / y
    transforms = [jax.grad, lambda f, n: jax.jit(jax.grad(f, n)), jax.jacfwd]
    if surroundings in ("none", "checkpoint"):
        transforms.append(jax.hessian)
    for transform in transforms:
        assert_close(transform(f, argnums)(3.0, 2.0), transform(plain, argnums)(3.0, 2.0))


def test_dead_terms_stay_dead_at_every_order():
    """The value is computed by the function itself, which is differentiated further out."""
    f = eqg.custom_jvp(lambda x, y: x * y)

    @f.def_jvp
    def rule(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return f(x, y), y * t_x + (x / 0.0) * t_y

    loss = lambda x: jnp.sin(f(x, 1.0))
    assert jnp.allclose(jax.jvp(jax.grad(loss), (1.0,), (1.0,))[1], -jnp.sin(1.0))
    assert jnp.allclose(jax.hessian(loss)(1.0), -jnp.sin(1.0))
    assert jnp.allclose(jax.jit(jax.hessian(loss))(1.0), -jnp.sin(1.0))
    assert jnp.allclose(jax.grad(jax.grad(jax.grad(loss)))(1.0), -jnp.cos(1.0))
    assert jnp.allclose(jax.jacfwd(jax.hessian(loss))(1.0), -jnp.cos(1.0))


product = eqg.custom_vjp(lambda x, y: x * y)
product.def_fwd(lambda x, y: (product(x, y), (x, y)))
product.def_bwd(lambda r, ct: (ct * r[1], ct * r[0]))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_function_with_a_reverse_rule_inside_a_forward_rule(wrap):
    square = eqg.custom_jvp(lambda x: product(x, x))
    square.def_jvp(lambda p, t: (square(p[0]), 2 * wrap(product)(p[0], t[0])))
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacfwd):
        assert transform(square)(3.0) == 6.0
    assert jax.hessian(square)(3.0) == 2.0


@pytest.mark.parametrize("x", [1.0, jnp.array(1.0)])
def test_nested_forward_mode_of_python_numbers(x):
    f = eqg.custom_vjp(lambda x, y: jnp.sin(x) * y)
    f.def_fwd(lambda x, y: (f(x, y), (x, y)))
    f.def_bwd(lambda r, ct: (ct * r[1] * jnp.cos(r[0]), ct * jnp.sin(r[0])))
    loss, plain = lambda x: f(x, 2.0), lambda x: jnp.sin(x) * 2.0
    for transform in (
        lambda f: jax.jacfwd(jax.jacfwd(f)),
        lambda f: jax.jacfwd(jax.jacrev(jax.jacfwd(f))),
        lambda f: lambda x: jax.jvp(jax.jacfwd(f), (x,), (x,)),
    ):
        assert_close(transform(loss)(x), transform(plain)(x))


def test_two_rules_for_one_function():
    fn = lambda x: jnp.sin(x)
    first, second = eqg.custom_jvp(fn), eqg.custom_jvp(fn)
    first.def_jvp(lambda p, t: (first(p[0]), 2 * t[0]))
    second.def_jvp(lambda p, t: (second(p[0]), t[0] ** 2))
    assert jax.grad(first)(1.0) == 2.0
    with pytest.raises(eqg.RuleError, match="raises a tangent to the power 2"):
        jax.jvp(second, (1.0,), (1.0,))


def test_what_a_function_closes_over_need_not_be_a_pytree():
    def make(registry):
        f = eqg.custom_jvp(lambda x: x * len(registry))
        f.def_jvp(lambda p, t: (f(p[0]), len(registry) * t[0]))
        return f

    for registry in ({int: 1, str: 2}, {1: 1, "a": 2}, {1, "b"}, [iter([1]), object()]):
        assert jax.grad(make(registry))(1.0) == 2.0
