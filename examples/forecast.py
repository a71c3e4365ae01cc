"""Forecast the number of sunspots a year ahead, with three recurrent networks.

A linear recurrent unit (`eqg.nn.LRU`), a minGRU (`eqg.nn.MinGRU`) and a plain recurrent network
(`eqg.nn.RNN`) read the yearly numbers since 1700 and predict the next one. As in Weigend,
Huberman and Rumelhart (1990), they are trained on the years up to 1920 and tested on 1921 to
1955. The error is the mean square divided by the variance of the 35 numbers.

The numbers, `sunspots.csv`, come from the National Geophysical Data Center (public domain).
"""

import argparse
import json
import pathlib
from collections.abc import Callable

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import trange


DATA = pathlib.Path(__file__).with_name("sunspots.csv")
UNITS, SEEDS, STEPS, LEARNING_RATE, WEIGHT_DECAY = 16, 8, 200, 1e-2, 0.1
FIRST, TRAINED, TESTED = 1700, 1921, 1956  # the years up to which
SCALE = 100
LAYERS = {
    "LRU": lambda key: eqg.nn.LRU(
        1, UNITS, UNITS, r_min=0.5, activation=jnp.tanh, num_layers=2, key=key
    ),
    "minGRU": lambda key: eqg.nn.MinGRU(1, UNITS, num_layers=2, key=key),
    "plain RNN": lambda key: eqg.nn.RNN(1, UNITS, num_layers=2, key=key),
}


class Network(eqx.Module):
    layer: Callable
    readout: eqx.nn.Linear

    def __init__(self, name: str, *, key):
        key1, key2 = jr.split(key)
        self.layer = LAYERS[name](key1)
        self.readout = eqx.nn.Linear(UNITS, 1, key=key2)

    def __call__(self, numbers):
        """The forecast of each next number: the last one, and a change."""
        features, _ = self.layer(numbers[:, None])
        return numbers + jax.vmap(self.readout)(features)[:, 0]


def loss(network, numbers):
    """The mean square of the forecasts for the years to train on but the first ten."""
    errors = network(numbers[:-1]) - numbers[1:]
    return jnp.mean(errors[10 : TRAINED - FIRST - 1] ** 2)


def train(name, numbers, steps, seeds):
    """The mean forecast of networks that are trained side by side, one for each seed."""
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    optimizer = optax.adamw(schedule, weight_decay=WEIGHT_DECAY)
    networks = [Network(name, key=key) for key in jr.split(jr.key(0), seeds)]
    arrays, rest = zip(*(eqx.partition(n, eqx.is_inexact_array) for n in networks), strict=True)
    arrays = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
    forecast = lambda arrays: eqx.combine(arrays, rest[0])(numbers[:-1])
    state = jax.vmap(optimizer.init)(arrays)

    @jax.jit
    @jax.vmap
    def update(arrays, state):
        grads = jax.grad(lambda arrays: loss(eqx.combine(arrays, rest[0]), numbers))(arrays)
        updates, state = optimizer.update(grads, state, arrays)
        return eqx.apply_updates(arrays, updates), state

    for _ in trange(steps, desc=name, leave=False, disable=None):
        arrays, state = update(arrays, state)
    return jnp.mean(jax.vmap(forecast)(arrays), axis=0)


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(numbers, forecasts, errors):
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    years = np.arange(TRAINED, TESTED)
    axes.plot(years, SCALE * numbers[years - FIRST], "k.-", label="sunspots")
    for name, forecast in forecasts.items():
        label = f"{name}: error {errors[name]:.3f}"
        axes.plot(years, SCALE * forecast[years - FIRST - 1], linewidth=1, label=label)
    axes.set(title="The yearly number of sunspots, and forecasts a year ahead", xlabel="year")
    axes.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Forecast sunspots with recurrent networks.")
    parser.add_argument("--quick", action="store_true", help="two seeds, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (20, 2) if args.quick else (STEPS, SEEDS)
    numbers = np.loadtxt(DATA, "float32", delimiter=",", skiprows=1)[:, 1] / SCALE
    forecasts: dict = {name: train(name, jnp.asarray(numbers), steps, seeds) for name in LAYERS}
    forecasts["the number of this year"] = numbers[:-1]
    years, errors = np.arange(TRAINED, TESTED), {}
    for name, forecast in forecasts.items():
        right = numbers[years - FIRST]
        errors[name] = float(
            np.mean((forecast[years - FIRST - 1] - right) ** 2) / np.var(right)
        )
        print(f"{name}: {errors[name]:.3f}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(errors))
    picture = args.out / "forecast.png"
    draw(numbers, forecasts, errors).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
