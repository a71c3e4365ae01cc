"""Train a network that communicates by spikes only on the Yin-Yang data set.

The input is a point of two coordinates, encoded as spike times: a larger coordinate has a later
spike. The hidden layer and the output layer have leaky integrate-and-fire neurons, and the
predicted class is that of the output neuron with most spikes. The derivative of a spike is
zero, so that no layer is trained; with a surrogate derivative, both layers are. For comparison,
the same network is trained with the zero derivative.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from tqdm import trange


# Chosen by the accuracy on the validation points, which are those of the seed 41.
NEURONS = 120  # hidden ones
TICKS = 40
LATEST = 36  # the time step of the spike that encodes a one; a zero is encoded by the first
DECAY = 0.9  # of a potential in one time step
SLOPE = 10.0  # of the surrogate
BATCH = 150
EPOCHS = 100
LEARNING_RATE = 5e-3

# ---------------------------------------------------------------- the data set


RADIUS, DOT = 0.5, 0.1  # of the circle around (0.5, 0.5), and of the dots in it


def which_class(x, y):
    """Yin, yang or dot: 0, 1 or 2."""
    from_left = np.hypot(x - RADIUS / 2, y - RADIUS)
    from_right = np.hypot(x - 3 * RADIUS / 2, y - RADIUS)
    head = from_left <= RADIUS / 2
    body = (y > RADIUS) & (from_right > RADIUS / 2)
    in_dot = (from_left < DOT) | (from_right < DOT)
    return np.where(in_dot, 2, np.where(head | body, 1, 0))


def yin_yang(size, seed):
    """Points and classes, bitwise equal to those of Kriener, Goltz and Petrovici (2022).

    The class is drawn first, and then points until one is of this class.
    """
    rng = np.random.RandomState(seed)
    points, labels = np.empty((size, 2)), np.empty(size, int)
    for i in range(size):
        labels[i] = rng.randint(3)
        while True:
            x, y = points[i] = rng.rand(2) * 2 * RADIUS
            inside = np.hypot(x - RADIUS, y - RADIUS) <= RADIUS
            if inside and which_class(x, y) == labels[i]:
                break
    return jnp.asarray(points, jnp.float32), jnp.asarray(labels)


def encode(point):
    """Spikes of five inputs: both coordinates, one minus each, and a spike at the start."""
    numbers = jnp.concatenate([point, 1 - point, jnp.zeros_like(point[:1])])
    ticks = jnp.round(LATEST * numbers).astype(int)
    return jax.nn.one_hot(ticks, TICKS, axis=0, dtype=point.dtype)


# ---------------------------------------------------------------- the network


def zero(v):
    """The true derivative of a step."""
    return jnp.zeros_like(v)


SURROGATES = {"surrogate": eqg.surrogates.superspike(SLOPE), "zero gradient": zero}


class Network(eqx.Module):
    to_hidden: Float[Array, "inputs neurons"]
    hidden: eqg.nn.Recurrent
    to_output: Float[Array, "neurons classes"]
    output: eqg.nn.Recurrent
    gain: Float[Array, ""]
    bias: Float[Array, " classes"]

    def __init__(self, surrogate: Callable, *, key):
        key1, key2 = jr.split(key)
        layer = lambda size: eqg.nn.Recurrent(
            eqg.nn.LIFCell(size, DECAY, surrogate=surrogate, dtype=jnp.float32)
        )
        # With this mean most neurons have spikes. A neuron without any is not trained.
        self.to_hidden = 0.3 + jr.normal(key1, (5, NEURONS), jnp.float32)
        self.hidden = layer(NEURONS)
        self.to_output = 0.3 * jr.normal(key2, (NEURONS, 3), jnp.float32)
        self.output = layer(3)
        self.gain = jnp.array(0.5, jnp.float32)
        self.bias = jnp.zeros(3, jnp.float32)

    def __call__(self, point):
        """The log-probabilities of the classes of a point."""
        hidden, _ = self.hidden(encode(point) @ self.to_hidden)
        output, _ = self.output(hidden @ self.to_output)
        return jax.nn.log_softmax(self.gain * output.sum(axis=0) + self.bias)


# ---------------------------------------------------------------- training


class Run(NamedTuple):
    network: Network
    accuracies: np.ndarray  # on the training points, during each epoch
    accuracy: float  # on the test points


def loss(network, points, labels):
    log_p = jax.vmap(network)(points)
    value = -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()
    return value, (log_p.argmax(axis=1) == labels).mean()


@eqx.filter_jit
def epoch(network, opt_state, optimizer, key, points, labels):
    """One epoch. Returns the training accuracy as well."""

    arrays, rest = eqx.partition(network, eqx.is_array)

    def update(carry, batch):
        arrays, opt_state = carry
        network = eqx.combine(arrays, rest)
        grads, accuracy = eqx.filter_grad(loss, has_aux=True)(
            network, points[batch], labels[batch]
        )
        updates, opt_state = optimizer.update(grads, opt_state)
        return (eqx.apply_updates(arrays, updates), opt_state), accuracy

    n = len(points) // BATCH
    batches = jr.permutation(key, len(points))[: n * BATCH].reshape(n, BATCH)
    (arrays, opt_state), accuracies = jax.lax.scan(update, (arrays, opt_state), batches)
    return eqx.combine(arrays, rest), opt_state, accuracies.mean()


@eqx.filter_jit
def classify(network, points):
    """In chunks, because a picture has many points."""
    return jax.lax.map(network, points, batch_size=500).argmax(axis=1)


def train(name, seed, optimizer, epochs, training, test):
    key1, key2 = jr.split(jr.key(seed))
    network = Network(SURROGATES[name], key=key1)
    opt_state = optimizer.init(eqx.filter(network, eqx.is_array))
    accuracies = []
    # `disable=None`: no bar where there is no terminal.
    for i in trange(epochs, desc=f"seed {seed}, {name}", leave=False, disable=None):
        key = jr.fold_in(key2, i)
        network, opt_state, accuracy = epoch(network, opt_state, optimizer, key, *training)
        accuracies.append(float(accuracy))
    points, labels = test
    return Run(
        network, np.array(accuracies), float((classify(network, points) == labels).mean())
    )


# ---------------------------------------------------------------- the picture


INK, GRAY, TEAL, RUST, PAPER = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d", "#f3e9dc"
COLORS = {"surrogate": TEAL, "zero gradient": RUST}
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top"), False),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
}


@matplotlib.rc_context(STYLE)
def draw(runs, test):
    """Left: the training accuracies. Right: the predictions of the first networks."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    panels = figure.subplot_mosaic([["accuracy", *SURROGATES]], width_ratios=(1.15, 1, 1))
    for name in SURROGATES:
        draw_accuracies(panels["accuracy"], name, runs[name])
        draw_regions(panels[name], name, runs[name][0], test)
    panels["accuracy"].set(title="Training points right", xlabel="epoch", ylim=(0, 1))
    panels["accuracy"].set_yticks([0, 1 / 3, 1], ["0", "guessing", "all"])
    return figure


def draw_accuracies(panel, name, runs):
    curves = np.stack([run.accuracies for run in runs], axis=1)
    panel.plot(np.arange(1, len(curves) + 1), curves, color=COLORS[name], linewidth=1.3)
    text = f"{name}: {np.median([run.accuracy for run in runs]):.1%} of the test points"
    height = {"surrogate": 0.84, "zero gradient": 0.1}[name]
    panel.text(len(curves), height, text, color=COLORS[name], ha="right")


def draw_regions(panel, name, run, test, pixels=160):
    axis = np.linspace(0, 2 * RADIUS, pixels)
    x, y = np.meshgrid(axis, axis)
    grid = jnp.asarray(np.stack([x.ravel(), y.ravel()], axis=1), jnp.float32)
    inside = np.hypot(x - RADIUS, y - RADIUS) <= RADIUS
    found = np.asarray(classify(run.network, grid)).reshape(x.shape)
    colors = ListedColormap([INK, PAPER, GRAY])
    area = {"extent": (0, 2 * RADIUS, 0, 2 * RADIUS), "origin": "lower"}
    panel.imshow(np.where(inside, found, np.nan), cmap=colors, vmin=0, vmax=2, **area)

    points, labels = map(np.asarray, test)
    wrong = points[np.asarray(classify(run.network, test[0])) != labels]
    panel.plot(*wrong.T, ".", color=COLORS[name], markersize=4)
    text = f"{name}, seed 0: {len(wrong)} of {len(points)} wrong"
    panel.set_title(text, color=COLORS[name])
    panel.set_axis_off()


# ---------------------------------------------------------------- all of it


def main():
    parser = argparse.ArgumentParser(description="Teach a network of spikes yin and yang.")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch")
    parser.add_argument("--seeds", type=int, default=5, help="how many (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    epochs, seeds = (1, 1) if args.quick else (EPOCHS, args.seeds)

    start = time.perf_counter()
    training, test = yin_yang(5000, seed=42), yin_yang(1000, seed=40)
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, epochs * 5000 // BATCH))
    runs = {name: [] for name in SURROGATES}
    print("test accuracy    " + "    ".join(SURROGATES))
    for seed in range(seeds):
        for name in SURROGATES:
            runs[name].append(train(name, seed, optimizer, epochs, training, test))
        print_row(f"seed {seed}", [runs[name][-1].accuracy for name in SURROGATES])
    medians = {name: float(np.median([r.accuracy for r in runs[name]])) for name in SURROGATES}
    seconds = time.perf_counter() - start
    print_row("median", medians.values())

    args.out.mkdir(parents=True, exist_ok=True)
    result = {name.replace(" ", "_"): median for name, median in medians.items()}
    (args.out / "result.json").write_text(json.dumps({**result, "seconds": seconds}))
    picture = args.out / "yin-yang.png"
    draw(runs, test).savefig(picture, dpi=150)
    print(f"After {seconds:.0f} s. The picture is {picture}.")


def print_row(name, accuracies):
    cells = [f"{a:>{len(title)}.1%}" for title, a in zip(SURROGATES, accuracies, strict=True)]
    print(f"{name:<17}" + "    ".join(cells))


if __name__ == "__main__":
    main()
