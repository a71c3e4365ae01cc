"""Train a spiking network to classify handwritten digits, which it reads row by row.

The neurons are leaky integrate-and-fire neurons. Their spike is a step function of the membrane
potential, whose derivative is zero almost everywhere. `spike` is the same step with a surrogate
derivative. For comparison, the same network is trained with the plain step.
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
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange


# Chosen by the accuracy on other splits of the data than the one below.
NEURONS, TICKS_PER_ROW, DECAY = 200, 4, 0.8  # DECAY: of a potential in one time step
NOISE = 0.2  # added to the pixels in training, against overfitting
BATCH, STEPS, SEEDS, LEARNING_RATE = 64, 840, 3, 5e-3


def step(v):
    return (v > 0).astype(v.dtype)


def bump(out, v):
    """The surrogate derivative, with its maximum at the threshold."""
    return 1 / (1 + 2 * jnp.abs(v)) ** 2


spike = eqg.elementwise(step, bump)


class Network(eqx.Module):
    """Two layers of recurrently connected leaky integrate-and-fire neurons. The second has a
    neuron for each digit, whose spikes are counted."""

    weights: list[Float[Array, "neurons inputs"]]
    recurrent: list[Float[Array, "neurons neurons"]]
    gain: Float[Array, ""]
    bias: Float[Array, " 10"]
    fire: Callable

    def __init__(self, fire: Callable, *, key):
        keys = jr.split(key, 4)
        normal = lambda key, n, m: jr.normal(key, (n, m)) / m**0.5
        self.weights = [normal(keys[0], NEURONS, 8), normal(keys[1], 10, NEURONS)]
        self.recurrent = [normal(keys[2], NEURONS, NEURONS) / 2, normal(keys[3], 10, 10) / 2]
        self.gain, self.bias, self.fire = jnp.array(0.5), jnp.zeros(10), fire

    def __call__(self, image):
        """The logits, and the spikes of both layers over time."""

        def tick(state, inputs):
            new = []
            layers = zip(self.weights, self.recurrent, state, strict=True)
            for weight, recurrent, (v, z) in layers:
                v = DECAY * v + weight @ inputs + recurrent @ z - z  # a spike subtracts one
                inputs = self.fire(v - 1)
                new.append((v, inputs))
            return new, [spikes for _, spikes in new]

        at_rest = [(jnp.zeros(n), jnp.zeros(n)) for n in (NEURONS, 10)]
        spikes = jax.lax.scan(tick, at_rest, jnp.repeat(image, TICKS_PER_ROW, axis=0))[1]
        return self.gain * spikes[1].sum(axis=0) + self.bias, spikes


def loss(network, images, labels):
    logits, _ = jax.vmap(network)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def update(network, state, optimizer, key, images, labels):
    key1, key2 = jr.split(key)
    batch = jr.randint(key1, (BATCH,), 0, len(images))
    noisy = images[batch] + NOISE * jr.normal(key2, (BATCH, 8, 8))
    value, grads = eqx.filter_value_and_grad(loss)(network, noisy, labels[batch])
    updates, state = optimizer.update(grads, state)
    return eqx.apply_updates(network, updates), state, value


def train(fire, seed, optimizer, steps, images, labels):
    """The network, and its losses."""
    key1, key2 = jr.split(jr.key(seed))
    network, losses = Network(fire, key=key1), []
    state = optimizer.init(eqx.filter(network, eqx.is_array))
    for i in trange(steps, desc=f"seed {seed}", leave=False, disable=None):
        key = jr.fold_in(key2, i)
        network, state, value = update(network, state, optimizer, key, images, labels)
        losses.append(float(value))
    return network, losses


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(losses, network, image):
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplot_mosaic([["loss", n] for n in ("rows", "hidden", "output")])
    for name, color in (("plain step", "#c8553d"), ("spike", "#00798c")):
        panels["loss"].plot(np.mean(losses[name], axis=0), color=color, label=name)
    panels["loss"].set(title="Training loss (nats)", xlabel="step", ylim=(0, 3))
    panels["loss"].legend(frameon=False)
    panels["rows"].imshow(image.T, cmap="Greys", aspect="auto")
    for name, spikes in zip(("hidden", "output"), network(image)[1], strict=True):
        panels[name].imshow(spikes.T, cmap="Greys", aspect="auto", interpolation="nearest")
    panels["rows"].set(title="What goes in: the rows of a digit, one after another")
    panels["hidden"].set(title="The spikes of the hidden neurons", xticks=[])
    panels["output"].set(title="The spikes of the output neurons", xlabel="time step")
    return figure


def main():
    parser = argparse.ArgumentParser(description="Teach a spiking network to read digits.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (5, 1) if args.quick else (STEPS, SEEDS)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    accuracies, losses, networks = {}, {}, {}
    for name, fire in (("spike", spike), ("plain step", step)):
        runs = [train(fire, s, optimizer, steps, images, labels) for s in range(seeds)]
        networks[name], losses[name] = runs[0][0], [run[1] for run in runs]
        guesses = [jax.vmap(run[0])(test_images)[0].argmax(axis=1) for run in runs]
        accuracies[name] = float(np.median([(g == test_labels).mean() for g in guesses]))
        print(f"{name}: {accuracies[name]:.1%} of the test digits (median of {seeds} seeds)")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(accuracies))
    picture = args.out / "spiking-digits.png"
    draw(losses, networks["spike"], test_images[0]).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
