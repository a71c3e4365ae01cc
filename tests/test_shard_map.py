"""Rules inside `shard_map`, eager and jitted, with replicated and with sharded arguments."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import assert_close
from .ops import sin_times, sin_times_elementwise, sin_times_jvp, sin_times_vjp


RULES = {"jvp": sin_times_jvp, "vjp": sin_times_vjp, "elementwise": sin_times_elementwise}
SHARDED, REPLICATED = (Spec("i"), Spec("i")), (Spec(), Spec("i"))
WEIGHT = jnp.linspace(0.0, 1.0, 6).reshape(2, 3)
X = jnp.linspace(-1.0, 1.0, 16).reshape(8, 2)
MESH = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))


@eqg.custom_vjp
def product(weight, x):
    return x @ weight


@product.def_fwd
def _product_fwd(weight, x):
    return product(weight, x), (weight, x)


@product.def_bwd
def _product_bwd(residuals, ct):
    weight, x = residuals
    # The weight is the same on every device, and this is the local part of its cotangent:
    # the rule need not know.
    return x.T @ ct, ct @ weight.T


def loss_of(f, check_vma, in_specs=SHARDED):
    sharded = jax.shard_map(
        f, mesh=MESH, in_specs=in_specs, out_specs=Spec("i"), check_vma=check_vma
    )
    return lambda *args: jnp.sum(jnp.sin(sharded(*args)))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jit", ["jit(grad)", "grad(jit)", "eager"])
@pytest.mark.parametrize("rule", RULES)
def test_sharded(rule, jit, check_vma):
    args = (jnp.linspace(0.0, 1.0, 8), jnp.linspace(1.0, 3.0, 8))
    loss = loss_of(RULES[rule], check_vma)
    if jit == "grad(jit)":
        loss = jax.jit(loss)
    grad = jax.grad(loss, (0, 1))
    if jit == "jit(grad)":
        grad = jax.jit(grad)
    plain = jax.grad(lambda x, y: jnp.sum(jnp.sin(sin_times(x, y))), (0, 1))
    assert_close(grad(*args), plain(*args))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_replicated_weight(jit, check_vma):
    weight, x = WEIGHT, X
    loss = loss_of(product, check_vma, REPLICATED)
    grad = jax.grad(loss, (0, 1))
    grad = jax.jit(grad) if jit else grad
    plain = jax.grad(lambda weight, x: jnp.sum(jnp.sin(x @ weight)), (0, 1))
    assert_close(grad(weight, x), plain(weight, x))


@pytest.mark.parametrize("jit", [True, False])
def test_grad_inside(jit):
    """The gradient is taken on each device, of a replicated weight."""

    def per_device(f):
        def loss(weight, x):
            return jax.lax.psum(jnp.sum(jnp.sin(f(weight, x))), "i")

        return jax.shard_map(jax.grad(loss), mesh=MESH, in_specs=REPLICATED, out_specs=Spec())

    weight, x = WEIGHT, X
    with_rule, plain = per_device(product), per_device(lambda weight, x: x @ weight)
    if jit:
        with_rule, plain = jax.jit(with_rule), jax.jit(plain)
    assert_close(with_rule(weight, x), plain(weight, x))


@pytest.mark.parametrize("check_vma", [True, False])
def test_forward_mode(check_vma):
    weight, x = WEIGHT, X
    loss = loss_of(product, check_vma, REPLICATED)
    plain = lambda weight, x: jnp.sum(jnp.sin(x @ weight))
    got = jax.jit(lambda *args: jax.jvp(loss, args, args))(weight, x)
    assert_close(got, jax.jvp(plain, (weight, x), (weight, x)))


def test_vmap_inside():
    weight, x = WEIGHT, X.reshape(8, 1, 2)
    loss = loss_of(jax.vmap(product, (None, 0)), True, REPLICATED)
    plain = lambda weight, x: jnp.sum(jnp.sin(x @ weight))
    assert_close(jax.jit(jax.grad(loss, (0, 1)))(weight, x), jax.grad(plain, (0, 1))(weight, x))


LAYERS = {
    "GRU": lambda key: eqg.nn.GRU(3, 4, key=key),
    "LSTM": lambda key: eqg.nn.LSTM(3, 4, key=key),
    "RNN": lambda key: eqg.nn.RNN(3, 4, key=key),
    "MinGRU": lambda key: eqg.nn.MinGRU(3, 4, key=key),
    "LRU": lambda key: eqg.nn.LRU(3, 4, 4, key=key),
    "Recurrent": lambda key: eqg.nn.Recurrent(
        eqx.nn.GRUCell(3, 4, key=key), checkpoint="replay"
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers(name):
    """Each device has a part of the batch, and all have the weights."""
    params, static = eqx.partition(LAYERS[name](jr.key(0)), eqx.is_inexact_array)
    xs = jr.normal(jr.key(1), (8, 5, 3))

    def total(params, xs):
        return jnp.sum(jnp.sin(eqx.combine(params, static)(xs)[0]))

    in_parts = jax.shard_map(
        lambda params, xs: jax.lax.psum(total(params, xs), "i"),
        mesh=MESH,
        in_specs=(Spec(), Spec("i")),
        out_specs=Spec(),
    )
    got, expected = jax.jit(jax.grad(in_parts))(params, xs), jax.grad(total)(params, xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-4)
