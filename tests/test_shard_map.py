"""Rules inside `shard_map`, eager and jitted, with replicated and with sharded arguments."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as Spec

from .ops import sin_times, sin_times_elementwise, sin_times_jvp, sin_times_vjp
from .test_transforms import assert_close


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
