"""Straight-through ops, each with the function whose derivative it takes."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from ..rules.formulas import fake_quantize, fsq_bound, lsq
from .registry import case, vector


ste = eqg.ste


def _identity(x):
    return x


def _hard_tanh(x):
    return jnp.clip(x, -1.0, 1.0)


for _name in ("round", "floor", "ceil", "trunc"):

    @case(f"ste.{_name}", reference=_identity)
    def _(name=_name):
        return getattr(ste, name), (vector(),)


for _name in ("sign", "binary_sign", "ternary"):

    @case(f"ste.{_name}", reference=_hard_tanh)
    def _(name=_name):
        return getattr(ste, name), (vector(),)


@case("ste.heaviside", reference=_identity)
def _():
    return ste.heaviside, (vector(),)


@case("ste.clip", reference=_identity)
def _():
    return lambda x: ste.clip(x, 0.0, 1.0), (vector(),)


@case("ste.one_hot_argmax", reference=jax.nn.softmax)
def _():
    return ste.one_hot_argmax, (vector(),)


def _soft_top_2(x):
    """Sigmoids whose sum is two; the threshold by Newton's method."""
    t = jnp.mean(jax.lax.stop_gradient(x))
    for _ in range(20):
        y = jax.nn.sigmoid(x - t)
        t = t + (jnp.sum(y) - 2) / jnp.sum(y * (1 - y))
    return jax.nn.sigmoid(x - t)


@case("ste.top_k", reference=_soft_top_2)
def _():
    return lambda x: ste.top_k(x, 2), (vector(),)


@case("ste.hard_tanh", reference=_hard_tanh)
def _():
    return ste.hard_tanh, (vector(),)


def _approx_sign(x):
    return jnp.where(jnp.abs(x) < 1, x * (2 - jnp.abs(x)), jnp.sign(x))


@case("ste.approx_sign", reference=_approx_sign)
def _():
    return ste.approx_sign, (vector(),)


def _swish_sign(x):
    s = jax.nn.sigmoid(5 * x)
    return 2 * s * (1 + 5 * x * (1 - s)) - 1


@case("ste.swish_sign", reference=_swish_sign)
def _():
    return ste.swish_sign, (vector(),)


# Each random one against its own relaxed form, with the same key.


@case(
    "ste.gumbel_softmax",
    reference=lambda x: ste.gumbel_softmax(x, key=jr.key(0), hard=False),
)
def _():
    return lambda x: ste.gumbel_softmax(x, key=jr.key(0), hard=True), (vector(),)


@case(
    "ste.gumbel_sigmoid",
    reference=lambda x: ste.gumbel_sigmoid(x, key=jr.key(0), hard=False),
)
def _():
    return lambda x: ste.gumbel_sigmoid(x, key=jr.key(0), hard=True), (vector(),)


@case("ste.bernoulli", reference=_identity)
def _():
    return lambda p: ste.bernoulli(p, key=jr.key(0)), (jnp.array([0.2, 0.5, 0.9]),)


def _reinmax(logits):
    """The second-order estimate, written out: with the sample of the same key."""
    sample = jax.lax.stop_gradient(ste.reinmax(logits, key=jr.key(0)))
    p = jax.nn.softmax(logits)
    shift = jnp.log((sample + p) / 2) - logits
    middle = jax.nn.softmax(jax.lax.stop_gradient(shift) + logits)
    return 2 * middle - p / 2


@case("ste.reinmax", reference=_reinmax)
def _():
    return lambda x: ste.reinmax(x, key=jr.key(0)), (vector(),)


@case("ste.fake_quantize", reference=fake_quantize)
def _():
    fn = lambda x, scale: ste.fake_quantize(x, scale, bits=4)
    return fn, (jnp.array([0.52, -1.23, 1.6, 40.0]), jnp.array(0.31))


@case("ste.lsq", reference=lsq)
def _():
    fn = lambda x, step: ste.lsq(x, step, bits=4)
    return fn, (jnp.array([0.52, -1.23, 1.6, 40.0]), jnp.array(0.31))


@case("ste.absmax_scale")
def _():
    return lambda x: ste.absmax_scale(x, bits=4), (vector(),)


@case("ste.fsq", reference=fsq_bound)
def _():
    return lambda z: ste.fsq(z, (5, 5, 5))[0], (vector(),)


@case("ste.vector_quantize", reference=lambda z: z)
def _():
    codebook = jnp.array([[0.0, 0.0, 0.0], [1.0, -1.0, 2.0]])
    return lambda z: ste.vector_quantize(z, codebook)[0], (vector(),)
