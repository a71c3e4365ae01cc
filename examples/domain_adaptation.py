"""Unsupervised domain adaptation with a gradient reversal, on the two-moons data set.

The network has labels for two moons, and no labels for the same moons rotated by 35 degrees. A
second classifier predicts from its features which of the two domains a point belongs to. As the
gradient of this classifier is reversed, the features are trained to make the prediction
impossible: they keep what the domains have in common, and the classification generalizes to the
rotated moons. For comparison, the same network is trained without the reversal.
"""

import argparse
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
from jaxtyping import Array, Float, Int
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from sklearn.datasets import make_moons


POINTS = 300  # in each domain
ANGLE = 35  # degrees
FEATURES = 15
STRENGTH = 3.0  # of the reversal, at the end
STEPS = 3000
LEARNING_RATE = 0.1
MOMENTUM = 0.9

# ---------------------------------------------------------------- the network


class Network(eqx.Module):
    """Features of a point, with a classifier of its label and one of its domain."""

    features: eqx.nn.Linear
    label: eqx.nn.Linear
    domain: eqx.nn.MLP

    def __init__(self, *, key):
        key1, key2, key3 = jr.split(key, 3)
        self.features = eqx.nn.Linear(2, FEATURES, key=key1)
        self.label = eqx.nn.Linear(FEATURES, 2, key=key2)
        self.domain = eqx.nn.MLP(FEATURES, 2, FEATURES, depth=1, key=key3)

    def __call__(self, point, strength):
        """The logits of the labels, and those of the domains."""
        features = jax.nn.sigmoid(self.features(point))
        # The domain classifier minimizes its loss, and the features maximize it.
        reversed_features = eqg.reverse_gradient(features, strength)
        return self.label(features), self.domain(reversed_features)


# ---------------------------------------------------------------- training


class Moons(NamedTuple):
    source: Float[Array, "points 2"]
    source_labels: Int[Array, " points"]
    target: Float[Array, "points 2"]
    target_labels: Int[Array, " points"]  # for the evaluation only


def load(seed):
    source, source_labels = make_moons(POINTS, noise=0.05, random_state=seed)
    target, target_labels = make_moons(POINTS, noise=0.05, random_state=seed + 1000)
    a = np.deg2rad(ANGLE)
    rotation = np.array([[np.cos(a), np.sin(a)], [-np.sin(a), np.cos(a)]])
    source = jnp.asarray(source - np.mean(source, axis=0), jnp.float32)
    target = jnp.asarray((target - np.mean(target, axis=0)) @ rotation, jnp.float32)
    return Moons(source, jnp.asarray(source_labels), target, jnp.asarray(target_labels))


def cross_entropy(logits, labels):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()


def loss(network, moons, strength):
    logits, domains = jax.vmap(network, in_axes=(0, None))(moons.source, strength)
    _, target_domains = jax.vmap(network, in_axes=(0, None))(moons.target, strength)
    is_target = jnp.repeat(jnp.arange(2), POINTS)
    of_domains = cross_entropy(jnp.concatenate([domains, target_domains]), is_target)
    return cross_entropy(logits, moons.source_labels) + of_domains


def accuracy(network, points, labels):
    logits, _ = jax.vmap(network, in_axes=(0, None))(points, 0.0)
    return (logits.argmax(axis=1) == labels).mean()


@eqx.filter_jit
def train(seeds, all_moons, strength, steps):
    """Train one network for each seed, all of them with `vmap`."""
    optimizer = optax.sgd(LEARNING_RATE, MOMENTUM)

    def train_one(seed, moons):
        network = Network(key=jr.key(seed))
        weights, rest = eqx.partition(network, eqx.is_array)

        def update(state, step):
            weights, opt_state = state
            now = strength * eqg.reversal_schedule(step / steps)
            of_weights = lambda weights: loss(eqx.combine(weights, rest), moons, now)
            grads = jax.grad(of_weights)(weights)
            with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
                updates, opt_state = optimizer.update(grads, opt_state)
            return (eqx.apply_updates(weights, updates), opt_state), None

        start = (weights, optimizer.init(weights))
        (weights, _), _ = jax.lax.scan(update, start, jnp.arange(steps))
        network = eqx.combine(weights, rest)
        source = accuracy(network, moons.source, moons.source_labels)
        return network, source, accuracy(network, moons.target, moons.target_labels)

    return eqx.filter_vmap(train_one)(seeds, all_moons)


# ---------------------------------------------------------------- the picture


INK, GRAY, TEAL, RUST = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d"
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
}


@matplotlib.rc_context(STYLE)
def draw(moons, runs):
    """The predictions of the first network of each kind, and the points."""
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    for panel, (name, network, accuracies) in zip(figure.subplots(1, 2), runs, strict=True):
        draw_regions(panel, network)
        panel.scatter(*moons.source.T, s=5, color=GRAY)
        for label, color in ((0, TEAL), (1, RUST)):
            panel.scatter(*moons.target[moons.target_labels == label].T, s=7, color=color)
        mean = float(np.mean(accuracies))
        panel.set(title=f"{name}: {mean:.0%} of the rotated points right", xticks=[], yticks=[])
        panel.set_aspect("equal")
    return figure


def draw_regions(panel, network):
    x, y = np.meshgrid(np.linspace(-2, 2, 201), np.linspace(-1.6, 1.6, 161))
    points = jnp.asarray(np.stack([x.ravel(), y.ravel()], axis=1), jnp.float32)
    logits, _ = jax.vmap(network, in_axes=(0, None))(points, 0.0)
    label = np.asarray(logits.argmax(axis=1)).reshape(x.shape)
    panel.pcolormesh(x, y, label, cmap=ListedColormap([TEAL, RUST]), alpha=0.18, linewidth=0)


# ---------------------------------------------------------------- all of it


def main():
    root = pathlib.Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description="Carry labels over to rotated moons.")
    parser.add_argument("--quick", action="store_true", help="two seeds, a few steps")
    parser.add_argument("--seeds", type=int, default=8, help="how many (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs" / "images")
    args = parser.parse_args()
    steps, seeds = (20, 2) if args.quick else (STEPS, args.seeds)

    start = time.perf_counter()
    each = [load(seed) for seed in range(seeds)]
    all_moons = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    runs = []
    for name, strength in (("Without the reversal", 0.0), ("With it", STRENGTH)):
        networks, _, target = train(jnp.arange(seeds), all_moons, strength, steps)
        arrays, rest = eqx.partition(networks, eqx.is_array)
        first = eqx.combine(jax.tree.map(lambda leaf: leaf[0], arrays), rest)
        runs.append((name, first, np.asarray(target)))

    print("accuracy on rotated moons   without reversal   with it")
    for seed, pair in enumerate(zip(runs[0][2], runs[1][2], strict=True)):
        print(f"seed {seed:<21} {pair[0]:17.1%} {pair[1]:9.1%}")
    means = [float(np.mean(accuracies)) for _, _, accuracies in runs]
    seconds = time.perf_counter() - start
    print(f"mean {'':<21} {means[0]:17.1%} {means[1]:9.1%}   in {seconds:.0f} s")

    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "domain-adaptation.png"
    draw(each[0], runs).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
