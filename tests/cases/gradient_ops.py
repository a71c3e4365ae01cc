"""Gradient ops and probes. Their derivatives are wrong on purpose: each says which it wants."""

import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from .registry import case, vector


MASK = jnp.array([True, False, True])


def _identity(x):
    return x


def _tangent(primals, tangents):
    return tangents[0]


def backward(fn):
    """The cotangent is `fn` of the one that comes in, and forward mode is the identity."""
    return {
        "nonlinear": True,
        "expected_tangent": _tangent,
        "expected_cotangent": lambda primals, ct: (fn(ct),),
    }


# To second order these two give the derivative of the gradient as it is, which no function
# has: the check holds it against differences of the gradient.
@case("scale_gradient", reference=lambda x: 3.0 * x)
def _():
    return ft.partial(eqg.scale_gradient, s=3.0), (vector(),)


@case("reverse_gradient", reference=lambda x: -0.5 * x)
def _():
    return ft.partial(eqg.reverse_gradient, strength=0.5), (vector(),)


@case("mask_gradient", reference=lambda x: jnp.where(MASK, x, 0.0))
def _():
    return lambda x: eqg.mask_gradient(x, MASK), (vector(),)


def _two_selections(x):
    return jnp.where(x < 50, jnp.log1p(jnp.exp(jnp.where(x < 50, x, 0.0))), x)


# `jax.debug_nans` stops at the product that is dropped afterwards.
@case("zero_safe", reference=_two_selections, skip=("finite",))
def _():
    softplus = lambda x: jnp.where(x < 50, jnp.log1p(jnp.exp(x)), x)
    return eqg.zero_safe(softplus), (jnp.array([0.25, -1.0, 1000.0]),)


def _psum_gradient(n_devices):
    mesh = jax.make_mesh((n_devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    fn = lambda x: eqg.psum_gradient(x, "i")
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _sum_of_shards(ct):
    return jnp.tile(jnp.sum(ct.reshape(2, -1), 0), 2)


# These bring their own mesh, so they can't be sharded over another one. The backward rule is
# linear, but not the transpose of the forward rule.
@case("psum_gradient", **backward(_sum_of_shards), skip=("transforms",))
def _():
    return _psum_gradient(2), (jnp.array([0.5, -1.2, 2.0, 0.3]),)


# Of one shard, where it is the identity in both modes: also to higher orders.
@case("psum_gradient: one device", reference=_identity, skip=("transforms",))
def _():
    return _psum_gradient(1), (vector(),)


@case("clip_gradient", **backward(lambda ct: jnp.clip(ct, -0.5, 1.0)))
def _():
    return lambda x: eqg.clip_gradient(x, -0.5, 1.0), (vector(),)


def to_norm(ct, max_norm):
    return ct * jnp.minimum(1.0, max_norm / jnp.sqrt(jnp.sum(ct**2)))


@case("clip_gradient_norm", **backward(lambda ct: to_norm(ct, 0.7)))
def _():
    return lambda x: eqg.clip_gradient_norm(x, 0.7), (vector(),)


@case("normalize_gradient", **backward(lambda ct: ct / jnp.sqrt(jnp.sum(ct**2))))
def _():
    return eqg.normalize_gradient, (vector(),)


@case("zero_nonfinite_gradient", **backward(_identity))
def _():
    return eqg.zero_nonfinite_gradient, (vector(),)


def _with_noise(ct):
    """There is one leaf, and so one key."""
    (key,) = jr.split(jr.key(0), 1)
    return ct + 0.5 * jr.normal(key, ct.shape, ct.dtype)


# The noise is a constant, so the derivative is affine in the cotangent.
@case("noise_gradient", **backward(_with_noise))
def _():
    return lambda x: eqg.noise_gradient(x, key=jr.key(0), stddev=0.5), (vector(),)


def _to_half_and_back(ct):
    return ct.astype("float16").astype(ct.dtype)


@case("cast_gradient", **backward(_to_half_and_back))
def _():
    return lambda x: eqg.cast_gradient(x, "float16"), (vector(),)


@case("on_backward", **backward(jnp.tanh))
def _():
    return lambda x: eqg.on_backward(x, jnp.tanh), (vector(),)


# The slot has no influence on the value, and the gradient of a summand all the same.
@case("probe", reference=lambda x, slot: x + slot)
def _():
    return eqg.probe, (vector(), jnp.zeros(3))


def _ignore(*_):
    pass


@case("tap_gradient", reference=_identity)
def _():
    return lambda x: eqg.tap_gradient(x, _ignore), (vector(),)


@case("watch_gradient", reference=_identity)
def _():
    return lambda x: eqg.watch_gradient(x, "x"), (vector(),)
