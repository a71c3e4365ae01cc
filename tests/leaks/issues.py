"""Reports of others, by number, each in the form in which it was reported."""

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import optax

from .registry import for_each, ran, shape


class Scale(eqx.Module):
    factor: jax.Array

    def __call__(self, x):
        return self.factor * jnp.sin(x)


def product_of(rules, kind):
    """`f(fun, x, y) = fun(x) * y`; its rule differentiates `fun`, which may be a Module."""

    def value(fun, x, y):
        return fun(x) * y

    def jvp(primals, tangents):
        out, t_out = eqx.filter_jvp(value, primals, tangents)
        return out, ran(t_out)

    def fwd(fun, x, y):
        return f(fun, x, y), ran((fun, x, y))

    def bwd(residuals, ct):
        return eqx.filter_vjp(value, *residuals)[1](ct)

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
    return f


def equinox_745_loss(rules, kind):
    f = product_of(rules, kind)

    def loss(fun, x):
        body = lambda x, y: (f(fun, x, y), None)
        return jax.lax.scan(body, x, jnp.linspace(0.5, 1.5, 3))[0]

    return loss


@for_each(("jvp", "vjp"))
def equinox_745_with_respect_to_the_module(rules, kind):
    """Not zero, as it is with `nondiff_argnums`."""
    loss = equinox_745_loss(rules, kind)
    x, fun = jnp.array(0.7), Scale(jnp.array(1.3))
    return (
        jax.grad(loss)(fun, x),
        jax.jit(jax.grad(loss))(fun, x),
        jax.grad(jax.jit(loss))(fun, x),
        eqx.filter_jit(eqx.filter_value_and_grad(loss))(fun, x),
        eqx.filter_grad(eqx.filter_jit(loss))(fun, x),
    )


@for_each(("jvp", "vjp"))
def equinox_964_shortcut_of_an_inner_optimization(rules, kind):
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

    def jvp(primals, tangents):
        out, t_out = eqx.filter_jvp(optimize, primals, tangents)
        return out, ran(t_out)

    def fwd(params, opt_state):
        return f(params, opt_state), ran((params, opt_state))

    def bwd(residuals, ct):
        return eqx.filter_vjp(optimize, *residuals)[1](ct)

    f = rules.jvp(optimize, jvp) if kind == "jvp" else rules.vjp(optimize, fwd, bwd)

    def outer_loss(params):
        (params, opt_state), aux = f(params, optimizer.init(params))
        return jnp.sum(params["w"]) + jnp.sum(aux["params"]), opt_state[0].count

    params = {"w": jnp.linspace(0.5, 1.0, 3), "b": jnp.array(0.2)}
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it
        inner = eqx.filter_jit(eqx.filter_value_and_grad(outer_loss, has_aux=True))(params)
        return inner, jax.grad(jax.jit(outer_loss), has_aux=True)(params)


@for_each(("jvp", "vjp"))
def jax_20889_mask_in_a_scan_carry(rules, kind):
    """https://github.com/jax-ml/jax/issues/20889"""

    def value(x, mask):
        return jnp.where(mask, jnp.sin(x), 0)

    def jvp(primals, tangents):
        (x, mask), (t_x, _) = primals, tangents
        return f(x, mask), ran(jnp.where(mask, jnp.cos(x) * t_x, 0))

    def fwd(x, mask):
        return f(x, mask), ran((x, mask))

    def bwd(residuals, ct):
        x, mask = residuals
        return jnp.where(mask, jnp.cos(x) * ct, 0), None

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)

    def loss(x, mask):
        step = lambda carry, _: ((f(*carry), carry[1]), None)
        (x, _), _ = jax.lax.scan(step, (x, mask), None, length=2)
        return jnp.sum(x)

    x, mask = jnp.linspace(0.1, 0.9, 4), jnp.array([True, False, True, True])
    return jax.grad(loss)(x, mask), jax.jit(jax.grad(loss))(x, mask)


@for_each(("jvp", "vjp"))
def jax_23065_indices_under_jit(rules, kind):
    """https://github.com/jax-ml/jax/issues/23065"""

    def value(x, indices):
        return x[indices] ** 2

    def jvp(primals, tangents):
        (x, indices), (t_x, _) = primals, tangents
        return f(x, indices), ran(2 * x[indices] * t_x[indices])

    def fwd(x, indices):
        return f(x, indices), ran((x, indices))

    def bwd(residuals, ct):
        x, indices = residuals
        return jnp.zeros_like(x).at[indices].add(2 * x[indices] * ct), None

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
    x, indices = jnp.linspace(0.1, 0.9, 6), jnp.array([1, 3, 5])
    jitted = jax.jit(f)
    return jax.jacobian(jitted)(x, indices), jax.jacfwd(jitted)(x, indices)


@shape
def jax_3964_seed_under_vmap(rules):
    """https://github.com/jax-ml/jax/issues/3964"""

    def sample(scale, key):
        return scale * jax.random.normal(key, (3,))

    def jvp(primals, tangents):
        (scale, key), (t_scale, t_key) = primals, tangents
        assert t_key is None
        return f(scale, key), ran(t_scale * jax.random.normal(key, (3,)))

    f = rules.jvp(sample, jvp)
    keys, scale = jax.random.split(jax.random.key(0), 4), jnp.array(0.7)
    total = lambda scale: jnp.sum(jax.vmap(f, in_axes=(None, 0))(scale, keys) ** 2)
    return jax.grad(total)(scale), jax.grad(jax.jit(total))(scale)


@for_each(("jvp", "vjp"))
def jax_2912_traced_configuration(rules, kind):
    """A traced keyword-only argument: https://github.com/jax-ml/jax/issues/2912"""

    def value(x, *, scale):
        return jnp.sin(x) * scale

    def jvp(primals, tangents, *, scale):
        (x,), (t_x,) = primals, tangents
        return f(x, scale=scale), ran(jnp.cos(x) * scale * t_x)

    def fwd(x, *, scale):
        return f(x, scale=scale), ran(jnp.cos(x))

    def bwd(cos, ct, *, scale):
        return (cos * scale * ct,)

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
    x, scale = jnp.array(0.7), jnp.array(1.3)
    inner = jax.jit(jax.grad(lambda x, scale: f(x, scale=scale)))
    outer = jax.grad(jax.jit(lambda x, scale: f(x, scale=scale)))
    return inner(x, scale), outer(x, scale)


@shape
def jax_16000_integer_primal(rules):
    """https://github.com/jax-ml/jax/issues/16000"""

    def jvp(primals, tangents):
        assert tangents[1] is None
        return f(*primals), ran(tangents[0] * primals[1].astype(float))

    f = rules.jvp(lambda x, n: x * n.astype(float), jvp)
    total = lambda x, n: jnp.sum(jax.vmap(f, in_axes=(None, 0))(x, n))
    n = jnp.arange(3)
    return jax.grad(total)(jnp.array(0.7), n), jax.jit(jax.grad(total))(jnp.array(0.7), n)


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
