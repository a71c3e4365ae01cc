"""Gradient ops."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np

from .entry import entry


X = np.array([0.5, -1.2, 2.0])


def backward(rule):
    """The identity whose cotangent is `rule` of the one that comes in, in raw JAX."""

    @jax.custom_vjp
    def fn(x):
        return x

    fn.defvjp(lambda x: (x, None), lambda _, ct: (rule(ct),))
    return fn


entry(
    "clip_gradient",
    lambda x: eqg.clip_gradient(x, -0.5, 1.0),
    X,
    plain=backward(lambda ct: jnp.clip(ct, -0.5, 1.0)),
    forward=lambda x: x,
    orders=("value", "jvp", "vjp", "FF", "FR", "RR"),
)
