"""Classify handwritten digits with an equilibrium model, and compare its backward passes.

The layer between input and output is the fixed point of a cell of 60 units: the image reaches
the first 20 of them, and the last 20 are read out. What is between them happens in the
iteration, so the gradient has to come through it as well. It is computed by a linear solve, by
an iteration, by three approximations, and by autodiff of 60 steps in a scan.
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
from eqx_grads import solvers
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


GROUP = 20  # units that the image reaches, that are in between, and that are read out
CONTRACTION = 0.95  # a bound of the spectral norm of the recurrent weight
UNROLLED = 60  # steps
BATCH = 64
STEPS = 400
LEARNING_RATE = 1e-2
BACKWARD = ("unrolled", "implicit", "fixed_point", "neumann", "phantom", "one_step")

# ---------------------------------------------------------------- the network


class Cell(eqx.Module):
    weight: Float[Array, "units units"]
    bias: Float[Array, " units"]

    def __init__(self, *, key):
        self.weight = jr.normal(key, (3 * GROUP, 3 * GROUP)) / np.sqrt(3 * GROUP)
        self.bias = jnp.zeros(3 * GROUP)

    def __call__(self, drive, z):
        return jnp.tanh(self.weight @ z + self.bias + drive)

    def contracting(self):
        """This cell with a weight whose spectral norm is less than `CONTRACTION`."""
        scale = jnp.minimum(1.0, CONTRACTION / norm_bound(self.weight))
        return eqx.tree_at(lambda cell: cell.weight, self, scale * self.weight)


def norm_bound(weight):
    """A bound of the spectral norm, by three products: the sixteenth root of the sum of the
    sixteenth powers of all singular values."""
    fourth = jnp.linalg.matrix_power(weight.T @ weight, 4)
    return jnp.sum(fourth**2) ** (1 / 16)


class Classifier(eqx.Module):
    of_image: eqx.nn.Linear
    cell: Cell
    readout: eqx.nn.Linear

    def __init__(self, *, key):
        key1, key2, key3 = jr.split(key, 3)
        self.of_image = eqx.nn.Linear(64, GROUP, key=key1)
        self.cell = Cell(key=key2)
        self.readout = eqx.nn.Linear(GROUP, 10, key=key3)

    def drive(self, image):
        return jnp.pad(self.of_image(image), (0, 2 * GROUP))

    def __call__(self, images, backward):
        """The logits of a batch."""
        cell = self.cell.contracting()  # once for the batch, and not in each step
        drives = jax.vmap(self.drive)(images)
        if backward == "unrolled":
            step = lambda zs, _: (jax.vmap(cell)(drives, zs), None)
            zs, _ = jax.lax.scan(step, jnp.zeros_like(drives), None, length=UNROLLED)
        else:
            layer = eqg.nn.FixedPoint(cell, 3 * GROUP, backward=backward)
            zs = jax.vmap(layer)(drives)
        return jax.vmap(self.readout)(zs[:, -GROUP:])


# ---------------------------------------------------------------- training


class Digits(NamedTuple):
    images: Float[Array, "digits 64"]
    labels: Int[Array, " digits"]


def load():
    """The training digits and the test digits."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    return Digits(images, labels), Digits(test_images, test_labels)


def loss(network, digits, backward):
    log_p = jax.nn.log_softmax(network(digits.images, backward))
    return -jnp.take_along_axis(log_p, digits.labels[:, None], axis=1).mean()


@eqx.filter_jit
def accuracy(network, digits):
    predicted = network(digits.images, "implicit").argmax(axis=1)
    return (predicted == digits.labels).mean()


@eqx.filter_jit
def statistics(network, digits):
    """How many steps the solver takes for each digit, and the residual that it leaves."""
    layer = eqg.nn.FixedPoint(network.cell.contracting(), 3 * GROUP)
    return jax.vmap(lambda image: layer.solve(network.drive(image)))(digits.images).stats


@eqx.filter_jit
def train(seed, digits, backward, steps):
    """One network, trained in one program."""
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    key1, key2 = jr.split(jr.key(seed))
    weights, rest = eqx.partition(Classifier(key=key1), eqx.is_array)

    def update(state, key):
        weights, opt_state = state
        chosen = jr.randint(key, (BATCH,), 0, len(digits.images))
        batch = jax.tree.map(lambda x: x[chosen], digits)
        of_weights = lambda weights: loss(eqx.combine(weights, rest), batch, backward)
        grads = jax.grad(of_weights)(weights)
        with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
            updates, opt_state = optimizer.update(grads, opt_state)
        return (eqx.apply_updates(weights, updates), opt_state), None

    start = (weights, optimizer.init(weights))
    (weights, _), _ = jax.lax.scan(update, start, jr.split(key2, steps))
    return eqx.combine(weights, rest)


# ---------------------------------------------------------------- how wrong each gradient is


@eqx.filter_jit
def gradient(network, digits, backward):
    """With respect to all weights, as one vector."""
    grads = eqx.filter_grad(loss)(network, digits, backward)
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grads)])


def errors(network, digits, numbers):
    """The relative error of approximate gradients, by the number of VJPs of the cell that their
    linear equation costs."""
    exact = gradient(network, digits, "implicit")
    relative = lambda backward: float(
        jnp.linalg.norm(gradient(network, digits, backward) - exact) / jnp.linalg.norm(exact)
    )
    return {
        "neumann": [relative(solvers.NeumannAdjoint(n)) for n in numbers],
        "phantom": [relative(solvers.PhantomAdjoint(n + 1, 0.5)) for n in numbers],
        "fixed_point": relative("fixed_point"),
        "unrolled": relative("unrolled"),
    }


# ---------------------------------------------------------------- the picture


INK, GRAY, TEAL, RUST, BLUE = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d", "#4a6fa5"
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top"), False),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
}


@matplotlib.rc_context(STYLE)
def draw(accuracies, numbers, wrong):
    """Left: the test accuracy by backward pass. Right: the error of each gradient."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=(1, 1.2))
    names = list(accuracies)[::-1]
    means = [100 * np.mean(accuracies[name]) for name in names]
    colors = [
        TEAL if name in ("implicit", "fixed_point", "unrolled") else RUST for name in names
    ]
    bars.barh(names, means, color=colors, height=0.6)
    for i, (name, mean) in enumerate(zip(names, means, strict=True)):
        bars.scatter(
            100 * np.array(accuracies[name]), [i] * len(accuracies[name]), s=8, color=INK
        )
        bars.text(2, i, f"{mean:.1f} %", va="center", color="white")
    bars.set(title="Test digits right (%), by the backward pass", xlim=(0, 100))
    for name, color in (("neumann", RUST), ("phantom", BLUE)):
        lines.plot(numbers, wrong[name], color=color, marker="o", markersize=3)
        lines.text(numbers[-1], wrong[name][-1], f" {name}", color=color, va="bottom")
    lines.text(0.7, 1.1 * wrong["neumann"][0], "one_step", color=INK, va="bottom")
    lines.axhline(wrong["fixed_point"], color=TEAL, linewidth=1)
    lines.text(
        numbers[-1], wrong["fixed_point"], "fixed_point", color=TEAL, va="bottom", ha="right"
    )
    lines.set(yscale="log", xlabel="VJPs of the cell", title="Relative error of the gradient")
    return figure


# ---------------------------------------------------------------- all of it


def main():
    root = pathlib.Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description="Train an equilibrium model in six ways.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--seeds", type=int, default=2, help="how many (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs" / "images")
    args = parser.parse_args()
    steps, seeds = (5, 1) if args.quick else (STEPS, args.seeds)
    numbers = [0, 2] if args.quick else [0, 1, 2, 4, 8, 16, 32]

    start = time.perf_counter()
    training, test = load()
    accuracies = {}
    networks = {}
    print("backward      test accuracy   seconds")
    for backward in BACKWARD:
        begin = time.perf_counter()
        networks[backward] = [
            train(jnp.array(seed), training, backward, steps) for seed in range(seeds)
        ]
        accuracies[backward] = [float(accuracy(n, test)) for n in networks[backward]]
        seconds = time.perf_counter() - begin
        print(
            f"{backward:<13} {np.mean(accuracies[backward]):13.1%} {seconds:9.1f}", flush=True
        )
    network = networks["implicit"][0]
    wrong = errors(network, jax.tree.map(lambda x: x[:BATCH], test), numbers)
    solution = statistics(network, test)
    print(f"{solution['num_steps'].mean():.0f} steps for a test digit, at most ", end="")
    print(
        f"{solution['num_steps'].max()}; residuals below {solution['residual_norm'].max():.0e}"
    )
    seconds = time.perf_counter() - start

    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "equilibrium-digits.png"
    draw(accuracies, numbers, wrong).savefig(picture, dpi=150)
    print(f"After {seconds:.0f} s. The picture is {picture}.")


if __name__ == "__main__":
    main()
