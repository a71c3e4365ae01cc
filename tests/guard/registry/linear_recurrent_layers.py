"""Layers over linear recurrences, against plain scans of the papers' equations."""

import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np

from .over_time import CHEAP, draws, enter, layer, plain


# A line has as many arguments as there is room for.
# fmt: off
nn = eqg.nn
normal = draws(1)


# ---------------------------------------------------------------- the papers' equations


complex_of = lambda parts: jax.lax.complex(parts[0], parts[1])


def diagonal(factor, scale, gain, activation, c, x, h):
    h = factor * h + scale.astype(h.dtype) * (complex_of(c["weight_in"]) @ x.astype(h.dtype))
    skip = c["skip"] * x if c["skip"].ndim == 1 else c["skip"] @ x
    y = activation(gain * jnp.real(complex_of(c["weight_out"]) @ h) + skip)
    return h, y


def lru_step(activation, c, x, h):
    """Orvieto et al. (2023), "Resurrecting recurrent neural networks for long sequences"."""
    factor = jnp.exp(jax.lax.complex(-jnp.exp(c["log_decay"]), jnp.exp(c["log_phase"])))
    return diagonal(factor, jnp.exp(c["log_gamma"]), 1, activation, c, x, h)


def s5_step(activation, c, x, h):
    """Smith et al. (2022), with zero-order hold."""
    rate = jax.lax.complex(-jnp.exp(c["log_decay"]), c["frequency"])
    factor = jnp.exp(rate * jnp.exp(c["log_step"]).astype(rate.dtype))
    return diagonal(factor, (factor - 1) / rate, 2, activation, c, x, h)


def min_gru_step(c, x, h):
    """Feng et al. (2024), "Were RNNs all we needed?"."""
    z, candidate = jnp.split(c["weight"] @ x + c.get("bias", 0), 2)
    z = jax.nn.sigmoid(z)
    h = (1 - z) * h + z * candidate
    return h, h


def min_lstm_step(c, x, h):
    f, i, candidate = jnp.split(c["weight"] @ x + c.get("bias", 0), 3)
    f, i = jax.nn.sigmoid(f), jax.nn.sigmoid(i)
    h = f / (f + i) * h + i / (f + i) * candidate
    return h, h


def zero_complex(c):
    zeros = jnp.zeros(c["weight_in"].shape[1], c["weight_in"].dtype)
    return jax.lax.complex(zeros, zeros)


zero_real = lambda gates: lambda c: jnp.zeros(len(c["weight"]) // gates, c["weight"].dtype)


def convolved(c, x, window):
    """A causal convolution of each channel, then a SiLU. The window holds the last inputs."""
    rows = jnp.concatenate([window, x[None]])
    return jax.nn.silu(jnp.sum(c["convolution"] * rows, 0)), rows[1:]


def delta_net_step(c, x, state):
    """Yang et al. (2025), with two heads of keys of two and values of one."""
    matrix, window = state
    of_heads = lambda y: y.reshape(2, -1)
    qkv, gate, beta, step = jnp.split(c["weight_in"] @ x, [10, 12, 14])
    qkv, window = convolved(c, qkv, window)
    q, k, v = map(of_heads, jnp.split(qkv, [4, 8]))
    unit = lambda y: y / jnp.sqrt(jnp.sum(y**2, -1, keepdims=True) + 1e-6)
    q, k, beta = unit(q) / 2**0.5, unit(k), jax.nn.sigmoid(beta)
    decay = jnp.exp(-jnp.exp(c["log_rate"]) * jax.nn.softplus(step + c["bias_step"]))

    def head(s, q, k, v, beta, decay):
        s = decay * s
        s = s + beta * jnp.outer(k, v - k @ s)
        return s, q @ s

    matrix, out = jax.vmap(head)(matrix, q, k, v, beta, decay)
    out = out / jnp.sqrt(jnp.mean(out**2, -1, keepdims=True) + 1e-5) * c["gain"][None]
    out = out * jax.nn.silu(of_heads(gate))
    return (matrix, window), c["weight_out"] @ out.ravel()


def selective_step(c, x, state):
    """Gu and Dao (2023), with four states of each channel."""
    h, window = state
    x, gate = jnp.split(c["weight_in"] @ x, 2)
    x, window = convolved(c, x, window)
    low, write, read = jnp.split(c["weight_select"] @ x, [1, 5])
    step = jax.nn.softplus(c["weight_step"] @ low + c["bias_step"])[:, None]
    h = jnp.exp(-step * jnp.exp(c["log_rate"])) * h + step * x[:, None] * write[None]
    y = (h @ read + c["skip"] * x) * jax.nn.silu(gate)
    return (h, window), c["weight_out"] @ y


# ---------------------------------------------------------------- entries

NAMES = {
    "LRU": ("log_decay", "log_phase", "log_gamma"),
    "S5": ("log_decay", "frequency", "log_step"),
}


def diagonal_cell(kind, size, out, state, skip):
    # Frequencies of S5 are steps apart, so that all of exp(rate * step) differ.
    centers = {
        "log_decay": -1.0, "log_phase": 0.0, "log_gamma": -0.5, "frequency": 2.0,
        "log_step": -0.7,
    }
    c = {name: centers[name] + normal(state, scale=0.5) for name in NAMES[kind]}
    c |= {"weight_in": normal(2, state, size), "weight_out": normal(2, out, state)}
    return c | {"skip": normal(out) if skip == "vector" else normal(out, size)}


def minimal_cell(gates, size, hidden, bias):
    c = {"weight": normal(gates * hidden, size)}
    return c | ({"bias": normal(gates * hidden)} if bias else {})


def state_of(kind, *shape):
    if kind in NAMES:
        return normal(*shape) + 1j * normal(*shape)
    return normal(*shape)


STEPS = {"LRU": lru_step, "S5": s5_step}
GATES = {"MinGRU": (2, min_gru_step), "MinLSTM": (3, min_lstm_step)}


def linear(
    name, kind, xs, hidden, *, out=2, state=None, first=None, lengths=None, half=None, **given
):
    size, options, is_diagonal = xs.shape[-1], given.pop("options", CHEAP), kind in NAMES
    layers, directions = given.get("num_layers", 1), 1 + given.get("bidirectional", False)
    sizes = [size, *(layers - 1) * [directions * (out if is_diagonal else hidden)]]
    time = {name: given[name] for name in ("reverse", "time_major") if name in given}
    given["learn_initial_state"] = first is not None
    if is_diagonal:
        # S5 is given the number of eigenvalues, of which half are states.
        make = ft.partial(getattr(nn, kind), size, out, 2 * hidden if kind == "S5" else hidden)
        step, zero = (
            ft.partial(STEPS[kind], given.get("activation") or (lambda y: y)), zero_complex,
        )
        of = lambda n: diagonal_cell(kind, n, out, hidden, "vector" if n == out else "matrix")
    else:
        make, (gates, step) = ft.partial(getattr(nn, kind), size, hidden), GATES[kind]
        zero = zero_real(gates)
        of = lambda n: minimal_cell(gates, n, hidden, given.get("use_bias", True))
    cells = tuple(tuple(of(n) for _ in range(directions)) for n in sizes)
    fn = layer(make, "initial_parts" if is_diagonal else "initial_state", **given)
    run = plain(step, zero, **time)

    def reference(xs, cells, state, lengths, first):
        first = complex_of(first) if is_diagonal and first is not None else first
        return run(xs, cells, state, lengths, first)

    options = {**options, "half": half, "time_major": time.get("time_major", False)}
    enter(name, fn, xs, cells, state, lengths, first, plain=reference, **options)


SOME = {"orders": ("value", "jvp", "vjp", "RR"), "costs": False}
DOUBLE = {**SOME, "precisions": ("float64",)}
AGAIN = {**CHEAP, "orders": ("value", "jvp", "vjp")}
for kind, out, options in (("LRU", 2, DOUBLE), ("S5", 1, AGAIN)):
    state = state_of(kind, 3)
    given = {"out": out, "activation": jnp.tanh, "state": state, "options": options}
    linear(f"nn.{kind}", kind, normal(5, 2), 3, **given)
for kind, options in (("MinGRU", SOME), ("MinLSTM", AGAIN)):
    linear(f"nn.{kind}", kind, normal(5, 2), 3, state=state_of(kind, 3), options=options)

LENGTHS = np.array([7, 3, 0])
for kind, layers, directions, out in (("LRU", 2, 1, 1), ("S5", 1, 2, 2)):
    linear(f"nn.{kind}: padded", kind, normal(7, 3, 2), 3, out=out, lengths=LENGTHS,
        num_layers=layers, bidirectional=directions == 2, time_major=True,
        state=state_of(kind, 2, 3, 3), method="associative", activation=jnp.tanh)
    first = normal(2, 3)
    linear(f"nn.{kind}: learned state", kind, normal(3, 7, 2), 3, first=first, reverse=True)
for kind in ("MinGRU", "MinLSTM"):
    linear(f"nn.{kind}: padded", kind, normal(3, 7, 2), 3, lengths=LENGTHS, bidirectional=True,
        reverse=True, state=state_of(kind, 2, 3, 3), method="associative", use_bias=False)
    linear(f"nn.{kind}: learned state", kind, normal(7, 3, 2), 3, num_layers=2,
        first=normal(2, 3), time_major=True, lengths=LENGTHS)
linear("nn.MinGRU: one step", "MinGRU", normal(1, 2), 3, state=state_of("MinGRU", 3))


# States that remember a hundred steps: a sum in half precision would lose most of its terms.
def long(kind, steps, slow):
    xs = np.abs(normal(steps, 2)) + 0.2
    options = {**CHEAP, "half_as_plain": False}  # the states are in single precision
    linear(f"nn.{kind}: long sums", kind, xs[:3], 3, half=(xs, ((slow,),)), options=options)


SLOW = {"weight": normal(6, 2, scale=0.3), "bias": np.array([-4.5, -5, -4, 0.3, 0.5, 0.2])}
long("MinGRU", 509, SLOW)
long("LRU", 509, diagonal_cell("LRU", 2, 2, 3, "vector") | {"log_decay": np.full(3, -4.0)})


# Each: how it is made, its step, the shapes of its parameters, and of its state.
WITH_WINDOWS = {
    "GatedDeltaNet": (
        ft.partial(nn.GatedDeltaNet, 2, 2, heads=2, key_size=2, value_size=1, conv_size=3),
        delta_net_step,
        {"weight_in": (16, 2), "convolution": (3, 10), "log_rate": (2,), "bias_step": (2,),
         "gain": (1,), "weight_out": (2, 2)}, ((2, 2, 1), (2, 10)),
    ), "SelectiveSSM": (
        ft.partial(nn.SelectiveSSM, 2, 2, 3, state_size=4, conv_size=2), selective_step,
        {"weight_in": (6, 2), "convolution": (2, 3), "weight_select": (9, 3),
         "weight_step": (3, 1), "bias_step": (3,), "log_rate": (3, 4), "skip": (3,),
         "weight_out": (2, 3)}, ((3, 4), (1, 3)),
    ),
}
for kind, (make, step, shapes, states) in WITH_WINDOWS.items():
    cell = lambda shapes=shapes: {name: normal(*shape) for name, shape in shapes.items()}
    state = tuple(normal(*shape) for shape in states)
    enter(
        f"nn.{kind}", layer(make), normal(4, 2), ((cell(),),), state, None, None,
        plain=plain(step, None), **AGAIN,
    )
    enter(
        f"nn.{kind}: padded", layer(make, reverse=True, time_major=True), normal(5, 2, 2),
        ((cell(),),), tuple(normal(2, *shape) for shape in states), np.array([5, 2]), None,
        plain=plain(step, None, reverse=True, time_major=True), time_major=True, **CHEAP,
    )
