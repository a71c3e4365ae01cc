"""Reports of others, by number, each in the form in which it was reported."""

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import optax

from .compositions import both_ways
from .registry import both, for_each, ran, shape


class Scale(eqx.Module):
    factor: jax.Array

    def __call__(self, x):
        return self.factor * jnp.sin(x)


@both
def equinox_745_with_respect_to_the_module(ruled):
    """Not zero, as it is with `nondiff_argnums`."""
    f = ruled(lambda fun, x, y: fun(x) * y)

    def loss(fun, x):
        body = lambda x, y: (f(fun, x, y), None)
        return jax.lax.scan(body, x, jnp.linspace(0.5, 1.5, 3))[0]

    x, fun = jnp.array(0.7), Scale(jnp.array(1.3))
    outer = eqx.filter_grad(eqx.filter_jit(loss))(fun, x)
    return both_ways(loss, fun, x), outer


@both
def equinox_964_shortcut_of_an_inner_optimization(ruled):
    """With integer counts in the optimizer's state, and an auxiliary output:
    https://github.com/patrick-kidger/equinox/issues/964"""
    optimizer = optax.adam(1e-1)

    def inner_loss(params):
        flat = jax.flatten_util.ravel_pytree(params)[0]
        return jnp.sum(flat**2), {"params": flat}

    def optimize(params, opt_state):
        def step(carry, _):
            params, opt_state = carry
            grads, aux = jax.grad(inner_loss, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), aux

        return jax.lax.scan(step, (params, opt_state), None, length=3)

    f = ruled(optimize)

    def outer_loss(params):
        (params, opt_state), aux = f(params, optimizer.init(params))
        return jnp.sum(params["w"]) + jnp.sum(aux["params"]), opt_state[0].count

    params = {"w": jnp.linspace(0.5, 1.0, 3), "b": jnp.array(0.2)}
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it
        inner = eqx.filter_jit(eqx.filter_value_and_grad(outer_loss, has_aux=True))(params)
        return inner, jax.grad(jax.jit(outer_loss), has_aux=True)(params)


@both
def jax_20889_mask_in_a_scan_carry(ruled):
    """https://github.com/jax-ml/jax/issues/20889"""
    f = ruled(lambda x, mask: jnp.where(mask, jnp.sin(x), 0))

    def loss(x, mask):
        step = lambda carry, _: ((f(*carry), carry[1]), None)
        (x, _), _ = jax.lax.scan(step, (x, mask), None, length=2)
        return jnp.sum(x)

    return both_ways(loss, jnp.linspace(0.1, 0.9, 4), jnp.array([True, False, True, True]))


@both
def jax_23065_indices_under_jit(ruled):
    """https://github.com/jax-ml/jax/issues/23065"""
    f = jax.jit(ruled(lambda x, indices: x[indices] ** 2))
    x, indices = jnp.linspace(0.1, 0.9, 6), jnp.array([1, 3, 5])
    return jax.jacobian(f)(x, indices), jax.jacfwd(f)(x, indices)


@both
def jax_3964_seed_under_vmap(ruled):
    """https://github.com/jax-ml/jax/issues/3964"""
    f = ruled(lambda scale, key: scale * jax.random.normal(key, (3,)))
    keys = jax.random.split(jax.random.key(0), 4)
    total = lambda scale: jnp.sum(jax.vmap(f, in_axes=(None, 0))(scale, keys) ** 2)
    return both_ways(total, jnp.array(0.7))


@for_each("jvp", "vjp")
def jax_2912_traced_configuration(rules, kind):
    """A traced keyword-only argument: https://github.com/jax-ml/jax/issues/2912"""

    def value(x, *, scale):
        return jnp.sin(x) * scale

    def jvp(primals, tangents, *, scale):
        return f(*primals, scale=scale), ran(jnp.cos(primals[0]) * scale * tangents[0])

    def fwd(x, *, scale):
        return f(x, scale=scale), ran(jnp.cos(x))

    def bwd(cos, ct, *, scale):
        return (cos * scale * ct,)

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
    return both_ways(lambda x, scale: f(x, scale=scale), jnp.array(0.7), jnp.array(1.3))


@both
def jax_16000_integer_primal(ruled):
    """https://github.com/jax-ml/jax/issues/16000"""
    f = ruled(lambda x, n: x * n.astype(float))
    total = lambda x, n: jnp.sum(jax.vmap(f, in_axes=(None, 0))(x, n))
    return both_ways(total, jnp.array(0.7), jnp.arange(3))


@shape
def jax_18113_integer_index_through_jvp_and_vjp(rules):
    """https://github.com/jax-ml/jax/issues/18113"""

    def jvp(primals, tangents):
        return f(*primals), ran((tangents[0], None))

    f = rules.jvp(lambda x, index: (x, index), jvp)

    def take(x):
        x, index = f(x, jnp.array(1))
        return jnp.sin(x)[index]

    x = jnp.linspace(0.1, 0.9, 3)
    pushed = lambda x: jax.jvp(take, (x,), (x,))[1]
    return pushed(x), jax.vjp(pushed, x)[1](jnp.array(1.0))
