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
import time
from typing import NamedTuple

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
BATCH = 64
STEPS = 1260  # 60 epochs
LEARNING_RATE = 1e-2

# ---------------------------------------------------------------- the networks


def plain_sign(x):
    """The sign, with a derivative of zero."""
    return jnp.where(x < 0, -1, 1).astype(x.dtype)


# How each network quantizes its weights, and its activations.
NETWORKS = {
    "straight-through": (eqg.ste.binary_sign, eqx.nn.Lambda(eqg.ste.binary_sign)),
    "plain sign": (plain_sign, eqx.nn.Lambda(plain_sign)),
    # Weights are -2, -1, 0 or 1 steps, activations 0, 1, 2 or 3. The step sizes are learned.
    "two bits": (eqg.nn.LSQ(bits=2), eqg.nn.LSQ(bits=2, signed=False, scale=0.5)),
}


def make_network(name, key):
    """A network from pixels to logits."""
    of_weights, of_activations = NETWORKS[name]
    layers = []
    for inputs, outputs in itertools.pairwise(SIZES):
        key, subkey = jr.split(key)
        layers += [
            eqx.nn.Linear(inputs, outputs, use_bias=False, dtype="float32", key=subkey),
            eqx.nn.LayerNorm(outputs, dtype="float32"),
            of_activations,
        ]
    network = eqx.nn.Sequential(layers[:-1])
    return eqg.nn.quantize_model(network, {eqx.nn.Linear: (of_weights, None)})[0]


# ---------------------------------------------------------------- training


class Run(NamedTuple):
    network: eqx.nn.Sequential
    losses: np.ndarray
    accuracy: float  # on the test digits


def load():
    """The training digits and the test digits."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    return (images, labels), (test_images, test_labels)


def loss(network, images, labels):
    log_p = jax.nn.log_softmax(jax.vmap(network)(images))
    return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()


@eqx.filter_jit
def accuracy(network, images, labels):
    return (jax.vmap(network)(images).argmax(axis=1) == labels).mean()


@eqx.filter_jit
def update(network, opt_state, optimizer, key, images, labels):
    key1, key2 = jr.split(key)
    batch = jr.randint(key1, (BATCH,), 0, len(images))
    noisy = images[batch] + NOISE * jr.normal(key2, (BATCH, 64), images.dtype)
    value, grads = eqx.filter_value_and_grad(loss)(network, noisy, labels[batch])
    with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
        updates, opt_state = optimizer.update(grads, opt_state)
    network = eqx.apply_updates(network, updates)
    # The gradient of latent weights outside [-1, 1] is zero, so clip them. Every third layer is
    # linear.
    weights = lambda network: [layer.weight for layer in network[::3]]
    clipped = [jnp.clip(weight, -1, 1) for weight in weights(network)]
    return eqx.tree_at(weights, network, clipped), opt_state, value


def train(name, seed, optimizer, steps, training, test):
    key1, key2 = jr.split(jr.key(seed))
    network = make_network(name, key1)
    opt_state = optimizer.init(eqx.filter(network, eqx.is_array))
    losses = []
    # `disable=None`: no bar where there is no terminal.
    for i in trange(steps, desc=f"seed {seed}, {name}", leave=False, disable=None):
        key = jr.fold_in(key2, i)
        network, opt_state, value = update(network, opt_state, optimizer, key, *training)
        losses.append(value)
    return Run(network, np.array(losses), float(accuracy(network, *test)))


# ---------------------------------------------------------------- the picture


INK, GRAY, TEAL, RUST, BLUE = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d", "#4a6fa5"
COLORS = {"straight-through": TEAL, "plain sign": RUST, "two bits": BLUE}
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top"), False),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
}


@matplotlib.rc_context(STYLE)
def draw(runs):
    """Left: the training losses. Right: the weights of the first layers."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplot_mosaic([["loss", name] for name in NETWORKS], width_ratios=(1, 1.9))
    for name in NETWORKS:
        draw_losses(panels["loss"], name, runs[name])
        draw_weights(panels[name], name, runs[name][0].network[0])
    panels["loss"].set(title="Training loss (nats)", xlabel="training step", ylim=(0, None))
    return figure


def draw_losses(panel, name, runs):
    n = 1 + len(runs[0].losses) // 20
    smooth = [np.convolve(run.losses, np.full(n, 1 / n), mode="valid") for run in runs]
    steps = np.arange(n, n + len(smooth[0]))
    panel.plot(steps, np.stack(smooth, axis=1), color=COLORS[name], linewidth=1.3)
    text = f"{name}: {np.median([run.accuracy for run in runs]):.1%} of the test digits right"
    height = {"plain sign": 2.02, "straight-through": 0.62, "two bits": 0.48}[name]
    panel.text(steps[-1], height, text, color=COLORS[name], ha="right")


def draw_weights(panel, name, layer):
    """The weights of some neurons as pictures."""
    weight = np.asarray(layer.quantized_weight())
    tiles = np.full((2 * 9 + 1, 12 * 9 + 1), np.nan)
    for i, neuron in enumerate(weight[:24]):
        row, column = 1 + 9 * (i // 12), 1 + 9 * (i % 12)
        tiles[row : row + 8, column : column + 8] = neuron.reshape(8, 8)
    colors = matplotlib.colormaps["Greys"].with_extremes(bad="#f3e9dc")
    panel.imshow(tiles, cmap=colors, interpolation="nearest")
    values = len(np.unique(weight))
    title = f"What neurons of the first layer look for, {name}: {values} values"
    panel.set_title(title, color=COLORS[name])
    panel.set_axis_off()


# ---------------------------------------------------------------- all of it


def main():
    parser = argparse.ArgumentParser(description="Teach networks of bits to read digits.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--seeds", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (5, 1) if args.quick else (STEPS, args.seeds)

    start = time.perf_counter()
    training, test = load()
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    runs = {name: [] for name in NETWORKS}
    print("test accuracy    " + "    ".join(NETWORKS))
    for seed in range(seeds):
        for name in NETWORKS:
            runs[name].append(train(name, seed, optimizer, steps, training, test))
        print_row(f"seed {seed}", [runs[name][-1].accuracy for name in NETWORKS])
    medians = {name: float(np.median([r.accuracy for r in runs[name]])) for name in NETWORKS}
    seconds = time.perf_counter() - start
    print_row("median", medians.values())

    args.out.mkdir(parents=True, exist_ok=True)
    result = {name.replace(" ", "_").replace("-", "_"): m for name, m in medians.items()}
    (args.out / "result.json").write_text(json.dumps({**result, "seconds": seconds}))
    picture = args.out / "binary-network.png"
    draw(runs).savefig(picture, dpi=150)
    print(f"After {seconds:.0f} s. The picture is {picture}.")


def print_row(name, accuracies):
    cells = [f"{a:>{len(title)}.1%}" for title, a in zip(NETWORKS, accuracies, strict=True)]
    print(f"{name:<17}" + "    ".join(cells))


if __name__ == "__main__":
    main()
