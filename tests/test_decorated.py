"""A decorated function is a good citizen: names, help, copies, pickles, hashes, PyTree."""

import copy
import functools as ft
import pickle

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest


pytestmark = pytest.mark.versions


@eqg.custom_jvp
def doubled(x, *, scale: float = 2.0):
    """Twice `x`."""
    return scale * x


@doubled.def_jvp
def doubled_jvp(primals, tangents, *, scale):
    return doubled(*primals, scale=scale), scale * tangents[0]


@eqg.custom_vjp
def tripled(x):
    """Three times `x`."""
    return 3 * x


@tripled.def_fwd
def tripled_fwd(x):
    return tripled(x), None


@tripled.def_bwd
def tripled_bwd(residuals, ct):
    return (3 * ct,)


BOTH = pytest.mark.parametrize("f", [doubled, tripled])


def test_local_functions_copy():
    def make(scale):
        f = eqg.custom_jvp(lambda x: scale * x)
        f.def_jvp(lambda p, t: (f(*p), 7 * t[0]))
        return f

    other = copy.deepcopy(make(2.0))
    assert jax.grad(other)(1.0) == 7.0
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"local object|lambda"):
        pickle.dumps(make(2.0))


@BOTH
def test_a_pytree(f):
    assert isinstance(f, eqx.Module)
    leaves, treedef = jax.tree.flatten(f)
    assert not any(map(eqx.is_array, leaves))
    again = jax.tree.unflatten(treedef, leaves)
    assert jax.grad(again)(1.0) == jax.grad(f)(1.0)
    assert again.__name__ == f.__name__
    assert again.__doc__ == f.__doc__
    assert eqx.filter_jit(lambda g, x: jax.grad(g)(x))(f, 1.0) == jax.grad(f)(1.0)


def test_def_with_and_without_options():
    f = eqg.custom_jvp(lambda x: x)
    assert f.def_jvp(doubled_jvp) is doubled_jvp
    assert f.def_jvp(symbolic_zeros=True)(doubled_jvp) is doubled_jvp
    g = eqg.custom_vjp(lambda x: x)
    assert g.def_fwd(tripled_fwd) is tripled_fwd
    assert g.def_bwd(tripled_bwd) is tripled_bwd
    assert g.def_bwd(symbolic_zeros=True)(tripled_bwd) is tripled_bwd
    assert g.def_jvp(symbolic_zeros=False)(doubled_jvp) is doubled_jvp
    assert g.def_vmap(tripled) is tripled


@pytest.fixture(params=["jvp", "vjp"])
def linear(request):
    """A decorated Module with arrays, whose rules call it by name."""
    module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    if request.param == "jvp":
        f = eqg.custom_jvp(module)
        f.def_jvp(lambda p, t: (f(*p), 3 * t[0]))
    else:
        f = eqg.custom_vjp(module)
        f.def_fwd(lambda x: (f(x), None))
        f.def_bwd(lambda r, ct: (3 * ct,))
    return f


def _moved(f):
    return eqx.tree_at(lambda f: f.__wrapped__.bias, f, f.__wrapped__.bias + 100)


def test_a_copy_of_a_decorated_module_has_its_own_arrays_in_its_rules(linear):
    x, moved = jnp.array([1.0, 2.0]), _moved(linear)
    value = lambda f, x: jax.vjp(f, x)[0]
    want = moved.__wrapped__(x)
    eqgt.assert_trees_close(value(moved, x), want)
    eqgt.assert_trees_close(eqx.filter_jit(value)(moved, x), want)
    eqgt.assert_trees_close(jax.jit(ft.partial(value, moved))(x), want)
    eqgt.assert_trees_close(value(linear, x), linear.__wrapped__(x))  # and the first one too
    both = jax.tree.map(lambda a: jnp.stack([a, a + 1]), eqx.filter(linear, eqx.is_array))
    both = eqx.combine(both, linear)
    run = lambda fn: eqx.filter_vmap(fn, in_axes=(eqx.if_array(0), None))(both, x)
    eqgt.assert_trees_close(run(value), run(lambda f, x: f.__wrapped__(x)))


def test_a_copy_of_a_decorated_module_in_a_loop(linear):
    moved = _moved(linear)

    def loss(x, f):
        return jnp.sum(jax.lax.scan(lambda h, _: (f(h), None), x, None, 2)[0])

    x = jnp.array([1.0, 2.0])
    value, grad = eqx.filter_jit(jax.value_and_grad(loss))(x, moved)
    eqgt.assert_trees_close(value, loss(x, moved.__wrapped__), tolerance=1e-5)
    eqgt.assert_trees_close(grad, jnp.full(2, 9.0))


def test_a_compiled_function_in_a_rule_is_not_traced_for_a_copy():
    module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    f = eqg.custom_jvp(module)
    inner = jax.jit(lambda x: f(x))  # it would keep the arrays of the copy
    f.def_jvp(lambda p, t: (inner(*p), 3 * t[0]))
    with pytest.raises(eqg.RuleError, match="runs for a copy that has other arrays"):
        jax.vjp(_moved(f), jnp.ones(2))
    eqgt.assert_trees_close(jax.vjp(f, jnp.ones(2))[0], module(jnp.ones(2)))
