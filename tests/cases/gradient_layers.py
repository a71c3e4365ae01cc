"""Gradient layers: their derivatives are those of the ops, and wrong on purpose."""

import eqx_grads as eqg
import jax.numpy as jnp

from .registry import case, vector


@case("nn.GradientReversal", reference=lambda x: -0.5 * x, skip=("order",))
def _():
    return eqg.nn.GradientReversal(0.5), (vector(),)


@case("nn.GradientProbe", reference=lambda x, slot: x + slot)
def _():
    return lambda x, slot: eqg.nn.GradientProbe(slot)(x), (vector(), jnp.zeros(3))
