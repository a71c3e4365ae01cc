"""Unsupervised domain adaptation with a gradient reversal, on the two-moons data set.

The network has labels for two moons, and no labels for the same moons rotated by 35 degrees. A
second classifier predicts from its features which of the two domains a point belongs to. As the
gradient of this classifier is reversed, the features are trained to make the prediction
impossible, and to keep what the domains have in common.
"""

import argparse
import json
import pathlib
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
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from tqdm import trange


POINTS, ANGLE, FEATURES = 300, 35, 15  # points in each domain, and degrees
STRENGTH = 3.0  # of the reversal, at the end
STEPS, SEEDS, LEARNING_RATE, MOMENTUM = 3000, 8, 0.1, 0.9


class Network(eqx.Module):
    features: eqx.nn.Linear
    label: eqx.nn.Linear
    domain: eqx.nn.MLP

    def __init__(self, *, key):
        key1, key2, key3 = jr.split(key, 3)
        self.features = eqx.nn.Linear(2, FEATURES, key=key1)
        self.label = eqx.nn.Linear(FEATURES, 2, key=key2)
        self.domain = eqx.nn.MLP(FEATURES, 2, FEATURES, depth=1, key=key3)

    def __call__(self, point, strength):
        """The logits of the labels, and the logits of the domains."""
        features = jax.nn.sigmoid(self.features(point))
        # The domain classifier minimizes its loss, and the features maximize it.
        reversed_features = eqg.reverse_gradient(features, strength)
        return self.label(features), self.domain(reversed_features)


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


def loss(network, moons, strength):
    logits, domains = jax.vmap(network, in_axes=(0, None))(moons.source, strength)
    _, target_domains = jax.vmap(network, in_axes=(0, None))(moons.target, strength)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    is_target = jnp.repeat(jnp.arange(2), POINTS)
    of_domains = cross_entropy(jnp.concatenate([domains, target_domains]), is_target)
    return cross_entropy(logits, moons.source_labels).mean() + of_domains.mean()


@eqx.filter_jit
def accuracies(networks, all_moons):
    """On the target points, of each network."""

    def accuracy(network, moons):
        logits, _ = jax.vmap(network, in_axes=(0, None))(moons.target, 0.0)
        return (logits.argmax(axis=1) == moons.target_labels).mean()

    return eqx.filter_vmap(accuracy)(networks, all_moons)


def train(all_moons, strength, steps, name):
    """Train one network for each seed, all of them with `vmap`."""
    optimizer = optax.sgd(LEARNING_RATE, MOMENTUM)

    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(eqx.if_array(0), 0, 0, None))
    def update(network, state, moons, strength):
        grads = eqx.filter_grad(loss)(network, moons, strength)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(network, updates), state

    keys = jax.vmap(jr.key)(jnp.arange(len(all_moons.source)))
    networks = eqx.filter_vmap(lambda key: Network(key=key))(keys)
    state = eqx.filter_vmap(lambda n: optimizer.init(eqx.filter(n, eqx.is_array)))(networks)
    for i in trange(steps, desc=name, leave=False, disable=None):
        now = strength * eqg.reversal_schedule(i / steps)
        networks, state = update(networks, state, all_moons, now)
    return networks


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(moons, networks, means):
    """The predictions of the first network of each kind, and the points."""
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    x, y = np.meshgrid(np.linspace(-2, 2, 201), np.linspace(-1.6, 1.6, 161))
    grid = jnp.asarray(np.stack([x.ravel(), y.ravel()], axis=1), jnp.float32)
    for panel, (name, all_networks) in zip(
        figure.subplots(1, 2), networks.items(), strict=True
    ):
        first = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, all_networks)
        label = jax.vmap(first, in_axes=(0, None))(grid, 0.0)[0].argmax(axis=1)
        panel.pcolormesh(x, y, label.reshape(x.shape), cmap="coolwarm", alpha=0.2)
        panel.scatter(*moons.source.T, s=5, color="#c4c4c4")
        panel.scatter(*moons.target.T, s=7, c=moons.target_labels, cmap="coolwarm")
        title = f"{name}: {means[name]:.0%} of the rotated points right"
        panel.set(title=title, xticks=[], yticks=[], aspect="equal")
    return figure


def main():
    parser = argparse.ArgumentParser(description="Carry labels over to rotated moons.")
    parser.add_argument("--quick", action="store_true", help="two seeds, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (20, 2) if args.quick else (STEPS, SEEDS)
    each = [load(seed) for seed in range(seeds)]
    all_moons = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    networks, means = {}, {}
    for name, strength in (("Without the reversal", 0.0), ("With it", STRENGTH)):
        networks[name] = train(all_moons, strength, steps, name)
        right = accuracies(networks[name], all_moons)
        means[name] = float(right.mean())
        print(f"{name}: {means[name]:.1%} of the rotated points, {right.min():.1%} at least")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(means))
    picture = args.out / "domain-adaptation.png"
    draw(each[0], networks, means).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
