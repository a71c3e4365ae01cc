"""Rules that are right until something happens: a transformation, an edge."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ..rules.arguments import sample
from ..rules.ways import jax_jvp, jax_vjp
from .registry import fault


# transforms


@fault("transforms", "wrong under vmap")
def batching_rule_of_jax(bug):
    """A softmax whose batching rule normalizes the whole batch together."""

    def plain_softmax(x):
        exp = jnp.exp(x)
        return exp / jnp.sum(exp)

    @custom_vmap
    def softmax(x):
        return plain_softmax(x)

    @softmax.def_vmap
    def batched(axis_size, in_batched, x):
        return plain_softmax(x) if bug else jax.vmap(plain_softmax)(x), True

    def fwd(x):
        p = plain_softmax(x)
        return p, p

    bwd = lambda p, ct: (p * (ct - jnp.dot(p, ct)),)
    return jax_vjp(softmax, bwd, fwd), (sample(4),)


# leaks


@fault("leaks", "keeps a tracer")
def remembered_from_the_last_trace(bug):
    """A cache by shape, filled while tracing and used while tracing again."""
    cache = {}

    def tangent(x, t):
        cos = jnp.cos(x)
        if bug and isinstance(x, Tracer):
            cos = cache.setdefault(x.shape, cos)
        return cos * t

    return jax_jvp(jnp.sin, tangent), (sample(4),)


# finite


def _sinc(x):
    near = jnp.abs(x) < 0.1
    safe = jnp.where(near, 1, x)
    return jnp.where(near, 1 - x**2 / 6 + x**4 / 120, jnp.sin(safe) / safe)


def _sinc_slope(x, masked_once=False):
    near = jnp.abs(x) < 0.1
    safe = x if masked_once else jnp.where(near, 1, x)
    far = (jnp.cos(safe) - jnp.sin(safe) / safe) / safe
    return jnp.where(near, -x / 3 + x**3 / 30 - x**5 / 840, far)


@fault("finite", r"at\[0\].*(cotangent|tangent)(?s:.)*nan")
def norm_at_zero(bug):
    @eqg.custom_jvp
    def norm(x):
        return jnp.sqrt(jnp.sum(x**2))

    @norm.def_jvp
    def jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        length = norm(x)
        return length, jnp.dot(x, t) / (length if bug else jnp.where(length == 0, 1, length))

    return norm, (sample(3),), {"at": [(jnp.zeros(3),)]}


@fault("finite", r"at\[0\].*value(?s:.)*nan")
def value_at_zero(bug):
    value = (lambda x: jnp.sin(x) / x) if bug else _sinc
    slope = lambda out, x: _sinc_slope(x)
    return eqg.elementwise(value, slope), (sample(4),), {"at": [(jnp.zeros(2),)]}


@fault("finite", "debug_nans")
def nan_behind_a_mask(bug):
    """Masked by `where`, so only `jax.debug_nans` sees it."""

    def distance_from_one(x):
        return jnp.where(x > 0, jnp.abs(x - 1), 0)

    def cotangents(x, ct):
        side = jnp.sign(jnp.log(x) if bug else x - 1)
        return (jnp.where(x > 0, side, 0) * ct,)

    rule = jax_vjp(distance_from_one, cotangents)
    return rule, (sample(4, low=0.5),), {"at": [(jnp.array([-1.0, 2.0]),)]}


@fault("finite", r"at\[0\].*tangent(?s:.)*nan")
def dead_term(bug):
    """The slope in `y` is infinite, and `y` does not move: 0 * inf."""

    def weigh(x, y):
        return x * jnp.sqrt(y)

    f = jax.custom_jvp(weigh)

    def rule(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        t = jnp.zeros_like(x) if isinstance(t_x, SymbolicZero) else t_x * jnp.sqrt(y)
        if not isinstance(t_y, SymbolicZero):
            t = t + x * t_y / (2 * jnp.sqrt(y))
        elif bug:
            t = t + x * jnp.zeros_like(y) / (2 * jnp.sqrt(y))
        return weigh(x, y), t

    f.defjvp(rule, symbolic_zeros=True)
    options = {"nondifferentiable": ("y",), "at": [(sample(3), jnp.zeros(3))]}
    return f, (sample(3), sample(3, low=0.5)), options
