"""Train a network with binary weights and activations to classify handwritten digits.

The derivative of a sign is zero almost everywhere, so a network with plain signs does not
train. `ste.binary_sign` is the same sign with a straight-through derivative with respect to the
latent weights. For comparison, the same network is trained with the plain sign, and with two
bits for weights and activations by learned step size quantization.
"""

import argparse
import itertools
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


# Chosen by the accuracy on other splits of the data than the one below.
SIZES = (64, 128, 128, 10)
NOISE = 0.1  # added to the pixels in training, against overfitting
BATCH, STEPS, SEEDS, LEARNING_RATE = 64, 1260, 3, 1e-2


def plain_sign(x):
    """The sign, with a derivative of zero."""
    return jnp.where(x < 0, -1, 1).astype(x.dtype)


# How each network quantizes its weights, and its activations; and its color.
NETWORKS = {
    "straight-through": (eqg.ste.binary_sign, eqx.nn.Lambda(eqg.ste.binary_sign), "#00798c"),
    "plain sign": (plain_sign, eqx.nn.Lambda(plain_sign), "#c8553d"),
    # Weights are -2, -1, 0 or 1 steps, activations 0, 1, 2 or 3. The step sizes are learned.
    "two bits": (eqg.nn.LSQ(bits=2), eqg.nn.LSQ(bits=2, signed=False, scale=0.5), "#4a6fa5"),
}


def make_network(name, key):
    """A network from pixels to logits."""
    of_weights, of_activations, _ = NETWORKS[name]
    layers = []
    for inputs, outputs in itertools.pairwise(SIZES):
        key, subkey = jr.split(key)
        linear = eqx.nn.Linear(inputs, outputs, use_bias=False, key=subkey)
        layers += [linear, eqx.nn.LayerNorm(outputs), of_activations]
    network = eqx.nn.Sequential(layers[:-1])
    return eqg.nn.quantize_model(network, {eqx.nn.Linear: (of_weights, None)})[0]


def loss(network, images, labels):
    logits = jax.vmap(network)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def accuracy(network, images, labels):
    return (jax.vmap(network)(images).argmax(axis=1) == labels).mean()


@eqx.filter_jit
def update(network, state, optimizer, key, images, labels):
    key1, key2 = jr.split(key)
    batch = jr.randint(key1, (BATCH,), 0, len(images))
    noisy = images[batch] + NOISE * jr.normal(key2, (BATCH, 64))
    value, grads = eqx.filter_value_and_grad(loss)(network, noisy, labels[batch])
    updates, state = optimizer.update(grads, state)
    network = eqx.apply_updates(network, updates)
    # The gradient of latent weights outside [-1, 1] is zero, so clip them. Every third layer is
    # linear.
    weights = lambda network: [layer.weight for layer in network[::3]]
    clipped = [jnp.clip(weight, -1, 1) for weight in weights(network)]
    return eqx.tree_at(weights, network, clipped), state, value


def train(name, seed, steps, images, labels):
    """The network, and its losses."""
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    key1, key2 = jr.split(jr.key(seed))
    network, losses = make_network(name, key1), []
    state = optimizer.init(eqx.filter(network, eqx.is_array))
    for i in trange(steps, desc=f"{name}, seed {seed}", leave=False, disable=None):
        key = jr.fold_in(key2, i)
        network, state, value = update(network, state, optimizer, key, images, labels)
        losses.append(value)
    return network, np.array(losses)


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(runs, medians):
    """Left: the training losses. Right: the weights of neurons of the first layer."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplot_mosaic([["loss", name] for name in NETWORKS], width_ratios=(1, 1.9))
    for name, (_, _, color) in NETWORKS.items():
        label = f"{name}: {medians[name]:.1%} right"
        smooth = [np.convolve(losses, np.ones(50) / 50, "valid") for _, losses in runs[name]]
        panels["loss"].plot(np.mean(smooth, axis=0), color=color, label=label)
        weight = np.asarray(runs[name][0][0][0].quantized_weight())
        rows = np.pad(weight[:24].reshape(2, 12, 8, 8), [(0, 0), (0, 0), (0, 1), (0, 1)])
        panels[name].imshow(np.block([list(row) for row in rows]), cmap="Greys")
        title = f"Weights of the first layer, {name}: {len(np.unique(weight))} values"
        panels[name].set_title(title, color=color)
        panels[name].set_axis_off()
    panels["loss"].set(title="Training loss (nats)", xlabel="training step", ylim=(0, None))
    panels["loss"].legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Teach networks of bits to read digits.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (60, 1) if args.quick else (STEPS, SEEDS)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    runs, medians = {}, {}
    for name in NETWORKS:
        runs[name] = [train(name, seed, steps, images, labels) for seed in range(seeds)]
        right = [float(accuracy(run[0], test_images, test_labels)) for run in runs[name]]
        medians[name] = float(np.median(right))
        print(f"{name}: {medians[name]:.1%} of the test digits (median of {seeds} seeds)")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(medians))
    picture = args.out / "binary-network.png"
    draw(runs, medians).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
