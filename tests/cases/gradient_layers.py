"""Gradient layers: their derivatives are those of the ops, and wrong on purpose."""

import eqx_grads as eqg
import jax.numpy as jnp

from .gradient_ops import backward, to_norm
from .registry import case, vector


@case("nn.GradientReversal", reference=lambda x: -0.5 * x, skip=("order",))
def _():
    return eqg.nn.GradientReversal(0.5), (vector(),)


@case("nn.GradientScale", reference=lambda x: 3.0 * x, skip=("order",))
def _():
    return eqg.nn.GradientScale(3.0), (vector(),)


@case("nn.GradientClip", **backward(lambda ct: jnp.clip(ct, -0.5, 1.0)))
def _():
    return eqg.nn.GradientClip(-0.5, 1.0), (vector(),)


@case("nn.GradientNormClip", **backward(lambda ct: to_norm(ct, 0.7)))
def _():
    return eqg.nn.GradientNormClip(0.7), (vector(),)


@case("nn.GradientProbe", reference=lambda x, slot: x + slot)
def _():
    return lambda x, slot: eqg.nn.GradientProbe(slot)(x), (vector(), jnp.zeros(3))
