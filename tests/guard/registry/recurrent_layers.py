"""Recurrent layers, against plain scans of the textbook's cells."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry


rng = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return scale * rng.normal(size=shape)


def gru(xs, weight_ih, weight_hh, bias, bias_n):
    layer = eqg.nn.GRU(2, 3, key=jr.key(0), dtype=xs.dtype)
    cell = eqx.tree_at(
        lambda c: (c.weight_ih, c.weight_hh, c.bias, c.bias_n),
        layer.to_cell(),
        (weight_ih, weight_hh, bias, bias_n),
    )
    return eqg.nn.GRU.from_cell(cell)(xs)[0]


def gru_plain(xs, weight_ih, weight_hh, bias, bias_n):
    def step(h, x):
        r, z, n = jnp.split(weight_ih @ x + bias, 3)
        h_r, h_z, h_n = jnp.split(weight_hh @ h, 3)
        r, z = jax.nn.sigmoid(r + h_r), jax.nn.sigmoid(z + h_z)
        n = jnp.tanh(n + r * (h_n + bias_n))
        h = n + z * (h - n)
        return h, h

    return jax.lax.scan(step, jnp.zeros(3, xs.dtype), xs)[1]


entry(
    "nn.GRU",
    gru,
    normal(7, 2),
    normal(9, 2),
    normal(9, 3),
    normal(9),
    normal(3),
    plain=gru_plain,
)
