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


def _backward(fn):
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


# It brings its own mesh, so it can't be sharded over another one.
@case("psum_gradient", reference=_identity, skip=("transforms",))
def _():
    def total(x):
        # The sum over one device, which is the whole mesh.
        mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec()
        fn = lambda x: eqg.psum_gradient(x, "i")
        return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    # `vmap` of an eager `shard_map` over a mesh of one device is JAX's affair.
    return total, (vector(),)


@case("clip_gradient", **_backward(lambda ct: jnp.clip(ct, -0.5, 1.0)))
def _():
    return lambda x: eqg.clip_gradient(x, -0.5, 1.0), (vector(),)


def _to_norm(ct, max_norm):
    return ct * jnp.minimum(1.0, max_norm / jnp.sqrt(jnp.sum(ct**2)))


@case("clip_gradient_norm", **_backward(lambda ct: _to_norm(ct, 0.7)))
def _():
    return lambda x: eqg.clip_gradient_norm(x, 0.7), (vector(),)


@case("normalize_gradient", **_backward(lambda ct: _to_norm(ct * 1e6, 1.0)))
def _():
    return eqg.normalize_gradient, (vector(),)


@case("zero_nonfinite_gradient", **_backward(_identity))
def _():
    return eqg.zero_nonfinite_gradient, (vector(),)


@case(
    "noise_gradient",
    **_backward(lambda ct: eqg.noise_gradient(ct, key=jr.key(0), stddev=0.0)),
)
def _():
    # Noise itself has no witness here; without it, it is the identity.
    return lambda x: eqg.noise_gradient(x, key=jr.key(0), stddev=0.0), (vector(),)


def _to_half_and_back(ct):
    return ct.astype("float16").astype(ct.dtype)


@case("cast_gradient", **_backward(_to_half_and_back))
def _():
    return lambda x: eqg.cast_gradient(x, "float16"), (vector(),)


@case("on_backward", **_backward(jnp.tanh))
def _():
    return lambda x: eqg.on_backward(x, jnp.tanh), (vector(),)


@case("on_forward", reference=_identity)
def _():
    return lambda x: eqg.on_forward(x, jnp.round), (vector(),)


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
