"""No claim: the cells and shapes that the cost model of `checkpoint="auto"` was made with."""

from collections.abc import Callable

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
from eqx_grads import nn
from scans import Attention, Gated


class Cell(eqx.Module):
    """Any function of an input and a state, which is an array or several of `shape`."""

    parts: dict
    step: Callable = eqx.field(static=True)
    shape: tuple = eqx.field(static=True)
    n_states: int = eqx.field(static=True, default=1)

    def initial_state(self):
        if "neurons" in self.parts:
            return tuple(n.initial_state() for n in self.parts["neurons"])
        zero = jnp.zeros(self.shape)
        return zero if self.n_states == 1 else (zero,) * self.n_states

    def __call__(self, x, state):
        return self.step(self.parts, x, state)

    def output(self, state):
        if "neurons" in self.parts:
            return state[-1].spikes
        h = jax.tree.leaves(state)[0]
        return h if h.ndim == 1 else h.mean(tuple(range(1, h.ndim)))


def of_cell(make, n_states=1):
    def build(size, hidden, *, key):
        step = lambda parts, x, state: parts["cell"](x, state)
        return Cell({"cell": make(size, hidden, key=key)}, step, (hidden,), n_states)

    return build


def spiking(size, hidden, *, key):
    """Two linear layers, each with neurons after it."""
    keys = jr.split(key)
    surrogate = eqg.surrogates.superspike()
    neurons = [nn.LIFCell(n, 0.9, surrogate=surrogate) for n in (hidden, 10)]
    linear = [eqx.nn.Linear(size, hidden, key=keys[0]), eqx.nn.Linear(hidden, 10, key=keys[1])]

    def step(parts, x, state):
        (a, b), (first, last) = parts["linear"], parts["neurons"]
        first_state = first(a(x), state[0])
        return first_state, last(b(first_state.spikes), state[1])

    return Cell({"linear": linear, "neurons": neurons}, step, (hidden,))


def recurrent_spiking(size, hidden, *, key):
    keys = jr.split(key)
    parts = {
        "linear": eqx.nn.Linear(size, hidden, key=keys[0]),
        "neurons": [nn.LIFCell(hidden, 0.9, recurrent=True, key=keys[1])],
    }
    step = lambda p, x, state: (p["neurons"][0](p["linear"](x), state[0]),)
    return Cell(parts, step, (hidden,))


def embedding(size, hidden, *, key):
    """A GRU cell that looks up its input in a table."""
    keys = jr.split(key)
    parts = {
        "table": eqx.nn.Embedding(1000, size, key=keys[0]),
        "cell": eqx.nn.GRUCell(size, hidden, key=keys[1]),
    }
    return Cell(parts, lambda p, x, h: p["cell"](p["table"](x), h), (hidden,))


def embedding_sum(size, hidden, *, key):
    """A step that looks up its input in a table, without matrix products."""
    del size
    parts = {"table": eqx.nn.Embedding(1000, hidden, key=key), "w": jr.normal(key, (hidden,))}
    return Cell(parts, lambda p, x, h: jnp.tanh(p["w"] * h + p["table"](x)), (hidden,))


def convolution(size, hidden, *, key):
    """A gated convolution of `hidden` channels over a square of `size` pixels."""
    make = lambda key: eqx.nn.Conv2d(hidden + 1, hidden, 3, padding=1, key=key)
    gate, new = map(make, jr.split(key))

    def step(p, x, h):
        both = jnp.concatenate([x[None], h])
        z = jax.nn.sigmoid(p["gate"](both))
        return z * h + (1 - z) * jnp.tanh(p["new"](both))

    return Cell({"gate": gate, "new": new}, step, (hidden, size, size))


def constant(size, hidden, *, key):
    """Distances to 64 fixed points: a step that computes more than it keeps."""
    del size
    w, table = jr.normal(key, (hidden, hidden)) / hidden**0.5, jr.normal(key, (64, hidden))

    def step(p, x, h):
        distances = (jax.lax.stop_gradient(p["table"]) - h) ** 2
        return jnp.tanh(p["w"] @ h + jnp.sum(jnp.exp(-distances), 0) / 64 + jnp.sum(x))

    return Cell({"w": w, "table": table}, step, (hidden,))


def reservoir(size, hidden, *, key):
    """Fixed weights of the state, learned gains and input weights."""
    w = jr.normal(key, (hidden, hidden)) / hidden**0.5
    parts = {"w": w, "gain": jnp.ones(hidden), "in": eqx.nn.Linear(size, hidden, key=key)}

    def step(p, x, h):
        product = jax.lax.stop_gradient(p["w"]) @ h
        return 0.5 * h + 0.5 * jnp.tanh(p["gain"] * product + p["in"](x))

    return Cell(parts, step, (hidden,))


def leaky(size, hidden, *, key):
    del size
    decay = jr.uniform(key, (hidden,))
    return Cell({"w": decay}, lambda p, x, h: p["w"] * h + jnp.sum(x), (hidden,))


def min_gru(size, hidden, *, key):
    z, new = (eqx.nn.Linear(size, hidden, key=k) for k in jr.split(key))

    def step(p, x, h):
        z = jax.nn.sigmoid(p["z"](x))
        return (1 - z) * h + z * p["new"](x)

    return Cell({"z": z, "new": new}, step, (hidden,))


def ode(size, hidden, *, key):
    """A step of a Runge-Kutta method, with a perceptron for the vector field."""
    keys = jr.split(key)
    field = eqx.nn.MLP(hidden, hidden, hidden, 1, jax.nn.softplus, key=keys[0])

    def step(p, x, h):
        u = p["in"](x)
        f = lambda h: jnp.tanh(p["field"](h)) + u
        a = f(h)
        b = f(h + 0.05 * a)
        c = f(h + 0.05 * b)
        return h + 0.1 / 6 * (a + 2 * b + 2 * c + f(h + 0.1 * c))

    parts = {"field": field, "in": eqx.nn.Linear(size, hidden, key=keys[1])}
    return Cell(parts, step, (hidden,))


def normalized_lstm(size, hidden, *, key):
    parts = {
        "linear": eqx.nn.Linear(size + hidden, 4 * hidden, key=key),
        "gates": eqx.nn.LayerNorm(4 * hidden),
        "state": eqx.nn.LayerNorm(hidden),
    }

    def step(p, x, state):
        h, c = state
        i, f, g, o = jnp.split(p["gates"](p["linear"](jnp.concatenate([x, h]))), 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(p["state"](c)), c

    return Cell(parts, step, (hidden,), 2)


def two_rnns(size, hidden, *, key):
    """Two layers of plain units; the second is in no output."""
    keys = jr.split(key)
    parts = [nn.RNNCell(size, hidden, key=keys[0]), nn.RNNCell(hidden, hidden, key=keys[1])]

    def step(p, x, state):
        first = p["cells"][0](x, state[0])
        return first, p["cells"][1](first, state[1])

    return Cell({"cells": parts}, step, (hidden,), 2)


def convolution_1d(size, hidden, *, key):
    """A convolutional LSTM over `size` points, with `hidden / 16` channels."""
    channels = max(hidden // 16, 1)
    make = eqx.nn.Conv1d(channels + 1, 4 * channels, 5, padding=2, key=key)

    def step(p, x, state):
        h, c = state
        i, f, g, o = jnp.split(p["conv"](jnp.concatenate([x[None], h])), 4)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    return Cell({"conv": make}, step, (channels, size), 2)


# T, B, H, I
COMMON = [(32, 8, 16, 8), (64, 64, 48, 1), (64, 16, 96, 32), (128, 32, 128, 64)]
COMMON += [(1024, 1, 128, 128), (512, 8, 64, 32), (300, 1, 16, 8), (50, 256, 16, 16)]
COMMON += [(128, 128, 256, 128)]
# The constants of `replay_choice.py` are fitted to the first five, and its conditions were
# chosen from measurements of all.
CELLS = {
    "GRU": (of_cell(eqx.nn.GRUCell), [*COMMON, (96, 24, 96, 32), (512, 32, 256, 128)]),
    "RNN": (of_cell(nn.RNNCell), [*COMMON, (96, 24, 96, 32), (256, 16, 192, 48)]),
    "attention": (of_cell(Attention), COMMON[2:7]),
    "user's": (of_cell(Gated), COMMON[1:8]),
    "LSTM": (of_cell(eqx.nn.LSTMCell, 2), COMMON),
    "RNN, two layers": (two_rnns, [(40, 64, 64, 16), (256, 16, 192, 48)]),
    "spiking": (
        spiking,
        [(100, 64, 256, 128), (25, 128, 512, 784), (500, 16, 128, 64), (100, 8, 64, 64)],
    ),
    "embedding": (embedding, [(64, 16, 96, 32), (128, 32, 128, 64), (512, 4, 64, 32)]),
    "reservoir": (reservoir, [(64, 16, 96, 32), (256, 8, 128, 16), (512, 1, 256, 16)]),
    "recurrent spiking": (
        recurrent_spiking,
        [(100, 64, 128, 128), (25, 128, 256, 64), (500, 8, 64, 32), (200, 1, 128, 64)],
    ),
    "embedding, sum": (embedding_sum, [(64, 16, 96, 32), (512, 4, 64, 32)]),
    "convolution": (
        convolution,
        [(20, 8, 4, 8), (20, 4, 8, 12), (50, 1, 4, 16), (32, 16, 8, 8)],
    ),
    "convolution, LSTM": (convolution_1d, [(160, 32, 96, 64), (768, 1, 64, 16)]),
    "constant": (
        constant,
        [(64, 4, 64, 1), (64, 32, 64, 1), (256, 1, 128, 1), (32, 8, 256, 1)],
    ),
    "leaky": (leaky, [(1000, 1, 64, 1), (256, 32, 64, 1), (100, 128, 256, 1)]),
    "minimal GRU": (min_gru, [(64, 16, 96, 32), (256, 8, 128, 64), (1000, 1, 64, 32)]),
    "ODE": (ode, [(64, 16, 32, 8), (128, 8, 64, 8), (500, 1, 64, 4)]),
    "normalized LSTM": (normalized_lstm, [(64, 16, 96, 32), (512, 4, 64, 32)]),
}


def inputs(name, shape):
    steps, batch, _, size = shape
    key = jr.key(1)
    if name.startswith("embedding"):
        return jr.randint(key, (steps, batch), 0, 1000)
    if name == "convolution":
        return jr.normal(key, (steps, batch, size, size))
    return 2 * jr.normal(key, (steps, batch, size))
