"""Quantization layers, each with a function whose derivative it takes."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from ..rules.formulas import fake_quantize, fsq_bound, lsq
from .registry import case, vector


nn = eqg.nn
stop = jax.lax.stop_gradient


def _identity(x):
    return x


def _straight_sign(x):
    window = jnp.clip(x, -1.0, 1.0)
    return window + stop(jnp.where(x < 0, -1.0, 1.0) - window)


@case("nn.FakeQuantize", reference=fake_quantize)
def _():
    fn = lambda x, scale: nn.FakeQuantize(4, scale=scale, learn_scale=True)(x)
    return fn, (jnp.array([0.52, -1.23, 1.6, 40.0]), jnp.array(0.31))


@case("nn.FakeQuantize: dynamic", reference=_identity)
def _():
    return nn.FakeQuantize(4), (vector(),)


@case("nn.LSQ", reference=lsq)
def _():
    fn = lambda x, scale: nn.LSQ(4, scale=scale)(x)
    return fn, (jnp.array([0.52, -1.23, 1.6, 40.0]), jnp.array(0.31))


@case("nn.FSQ", reference=fsq_bound)
def _():
    return nn.FSQ((5, 5, 5)), (vector(),)


def _vector_quantizer(z, codebook):
    distances = jnp.sum((z[:, None] - codebook[None]) ** 2, axis=-1)
    entry = codebook[jnp.argmin(distances, axis=1)]
    codebook_loss = jnp.mean((stop(z) - entry) ** 2)
    return z, codebook_loss, 0.25 * jnp.mean((z - stop(entry)) ** 2)


@case("nn.VectorQuantizer", reference=_vector_quantizer)
def _():
    vq = nn.VectorQuantizer(4, 2, ema=False, key=jr.key(0))

    def fn(z, codebook):
        value, _, *losses = eqx.tree_at(lambda vq: vq.codebook, vq, codebook).quantize(z)
        return value, *losses

    return fn, (jr.normal(jr.key(1), (3, 2)), jr.normal(jr.key(2), (4, 2)))


def _linear(*quantizers):
    """A layer without its bias, called with a weight."""
    layer = nn.Quantized(eqx.nn.Linear(3, 2, key=jr.key(0)), *quantizers)

    def fn(weight, x):
        get = lambda layer: layer.layer.weight
        return eqx.tree_at(get, layer, weight)(x) - layer.layer.bias

    return fn, (jnp.array([[0.45, -0.22, 0.33], [0.13, 1.15, -0.6]]), vector())


def _xnor(w, x):
    return (_straight_sign(w) * jnp.mean(jnp.abs(w), axis=1, keepdims=True)) @ x


@case("nn.Binary", reference=_xnor)
def _():
    return _linear(nn.Binary())


def _ternary(w, x):
    keep = stop(jnp.abs(w) > 0.25)
    window = jnp.clip(w, -1.0, 1.0)
    signs = window + stop(jnp.where(keep, jnp.sign(w), 0) - window)
    total = jnp.sum(jnp.where(keep, jnp.abs(w), 0), axis=1)
    size = total / jnp.sum(keep, axis=1).astype(w.dtype)
    return (size[:, None] * signs) @ x


@case("nn.Ternary", reference=_ternary)
def _():
    return _linear(nn.Ternary(threshold=0.25))


def _quantized(w, x):
    return fake_quantize(w, 0.2) @ fake_quantize(x, 0.25)


@case("nn.Quantized", reference=_quantized)
def _():
    return _linear(nn.FakeQuantize(4, scale=0.2), nn.FakeQuantize(4, scale=0.25))
