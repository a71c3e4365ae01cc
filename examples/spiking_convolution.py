"""Train a spiking convolutional network on handwritten digits.

It is the network of the tutorial of snnTorch, for smaller images: convolution, pooling, spiking
neurons, the same once more, and a linear layer before ten output neurons. An image is the same
input in each time step, and the prediction is the neuron with most spikes. For comparison, the
same network is trained with the true derivative of a spike, which is zero.
"""

import argparse
import json
import pathlib

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import trange


TICKS, DECAY, CHANNELS = 12, 0.8, (12, 24)
BATCH, STEPS, SEEDS, LEARNING_RATE = 64, 300, 3, 5e-3
RATE_GAIN = 8.0  # of the rate of spikes in the logits
SURROGATES = {"surrogate": eqg.surrogates.superspike(2.0), "zero gradient": jnp.zeros_like}


class Network(eqx.Module):
    convolutions: list[eqx.nn.Conv2d]
    pool: eqx.nn.MaxPool2d
    neurons: list[eqg.nn.LIF]
    output: eqg.nn.LIF

    def __init__(self, name: str, *, key):
        keys = jr.split(key, 3)
        few, many = CHANNELS
        options = {"surrogate": SURROGATES[name], "learn": "beta"}
        self.convolutions = [
            eqx.nn.Conv2d(1, few, 3, padding="SAME", key=keys[0]),
            eqx.nn.Conv2d(few, many, 3, padding="SAME", key=keys[1]),
        ]
        self.pool = eqx.nn.MaxPool2d(2, 2)
        # Neurons of the shape of an image: each has an input of its own.
        self.neurons = [
            eqg.nn.LIF(None, (few, 4, 4), DECAY, threshold=0.5, **options),
            eqg.nn.LIF(None, (many, 2, 2), DECAY, threshold=0.5, **options),
        ]
        self.output = eqg.nn.LIF(4 * many, 10, DECAY, key=keys[2], **options)

    def __call__(self, images):
        """The logits of a batch, and the spikes of all layers, `(batch, time, ...)`."""
        x, all_spikes = jnp.repeat(images[:, None, None], TICKS, axis=1), []
        for convolution, neurons in zip(self.convolutions, self.neurons, strict=True):
            x = jax.vmap(jax.vmap(lambda x, f=convolution: self.pool(f(x))))(x)
            x, _ = neurons(x)
            all_spikes.append(x)
        spikes, _ = self.output(x.reshape(*x.shape[:2], -1))
        return RATE_GAIN * spikes.mean(axis=1), [*all_spikes, spikes]


def loss(network, images, labels):
    logits, _ = network(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def update(network, state, optimizer, key, images, labels):
    batch = jr.randint(key, (BATCH,), 0, len(images))
    value, grads = eqx.filter_value_and_grad(loss)(network, images[batch], labels[batch])
    updates, state = optimizer.update(grads, state)
    return eqx.apply_updates(network, updates), state, value


@eqx.filter_jit
def accuracy(network, images, labels):
    return (network(images)[0].argmax(axis=1) == labels).mean()


def train(name, seed, steps, images, labels):
    """The network, and its losses."""
    key1, key2 = jr.split(jr.key(seed))
    network, losses = Network(name, key=key1), []
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    state = optimizer.init(eqx.filter(network, eqx.is_array))
    for i in trange(steps, desc=f"{name}, seed {seed}", leave=False, disable=None):
        key = jr.fold_in(key2, i)
        network, state, value = update(network, state, optimizer, key, images, labels)
        losses.append(float(value))
    return network, losses


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(losses, network, image):
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplot_mosaic([["loss", "image", "first"], ["loss", "output", "output"]])
    for name, color in (("zero gradient", "#c8553d"), ("surrogate", "#00798c")):
        panels["loss"].plot(np.mean(losses[name], axis=0), color=color, label=name)
    panels["loss"].set(title="Training loss (nats)", xlabel="step", ylim=(0, 3))
    panels["loss"].legend(frameon=False)
    panels["image"].imshow(image, cmap="Greys")
    panels["image"].set(title="A digit", xticks=[], yticks=[])
    (first, _, output) = (spikes[0] for spikes in network(image[None])[1])
    rates = np.concatenate(first.mean(axis=0)[:6], axis=1)  # six channels side by side
    panels["first"].imshow(rates, cmap="Greys")
    panels["first"].set(
        title="Spikes in six channels after a convolution", xticks=[], yticks=[]
    )
    panels["output"].imshow(output.T, cmap="Greys", aspect="auto", interpolation="nearest")
    panels["output"].set(title="The spikes of the ten output neurons", xlabel="time step")
    return figure


def main():
    parser = argparse.ArgumentParser(description="A spiking convolutional network.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (3, 1) if args.quick else (STEPS, SEEDS)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    accuracies, losses, networks = {}, {}, {}
    for name in SURROGATES:
        runs = [train(name, seed, steps, images, labels) for seed in range(seeds)]
        networks[name], losses[name] = runs[0][0], [run[1] for run in runs]
        found = [float(accuracy(run[0], test_images, test_labels)) for run in runs]
        accuracies[name] = float(np.median(found))
        print(f"{name}: {accuracies[name]:.1%} of the test digits (median of {seeds} seeds)")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(accuracies))
    picture = args.out / "spiking-convolution.png"
    draw(losses, networks["surrogate"], test_images[0]).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
