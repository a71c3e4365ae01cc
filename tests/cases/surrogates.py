"""Surrogates: the derivative of a spike is the derivative of the smooth primitive."""

import eqx_grads as eqg
import jax.numpy as jnp

from .registry import case


ALL = (
    "superspike",
    "atan",
    "sigmoid",
    "erf",
    "gaussian",
    "multi_gaussian",
    "triangle",
    "piecewise_quadratic",
    "rectangle",
    "leaky",
)


def _potentials():
    return jnp.array([0.3, -0.2, 0.11])


def _enter(name):
    surrogate = getattr(eqg.surrogates, name)()

    @case(f"surrogates.{name}", reference=surrogate.primitive)
    def _():
        return lambda v: eqg.surrogates.spike(v, surrogate), (_potentials(),)


for _name in ALL:
    _enter(_name)


@case("surrogates.spike", reference=jnp.tanh)
def _():
    slope = lambda v: 1 - jnp.tanh(v) ** 2
    return lambda v: eqg.surrogates.spike(v, slope), (_potentials(),)
