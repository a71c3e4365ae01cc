"""A batching rule of one's own, which sees the call before differentiation does."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def product(weight, x):
    return jnp.tanh(x @ weight)


def make(calls):
    """`product`, batched into one product wherever only `x` is batched."""
    f = eqg.custom_vjp(product)
    f.def_fwd(lambda weight, x: (f(weight, x), (weight, x)))

    @f.def_bwd
    def bwd(residuals, ct):
        weight, x = residuals
        inner = ct * (1 - product(weight, x) ** 2)
        return x.T @ inner, inner @ weight.T

    @f.def_vmap
    def batched(axis_size, batched, weight, x):
        calls.append((axis_size, batched))
        if batched != (False, True):
            return NotImplemented
        out = f(weight, x.reshape(-1, x.shape[-1]))
        return out.reshape(*x.shape[:-1], -1), True

    return f


WEIGHT = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
XS = jnp.linspace(-2.0, 2.0, 30).reshape(5, 2, 3)


def loss(f):
    return lambda weight, x: jnp.sum(jnp.sin(f(weight, x)))


def total(f, axes=(None, 0)):
    return lambda weight, xs: jnp.sum(jax.vmap(loss(f), axes)(weight, xs))


ORDERS = {
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "grad(vmap)": lambda f: jax.grad(total(f), (0, 1)),
    "jit(grad(vmap))": lambda f: jax.jit(jax.grad(total(f), (0, 1))),
    "grad(jit(vmap))": lambda f: jax.grad(jax.jit(total(f)), (0, 1)),
    "grad(vmap(jit))": lambda f: jax.grad(total(jax.jit(f)), (0, 1)),
    "vmap(grad)": lambda f: jax.vmap(jax.grad(loss(f), (0, 1)), (None, 0)),
    "jvp(vmap)": lambda f: lambda w, xs: jax.jvp(jax.vmap(f, (None, 0)), (w, xs), (w, xs)),
    "vmap(jvp)": lambda f: jax.vmap(lambda w, x: jax.jvp(f, (w, x), (w, x)), (None, 0)),
    "hessian(vmap)": lambda f: jax.hessian(total(f)),
    "vmap(hessian)": lambda f: jax.vmap(jax.hessian(loss(f)), (None, 0)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(total(f)), (0, 1)),
    "scan(vmap)": lambda f: jax.grad(
        lambda w, xs: jax.lax.scan(lambda c, _: (c + total(f)(w * c, xs), None), 1.0, None, 2)[
            0
        ]
    ),
    "vmap(scan)": lambda f: jax.grad(
        lambda w, xs: jnp.sum(
            jax.vmap(
                lambda x: jax.lax.scan(lambda c, _: (c + loss(f)(w, x), None), 1.0, None, 2)[0]
            )(xs)
        )
    ),
    "linearize": lambda f: lambda w, xs: jax.linearize(total(f), w, xs)[1](w, xs),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order(order):
    calls = []
    f = make(calls)
    assert_close(ORDERS[order](f)(WEIGHT, XS), ORDERS[order](product)(WEIGHT, XS))
    assert calls


def test_one_weight_gradient_for_the_batch():
    """The purpose: no product per example is left, and no sum over their results."""
    plain = eqg.custom_vjp(product)
    plain.def_fwd(lambda weight, x: (plain(weight, x), (weight, x)))
    plain.def_bwd(lambda r, ct: (r[1].T @ ct, ct @ r[0].T))
    shapes = lambda f: str(jax.make_jaxpr(jax.grad(total(f)))(WEIGHT, XS))
    per_example = "[5,3,4]"  # one gradient of the weight for each of five examples
    assert per_example in shapes(plain)
    assert per_example not in shapes(make([]))


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("scan", [jax.lax.scan, eqg.filter_scan])
def test_declined_for_the_second_trace_of_a_loop(scan, kind):
    """The carry is not batched at first. The rule makes it so, and declines the next trace,
    whose derivative rule was compared with the batched output of the first."""
    plain = lambda h, w: jnp.sin(h) * w
    if kind == "jvp":
        f = eqg.custom_jvp(plain)
        f.def_jvp(lambda p, t: (f(*p), jnp.cos(p[0]) * p[1] * t[0] + jnp.sin(p[0]) * t[1]))
    else:
        f = eqg.custom_vjp(plain)
        f.def_fwd(lambda h, w: (f(h, w), (h, w)))
        f.def_bwd(lambda r, ct: (jnp.cos(r[0]) * r[1] * ct, jnp.sum(jnp.sin(r[0]) * ct)))

    @f.def_vmap
    def batched(axis_size, batched, h, w):
        if all(batched):
            return NotImplemented
        return jax.vmap(plain, [0 if b else None for b in batched])(h, w), True

    def loss(f, scan):
        one = lambda w: scan(lambda h, _: (f(h, w), None), jnp.ones(3), None, 2)[0]
        return lambda ws: jnp.sum(jax.vmap(one)(ws))

    ws = jnp.array([0.3, 0.5])
    assert_close(jax.grad(loss(f, scan))(ws), jax.grad(loss(plain, jax.lax.scan))(ws))


def test_batched_configuration_and_closures():
    """The rule knows of positional arguments only; others are batched as without it."""

    def never(axis_size, batched, *args, **kwargs):
        raise AssertionError("called though no positional argument is batched")

    f = eqg.custom_jvp(lambda x, *, scale: scale * x)
    f.def_jvp(lambda p, t, *, scale: (f(*p, scale=scale), scale * t[0]))
    f.def_vmap(never)
    scales = jnp.arange(3.0)
    grad = lambda s: jax.grad(lambda x: f(x, scale=s))(2.0)
    assert jnp.array_equal(jax.vmap(grad)(scales), scales)

    def closing(scale):
        g = eqg.custom_jvp(lambda x: scale * x)
        g.def_jvp(lambda p, t: (g(*p), scale * t[0]))
        g.def_vmap(never)
        return jax.grad(g)(2.0)

    assert jnp.array_equal(jax.vmap(closing)(scales), scales)
    assert jnp.array_equal(jax.jit(jax.vmap(closing))(scales), scales)
