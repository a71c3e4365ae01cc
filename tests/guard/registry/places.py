"""Ops in places where JAX or Python treats a function in another way: methods, checks, users'
classes, and tangents that are transposed."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify  # noqa: TID251  an interpreter of others

from ..test_core import Plain
from .entry import entry


# A line has as many arguments as there is room for.
# fmt: off
ONCE = {"transforms": False, "costs": False, "precisions": ("float64",), "leaks": False}
FIRST, SHORT = ("value", "jvp", "vjp"), ("value", "jvp", "vjp", "FR")
rng = np.random.default_rng(5)
X, Y, W = rng.normal(size=3), rng.normal(size=3), rng.normal(size=(4, 3))


def both(fn):
    """`fn(x, w)` with rules for both modes, which say what autodiff says."""
    forward, reverse = eqg.custom_jvp(fn), eqg.custom_vjp(fn)
    forward.def_jvp(lambda p, t: jax.jvp(fn, p, t))
    reverse.def_fwd(lambda *args: (reverse(*args), args))
    reverse.def_bwd(lambda args, ct: jax.vjp(fn, *args)[1](ct))
    return forward, reverse


wave = lambda x, w: jnp.sin(w @ x) * w[:, 0]
shifted = lambda x, w: wave(x - Y.astype(x.dtype), w)


# ---------------------------------------------------------------- methods

straight = ft.partial(eqg.with_gradient_of, surrogate_fn=lambda self, x: wave(x, self.w))
of_chunks = ft.partial(eqg.losses.chunked, axis=(None, 0), chunk=2)
of_rows = lambda self, rows: jnp.sum(jnp.sin(rows @ self.w.T) ** 2)


class Layer(eqx.Module):
    """Each decorator as a method binds `self`, whose arrays have a derivative."""

    w: jax.Array

    checkpointed = eqg.filter_checkpoint(lambda self, x: wave(x, self.w))
    masked = eqg.zero_safe(lambda self, x: jnp.where(x > 0, jnp.sqrt(x), 0) * self.w[0])
    straight = straight(lambda self, x: jnp.round(wave(x, self.w)))
    chunks = of_chunks(of_rows)

    def calls(self, x):
        rows = jnp.outer(jnp.sin(x), x)
        yield from (self.checkpointed(x), self.masked(x), self.straight(x), self.chunks(rows))


methods = lambda x, w: tuple(Layer(w).calls(x))


def methods_plain(x, w, rounded=jnp.round):
    positive = jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)
    rows = jnp.outer(jnp.sin(x), x)
    mean = jnp.sum(jnp.sin(rows @ w.T) ** 2)
    return wave(x, w), positive * w[0], rounded(wave(x, w)), mean


entry("filter_checkpoint: methods", methods, *(X, W), plain=methods_plain,
    smooth=ft.partial(methods_plain, rounded=lambda x: x), **ONCE | {"orders": FIRST})

# ---------------------------------------------------------------- other interpreters


def checked(x, w):
    """Gradients with checks of indices, of NaN and of what a user asserts."""

    def loss(x):
        checkify.check(jnp.sum(x) < 100, "too large")
        branches = [lambda x, rule=rule: rule(x, w) for rule in both(shifted)]
        batch = jax.vmap(rule, (0, None))(x[None], w)
        return jnp.sum(jax.lax.cond(jnp.sum(x) < 50, *branches, x) + batch[0])

    rule, of = both(shifted)[0], ft.partial(checkify.checkify, errors=checkify.all_checks)
    outside = jax.value_and_grad(lambda x: of(loss)(x)[1])(x)
    return of(jax.value_and_grad(loss))(x)[1], outside


entry("custom_vjp: checkify", *(checked, X, W),
    plain=lambda x, w: 2 * (jax.value_and_grad(lambda x: 2 * jnp.sum(shifted(x, w)))(x),),
    **ONCE | {"orders": ("value",)})

# ---------------------------------------------------------------- closures


def of_captured(x, w):
    """The rule holds a traced value in an object, in a container, and in itself. The residual
    of the other one is a function."""
    kept = {"a": [Plain(jnp.sum(jax.lax.stop_gradient(w)), None)]}
    fn = eqg.custom_jvp(lambda x: jnp.sin(x) * kept["a"][0].double)
    fn.def_jvp(lambda p, t: (fn(*p), jnp.cos(p[0]) * t[0] * kept["a"][0].double))
    body = eqg.custom_vjp(lambda x: jnp.sin(x) * later)
    later = kept["a"][0].mean
    body.def_fwd(lambda x: (body(x), lambda: jnp.cos(x) * later))
    body.def_bwd(lambda slope, ct: (slope() * ct,))
    again = eqg.filter_scan(lambda h, x: (h + fn(x), fn(h)), jnp.zeros_like(x[0]), x)
    return fn(x), again, body(x)


def of_captured_plain(x, w):
    fn = lambda x: 2 * jnp.sin(x) * jnp.sum(jax.lax.stop_gradient(w))
    again = jax.lax.scan(lambda h, x: (h + fn(x), fn(h)), jnp.zeros_like(x[0]), x)
    return fn(x), again, fn(x) / 2


entry("custom_jvp: objects of users' classes are captured", of_captured, *(X, W),
    plain=of_captured_plain, own_rule=True, **ONCE | {"orders": SHORT})
