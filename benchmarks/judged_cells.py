"""No claim: the cells and shapes that judge the cost model of `checkpoint="auto"`.

None of them is a cell of `calibration_cells.py`, and no constant or condition was chosen by
their figures. Two earlier ones led to a change; they are calibration cells now.
"""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
from calibration_cells import Cell
from eqx_grads import nn


def relu_rnn(size, hidden, *, key):
    """A plain network with rectified units, initialized with the identity."""
    parts = {"w": jnp.eye(hidden) * 0.9, "in": eqx.nn.Linear(size, hidden, key=key)}
    return Cell(parts, lambda p, x, h: jax.nn.relu(p["w"] @ h + p["in"](x)), (hidden,))


def two_rates(size, hidden, *, key):
    """Plain units, each with a learned rate, and a product of the state and the input."""
    keys = jr.split(key)
    parts = {
        "cell": nn.RNNCell(size, hidden, key=keys[0]),
        "rate": jr.normal(keys[1], (hidden,)),
    }

    def step(p, x, h):
        rate = jax.nn.sigmoid(p["rate"])
        return rate * h + (1 - rate) * p["cell"](x, h) * (1 + jnp.mean(x))

    return Cell(parts, step, (hidden,))


def two_grus(size, hidden, *, key):
    """Two layers of gated units, with a connection past the second."""
    keys = jr.split(key)
    parts = [
        eqx.nn.GRUCell(size, hidden, key=keys[0]),
        eqx.nn.GRUCell(hidden, hidden, key=keys[1]),
    ]

    def step(p, x, state):
        second = p["cells"][0](x, state[1])
        return second + p["cells"][1](second, state[0]), second

    return Cell({"cells": parts}, step, (hidden,), 2)


def peephole_lstm(size, hidden, *, key):
    keys = jr.split(key)
    parts = {
        "linear": eqx.nn.Linear(size + hidden, 4 * hidden, key=keys[0]),
        "peep": 0.1 * jr.normal(keys[1], (3, hidden)),
    }

    def step(p, x, state):
        h, c = state
        i, f, g, o = jnp.split(p["linear"](jnp.concatenate([x, h])), 4)
        i = jax.nn.sigmoid(i + p["peep"][0] * c)
        f = jax.nn.sigmoid(f + p["peep"][1] * c)
        c = f * c + i * jnp.tanh(g)
        return jax.nn.sigmoid(o + p["peep"][2] * c) * jnp.tanh(c), c

    return Cell(parts, step, (hidden,), 2)


def multiplicative_lstm(size, hidden, *, key):
    keys = jr.split(key, 3)
    parts = {
        "x": eqx.nn.Linear(size, hidden, key=keys[0]),
        "h": eqx.nn.Linear(hidden, hidden, use_bias=False, key=keys[1]),
        "gates": eqx.nn.Linear(size + hidden, 4 * hidden, key=keys[2]),
    }

    def step(p, x, state):
        h, c = state
        m = p["x"](x) * p["h"](h)
        i, f, g, o = jnp.split(p["gates"](jnp.concatenate([x, m])), 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jnp.tanh(c) * jax.nn.sigmoid(o), c

    return Cell(parts, step, (hidden,), 2)


def normalized_gru(size, hidden, *, key):
    keys = jr.split(key)
    parts = {
        "x": eqx.nn.Linear(size, 3 * hidden, key=keys[0]),
        "h": eqx.nn.Linear(hidden, 3 * hidden, key=keys[1]),
        "norms": [eqx.nn.RMSNorm(3 * hidden), eqx.nn.RMSNorm(3 * hidden)],
    }

    def step(p, x, h):
        zx, rx, nx = jnp.split(p["norms"][0](p["x"](x)), 3)
        zh, rh, nh = jnp.split(p["norms"][1](p["h"](h)), 3)
        z = jax.nn.sigmoid(zx + zh)
        return (1 - z) * h + z * jnp.tanh(nx + jax.nn.sigmoid(rx + rh) * nh)

    return Cell(parts, step, (hidden,))


def highway(size, hidden, *, key):
    """A recurrent highway network of two layers in each step."""
    keys = jr.split(key, 3)
    parts = {
        "in": eqx.nn.Linear(size, 2 * hidden, key=keys[0]),
        "layers": [eqx.nn.Linear(hidden, 2 * hidden, key=k) for k in keys[1:]],
    }

    def step(p, x, h):
        added = p["in"](x)
        for layer in p["layers"]:
            new, gate = jnp.split(layer(h) + added, 2)
            gate = jax.nn.sigmoid(gate - 1)
            h = gate * jnp.tanh(new) + (1 - gate) * h
            added = jnp.zeros_like(added)
        return h

    return Cell(parts, step, (hidden,))


def low_rank(size, hidden, *, key):
    """A gated unit whose recurrent weights are a product of two narrow matrices."""
    keys = jr.split(key, 3)
    rank = max(hidden // 8, 1)
    parts = {
        "down": jr.normal(keys[0], (rank, hidden)) / hidden**0.5,
        "up": jr.normal(keys[1], (hidden, rank)) / rank**0.5,
        "in": eqx.nn.Linear(size, hidden, key=keys[2]),
        "bias": jnp.ones(hidden),
    }

    def step(p, x, h):
        both = p["up"] @ (p["down"] @ h) + p["in"](x)
        z = jax.nn.sigmoid(both + p["bias"])
        return z * h + (1 - z) * jnp.tanh(both)

    return Cell(parts, step, (hidden,))


def many_heads(size, hidden, *, key):
    """Attention of four heads over a learned memory, added to the state."""
    keys = jr.split(key, 3)
    heads = 4 if hidden % 4 == 0 else 1
    parts = {
        "attention": eqx.nn.MultiheadAttention(heads, hidden, key=keys[0]),
        "memory": jr.normal(keys[1], (24, hidden)),
        "in": eqx.nn.Linear(size, hidden, key=keys[2]),
        "norm": eqx.nn.LayerNorm(hidden),
    }

    def step(p, x, h):
        query = (h + p["in"](x))[None]
        return p["norm"](h + p["attention"](query, p["memory"], p["memory"])[0])

    return Cell(parts, step, (hidden,))


def slots(size, hidden, *, key):
    """Four slots that attend to each other and to the input."""
    keys = jr.split(key, 3)
    width = max(hidden // 4, 1)
    parts = {
        "qkv": eqx.nn.Linear(width, 3 * width, key=keys[0]),
        "in": eqx.nn.Linear(size, width, key=keys[1]),
        "mlp": eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.silu, key=keys[2]),
    }

    def step(p, x, state):
        rows = jnp.concatenate([state.reshape(4, width), p["in"](x)[None]])
        q, k, v = jnp.split(jax.vmap(p["qkv"])(rows), 3, axis=1)
        mixed = jax.nn.softmax(q @ k.T / width**0.5) @ v
        new = rows[:4] + jax.vmap(p["mlp"])(mixed[:4])
        return jnp.tanh(new).reshape(-1)

    return Cell(parts, step, (4 * width,))


def current_based(size, hidden, *, key):
    """Two layers of spiking neurons with synaptic currents."""
    keys = jr.split(key)
    neurons = [nn.LIFCell(n, 0.9, alpha=0.8) for n in (hidden, 20)]
    linear = [eqx.nn.Linear(size, hidden, key=keys[0]), eqx.nn.Linear(hidden, 20, key=keys[1])]

    def step(p, x, state):
        (a, b), (first, last) = p["linear"], p["neurons"]
        hidden_state = first(a(x), state[0])
        return hidden_state, last(b(hidden_state.spikes), state[1])

    return Cell({"linear": linear, "neurons": neurons}, step, (hidden,))


def learned_spiking(size, hidden, *, key):
    """Spiking neurons with a learned decay and a learned threshold."""
    keys = jr.split(key)
    parts = {
        "linear": eqx.nn.Linear(size, hidden, key=keys[0]),
        "neurons": [nn.LIFCell(hidden, 0.9, learn=("beta", "threshold"))],
    }
    step = lambda p, x, state: (p["neurons"][0](p["linear"](x), state[0]),)
    return Cell(parts, step, (hidden,))


def adaptive_recurrent_spiking(size, hidden, *, key):
    keys = jr.split(key)
    options = {"recurrent": True, "surrogate": eqg.surrogates.triangle(), "key": keys[1]}
    parts = {
        "linear": eqx.nn.Linear(size, hidden, key=keys[0]),
        "neurons": [nn.LIFCell(hidden, 0.9, rho=0.97, **options)],
    }
    step = lambda p, x, state: (p["neurons"][0](p["linear"](x), state[0]),)
    return Cell(parts, step, (hidden,))


def embedding_lstm(size, hidden, *, key):
    """An LSTM cell that looks up its input in a table."""
    keys = jr.split(key)
    parts = {
        "table": eqx.nn.Embedding(1000, size, key=keys[0]),
        "cell": eqx.nn.LSTMCell(size, hidden, key=keys[1]),
    }
    return Cell(parts, lambda p, x, s: p["cell"](p["table"](x), s), (hidden,), 2)


def one_hot(size, hidden, *, key):
    """A plain unit whose input is one of 64 tokens, as a product with the table."""
    del size
    keys = jr.split(key)
    parts = {
        "table": jr.normal(keys[0], (hidden, 64)),
        "cell": nn.RNNCell(hidden, hidden, key=keys[1]),
    }
    step = lambda p, x, h: p["cell"](p["table"] @ jax.nn.one_hot(x % 64, 64), h)
    return Cell(parts, step, (hidden,))


def separable_convolution(size, hidden, *, key):
    """A gated convolution of each channel alone, and then of all channels at each point."""
    channels = max(hidden // 16, 1)
    keys = jr.split(key)
    parts = {
        "depth": eqx.nn.Conv1d(channels, channels, 3, padding=1, groups=channels, key=keys[0]),
        "point": eqx.nn.Conv1d(channels + 1, 2 * channels, 1, key=keys[1]),
    }

    def step(p, x, h):
        both = p["point"](jnp.concatenate([x[None], p["depth"](h)]))
        z, new = jnp.split(both, 2)
        z = jax.nn.sigmoid(z)
        return z * h + (1 - z) * jnp.tanh(new)

    return Cell(parts, step, (channels, size))


def random_features(size, hidden, *, key):
    """A learned map of 256 fixed random features of the state."""
    keys = jr.split(key, 3)
    parts = {
        "fixed": jr.normal(keys[0], (256, hidden)) / hidden**0.5,
        "out": jr.normal(keys[1], (hidden, 256)) / 16,
        "in": eqx.nn.Linear(size, hidden, key=keys[2]),
    }

    def step(p, x, h):
        features = jnp.cos(jax.lax.stop_gradient(p["fixed"]) @ h)
        return jnp.tanh(p["out"] @ features + p["in"](x))

    return Cell(parts, step, (hidden,))


def kernel(size, hidden, *, key):
    """Radial basis functions around 48 fixed points."""
    keys = jr.split(key, 3)
    parts = {
        "centers": jr.normal(keys[0], (48, hidden)),
        "out": jr.normal(keys[1], (hidden, 48)) / 7,
        "in": eqx.nn.Linear(size, hidden, key=keys[2]),
    }

    def step(p, x, h):
        distances = jnp.mean((jax.lax.stop_gradient(p["centers"]) - h) ** 2, 1)
        return jnp.tanh(p["out"] @ jnp.exp(-distances) + p["in"](x))

    return Cell(parts, step, (hidden,))


def controlled(size, hidden, *, key):
    """A step of Euler's method with a perceptron for the vector field, and a learned decay."""
    keys = jr.split(key)
    parts = {
        "field": eqx.nn.MLP(hidden + size, hidden, 2 * hidden, 1, jax.nn.softplus, key=keys[0]),
        "decay": jnp.zeros(hidden),
    }

    def step(p, x, h):
        change = jnp.tanh(p["field"](jnp.concatenate([h, x])))
        return h + 0.1 * (change - jax.nn.softplus(p["decay"]) * h)

    return Cell(parts, step, (hidden,))


def policy(size, hidden, *, key):
    """A pendulum that a perceptron moves."""
    del size
    parts = {"mlp": eqx.nn.MLP(2, 1, hidden, 2, jnp.tanh, key=key)}

    def step(p, x, state):
        torque = p["mlp"](state)[0]
        angle, speed = state
        speed = speed + 0.05 * (torque - jnp.sin(angle) + 0.1 * jnp.sum(x))
        return jnp.stack([angle + 0.05 * speed, speed])

    return Cell(parts, step, (2,))


# T, B, H, I. Each cell runs at every second one.
SHAPES = [
    *[(24, 4, 24, 12), (40, 64, 64, 16), (96, 8, 128, 32), (160, 32, 96, 64)],
    *[(400, 2, 96, 48), (768, 1, 64, 16), (80, 128, 128, 64), (256, 16, 192, 48)],
]
_MAKE = {
    "RNN, rectified": relu_rnn,
    "RNN, two rates": two_rates,
    "GRU, two layers": two_grus,
    "GRU, normalized": normalized_gru,
    "LSTM, peepholes": peephole_lstm,
    "LSTM, multiplicative": multiplicative_lstm,
    "highway": highway,
    "low rank": low_rank,
    "attention, heads": many_heads,
    "attention, slots": slots,
    "spiking, currents": current_based,
    "spiking, learned": learned_spiking,
    "spiking, adaptive, recurrent": adaptive_recurrent_spiking,
    "look-up, LSTM": embedding_lstm,
    "look-up, one-hot": one_hot,
    "convolution, separable": separable_convolution,
    "constant, features": random_features,
    "constant, kernel": kernel,
    "Euler": controlled,
    "policy": policy,
}
CELLS = {name: (make, SHAPES[i % 2 :: 2]) for i, (name, make) in enumerate(_MAKE.items())}


def inputs(name, shape):
    steps, batch, _, size = shape
    key = jr.key(3)
    if name.startswith("look-up"):
        return jr.randint(key, (steps, batch), 0, 1000)
    return jr.normal(key, (steps, batch, size))
