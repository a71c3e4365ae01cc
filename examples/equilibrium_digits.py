"""Classify handwritten digits with an equilibrium model, and compare its backward passes.

The layer between input and output is the fixed point of a cell of 60 units: the image reaches
the first 20 of them, and the last 20 are read out. The gradient is computed by a linear solve,
by an iteration, by three approximations, and by autodiff of 60 steps in a scan.
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
from eqx_grads import solvers
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm


GROUP = 20  # units that the image reaches, that are in between, and that are read out
CONTRACTION, UNROLLED = 0.95, 60  # a bound of the spectral norm of the weight, and steps
BATCH, STEPS, SEEDS, LEARNING_RATE = 64, 400, 2, 1e-2
BACKWARD = ("unrolled", "implicit", "fixed_point", "neumann", "phantom", "one_step")


class Cell(eqx.Module):
    weight: Float[Array, "units units"]
    bias: Float[Array, " units"]

    def __call__(self, drive, z):
        return jnp.tanh(self.weight @ z + self.bias + drive)

    def contracting(self):
        # The sixteenth root of the sum of the sixteenth powers of singular values is a bound.
        fourth = jnp.linalg.matrix_power(self.weight.T @ self.weight, 4)
        scale = jnp.minimum(1.0, CONTRACTION / jnp.sum(fourth**2) ** (1 / 16))
        return eqx.tree_at(lambda cell: cell.weight, self, scale * self.weight)


class Classifier(eqx.Module):
    of_image: eqx.nn.Linear
    cell: Cell
    readout: eqx.nn.Linear

    def __init__(self, *, key):
        key1, key2, key3 = jr.split(key, 3)
        self.of_image = eqx.nn.Linear(64, GROUP, key=key1)
        weight = jr.normal(key2, (3 * GROUP, 3 * GROUP)) / np.sqrt(3 * GROUP)
        self.cell = Cell(weight, jnp.zeros(3 * GROUP))
        self.readout = eqx.nn.Linear(GROUP, 10, key=key3)

    def __call__(self, images, backward):
        cell = self.cell.contracting()  # once for the batch, and not in each step
        drives = jnp.pad(jax.vmap(self.of_image)(images), ((0, 0), (0, 2 * GROUP)))
        if backward == "unrolled":
            step = lambda zs, _: (jax.vmap(cell)(drives, zs), None)
            zs, _ = jax.lax.scan(step, jnp.zeros_like(drives), None, length=UNROLLED)
        else:
            layer = eqg.nn.FixedPoint(cell, 3 * GROUP, backward=backward)
            zs = jax.vmap(layer)(drives)
        return jax.vmap(self.readout)(zs[:, -GROUP:])


def loss(network, images, labels, backward):
    logits = network(images, backward)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def train(seed, images, labels, backward, steps):
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    key1, key2 = jr.split(jr.key(seed))
    weights, rest = eqx.partition(Classifier(key=key1), eqx.is_array)

    def update(state, key):
        weights, opt_state = state
        batch = jr.randint(key, (BATCH,), 0, len(images))
        network = eqx.combine(weights, rest)
        grads = eqx.filter_grad(loss)(network, images[batch], labels[batch], backward)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (eqx.apply_updates(weights, updates), opt_state), None

    start = (weights, optimizer.init(weights))
    (weights, _), _ = jax.lax.scan(update, start, jr.split(key2, steps))
    return eqx.combine(weights, rest)


@eqx.filter_jit
def gradient(network, images, labels, backward):
    return ravel_pytree(eqx.filter_grad(loss)(network, images, labels, backward))[0]


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(accuracies, numbers, wrong):
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    bars = left.barh(list(accuracies), [100 * x for x in accuracies.values()], color="#00798c")
    left.bar_label(bars, fmt="%.1f", padding=-30, color="white")
    left.set(title="Test digits right (%), by the backward pass")
    for name, errors in wrong.items():
        right.plot(numbers, errors, ".-", label=name)
    right.set(yscale="log", xlabel="VJPs of the cell", title="Relative error of the gradient")
    right.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Train an equilibrium model in six ways.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (5, 1) if args.quick else (STEPS, SEEDS)
    numbers = [0, 2] if args.quick else [0, 1, 2, 4, 8, 16, 32]
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    accuracies, networks = {}, {}
    for name in tqdm(BACKWARD, leave=False, disable=None):
        run = lambda seed, name=name: train(seed, images, labels, name, steps)
        networks[name] = [run(seed) for seed in jnp.arange(seeds)]
        logits = jnp.stack([network(test_images, "implicit") for network in networks[name]])
        accuracies[name] = float((logits.argmax(axis=2) == test_labels).mean())
        print(f"{name}: {accuracies[name]:.1%} of the test digits (mean of {seeds} seeds)")
    digits = networks["implicit"][0], test_images[:BATCH], test_labels[:BATCH]
    exact, norm = gradient(*digits, "implicit"), jnp.linalg.norm
    error = lambda x: float(norm(x - exact) / norm(exact))
    phantom = [solvers.PhantomAdjoint(n + 1, 0.5) for n in numbers]
    adjoints = {"neumann": map(solvers.NeumannAdjoint, numbers), "phantom": phantom}
    wrong = {name: [error(gradient(*digits, x)) for x in xs] for name, xs in adjoints.items()}
    wrong["fixed_point"] = len(numbers) * [error(gradient(*digits, "fixed_point"))]
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"accuracies": accuracies, "errors": wrong}
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "equilibrium-digits.png"
    draw(accuracies, numbers, wrong).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
