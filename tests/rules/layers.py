"""Every layer, and how it is called with a sequence of vectors: `LAYERS` maps a name to
`(make(key), call(layer, xs))`."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp


nn = eqg.nn
TIME, IN, OUT = 6, 3, 4


def _sequence(layer, xs):
    return layer(xs)[0]


def _each_step(layer, xs):
    return jax.vmap(layer)(xs)


def _whole(layer, xs):
    return layer(xs)


def _cell(cell, xs):
    step = lambda state, x: ((new := cell(x, state)), jax.tree.leaves(new)[0])
    start = cell.initial_state() if hasattr(cell, "initial_state") else jnp.zeros(OUT)
    return eqg.filter_scan(step, start, xs)[1]


def _equinox(cell, xs):
    """A layer of Equinox in a `jax.lax.scan`: the reference of `tests/soak.py`."""
    return jax.lax.scan(lambda h, x: ((new := cell(x, h)), new), jnp.zeros(OUT), xs)[1]


def _fixed_point_cell(linear, x, z):
    return jnp.tanh(0.3 * z + linear(x))


def _made(make, *sizes, **options):
    return lambda key: make(IN, OUT, *sizes, key=key, **options)


def _on_linear(make):
    """With a linear layer before it, or around it."""
    return lambda key: make(eqx.nn.Linear(IN, OUT, key=key))


def _after_linear(layer):
    linear = lambda key: eqx.nn.Linear(IN, IN, key=key)
    return lambda key: eqx.nn.Sequential([linear(key), layer])


_SPIKES = {"learn": "beta"}
LAYERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, jax.Array], Any]]] = {
    "GRU": (_made(nn.GRU), _sequence),
    "LSTM": (_made(nn.LSTM, learn_initial_state=True), _sequence),
    "RNN": (_made(nn.RNN, activation="relu"), _sequence),
    "RNNCell": (_made(nn.RNNCell), _cell),
    "Recurrent": (lambda key: nn.Recurrent(eqx.nn.GRUCell(IN, OUT, key=key)), _sequence),
    "Outputs": (lambda key: nn.Outputs(nn.GRU(IN, OUT, key=key)), _whole),
    "LRU": (_made(nn.LRU, 4), _sequence),
    "S5": (_made(nn.S5, 4), _sequence),
    "MinGRU": (_made(nn.MinGRU), _sequence),
    "MinLSTM": (_made(nn.MinLSTM), _sequence),
    "LIF": (_made(nn.LIF, 0.9, surrogate=eqg.surrogates.atan(), **_SPIKES), _sequence),
    "LIF, all": (_made(nn.LIF, 0.9, alpha=0.5, rho=0.8, recurrent=True, **_SPIKES), _sequence),
    "LI": (_made(nn.LI, 0.9, **_SPIKES), _sequence),
    "LIFCell": (lambda key: nn.LIFCell(OUT, 0.9, rho=0.8, input_size=IN, key=key), _cell),
    "GradientReversal": (_after_linear(nn.GradientReversal(0.5)), _each_step),
    "GradientProbe": (_after_linear(nn.GradientProbe(jnp.zeros(IN))), _each_step),
    "FakeQuantize": (_after_linear(nn.FakeQuantize(4)), _each_step),
    "LSQ": (_after_linear(nn.LSQ(4, scale=0.2)), _each_step),
    "FSQ": (_after_linear(nn.FSQ((5, 5, 5))), _each_step),
    "VectorQuantizer": (
        lambda key: nn.VectorQuantizer(4, IN, ema=False, key=key),
        lambda layer, xs: layer.quantize(xs)[0],
    ),
    "Binary": (_on_linear(lambda linear: nn.Quantized(linear, nn.Binary())), _each_step),
    "Ternary": (_on_linear(lambda linear: nn.Quantized(linear, nn.Ternary())), _each_step),
    "Quantized": (
        lambda key: nn.Quantized(eqx.nn.Conv1d(IN, OUT, 2, key=key), nn.FakeQuantize(4)),
        lambda layer, xs: layer(xs.T),
    ),
    "FixedPoint": (
        _on_linear(lambda linear: nn.FixedPoint(eqx.Partial(_fixed_point_cell, linear), OUT)),
        _each_step,
    ),
}
REFERENCE = {"eqx.nn.GRUCell": (_made(eqx.nn.GRUCell), _equinox)}
