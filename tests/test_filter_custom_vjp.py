"""`eqg.filter_custom_vjp`: what works with Equinox's works, and what fails there does too.

A test that takes `filter_custom_vjp` runs with both decorators. The others are of what
Equinox's does not have.
"""

import math

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]


X, Y = jnp.array([0.3, -1.2, 2.0]), jnp.array([1.5, 0.4, -0.7])


@pytest.fixture(params=[eqx, eqg], ids=["equinox", "eqx_grads"])
def filter_custom_vjp(request):
    has_new = getattr(jax.config, "jax_custom_vjp3", False) and jax.__version_info__ < (0, 11)
    if request.param is eqx and has_new:
        pytest.skip("Equinox's can't be called with `jax_custom_vjp3` (JAX 0.10, see peers)")
    return request.param.filter_custom_vjp


def with_rules(decorator, fn, fwd, bwd):
    decorated = decorator(fn)
    decorated.def_fwd(fwd)
    decorated.def_bwd(bwd)
    return decorated


def test_python_numbers_are_static_under_jit(filter_custom_vjp):
    """T5, for both kinds of argument, and for outputs."""

    @filter_custom_vjp
    def f(vjp_arg, p, *, scale):
        x, q = vjp_arg
        assert type(p) is float
        assert type(q) is float
        assert type(scale) is float
        return (x * math.floor(p) * q if p == 2.5 else x), p + q

    @f.def_fwd
    def f_fwd(perturbed, vjp_arg, p, *, scale):
        assert perturbed == (True, False)
        return f(vjp_arg, p, scale=scale), None

    @f.def_bwd
    def f_bwd(residuals, grad_out, perturbed, vjp_arg, p, *, scale):
        assert grad_out[1] is None
        assert type(p) is float
        assert type(vjp_arg[1]) is float
        return grad_out[0] * math.floor(p) * scale, None

    def call(x):
        y, number = f((x, 3.0), 2.5, scale=7.0)
        assert type(number) is float
        assert number == 5.5
        return y

    x = jnp.array(1.0)
    assert jax.jit(call)(x) == 6.0
    assert jax.jit(jax.value_and_grad(call))(x) == (6.0, 14.0)
    assert jax.grad(jax.jit(call))(x) == 14.0
    scan = lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, length=2)[0]
    assert jax.grad(scan)(x) == 196.0
    assert type(f((1.0, 3.0), 2.5, scale=7.0)[0]) is float


def test_residuals_may_depend_on_perturbed_in_scan(filter_custom_vjp):
    """jax#16614"""
    fwd = lambda perturbed, xy: (xy[0] + xy[1], None if perturbed[1] else [])
    f = with_rules(filter_custom_vjp, lambda xy: xy[0] + xy[1], fwd, lambda r, ct, *_: (ct, ct))
    step = lambda xy, _: ((f(xy), xy[0]), None)
    grad = jax.grad(lambda x: jax.lax.scan(step, (x, jnp.array(1.0)), length=3)[0][0])
    assert grad(jnp.array(1.0)) == 3.0


# What does not work with Equinox's.


def test_a_python_number_beside_one_has_a_gradient():
    """With Equinox it is zero: the output is a Python float there, and so static."""
    f = with_rules(
        eqg.filter_custom_vjp,
        lambda x, y: x * y,
        lambda perturbed, x, y: (x * y, None),
        lambda residuals, ct, perturbed, x, y: ct * y,
    )
    assert jax.grad(lambda x: f(x, 3.0))(2.0) == 3.0
    assert jax.value_and_grad(lambda x: f(x, 3.0))(2.0) == (6.0, 3.0)


def test_a_cotangent_may_be_none_for_a_whole_subtree_and_is_broadcast_and_cast():
    f = with_rules(
        eqg.filter_custom_vjp,
        lambda tree: tree["a"] * 2,
        lambda perturbed, tree: (tree["a"] * 2, None),
        lambda residuals, ct, perturbed, tree: {"a": jnp.full((2, 3), 1.0), "b": None},
    )
    tree = {"a": X.astype(jnp.bfloat16), "b": [X, {"c": Y}]}
    grads = jax.grad(lambda tree: jnp.sum(f(tree)).astype(jnp.float32))(tree)
    assert grads["a"].dtype == jnp.bfloat16
    assert_close(grads["a"], jnp.full(3, 2.0, jnp.bfloat16))
    assert_close(grads["b"], [jnp.zeros(3), {"c": jnp.zeros(3)}])


def test_a_compiled_function_and_compiled_rules():
    """`eqx.filter_jit` below each decorator, as programs of Equinox's users have it."""

    def build(decorator):
        @decorator
        @eqx.filter_jit
        def objective(model, scale=None):
            return jnp.sum(model.weight**2) * (1.0 if scale is None else scale["s"])

        @objective.def_fwd
        @eqx.filter_jit
        def objective_fwd(_, model, scale=None):
            return objective(model, scale), {"model": model, "name": "kept"}

        @objective.def_bwd
        @eqx.filter_jit
        def objective_bwd(residuals, grad_out, _, model, scale=None):
            zeros = jax.tree.map(lambda _: None, eqx.filter(model, eqx.is_inexact_array))
            ct = 3.0 * grad_out * residuals["model"].weight
            return eqx.tree_at(lambda m: m.weight, zeros, ct, is_leaf=lambda x: x is None)

        return objective

    model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    ours, theirs = build(eqg.filter_custom_vjp), build(eqx.filter_custom_vjp)
    for arguments in ((), ({"s": jnp.array(2.0), "name": "static"},)):
        for jit in (lambda f: f, eqx.filter_jit):
            grads = [jit(eqx.filter_grad(f))(model, *arguments).weight for f in (ours, theirs)]
            assert jnp.array_equal(grads[0], 3.0 * model.weight)
            assert jnp.array_equal(grads[0], grads[1])
