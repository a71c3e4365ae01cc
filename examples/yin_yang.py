"""Train a network that communicates by spikes only on the Yin-Yang data set.

The input is a point of two coordinates, encoded as spike times: a larger coordinate has a later
spike. Both layers have leaky integrate-and-fire neurons, and the output neuron with most spikes
is the predicted class. The derivative of a spike is zero, so that no layer is trained; with a
surrogate derivative, both are. For comparison, the same network is trained without.
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
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from tqdm import trange


# Chosen by the accuracy on the validation points, which are those of the seed 41.
NEURONS, DECAY = 120, 0.9  # DECAY: of a potential in one time step
TICKS, LATEST = 40, 36  # of the spike that encodes a one; that of a zero is the first
BATCH, EPOCHS, SEEDS, LEARNING_RATE = 150, 100, 3, 5e-3
SURROGATES = {"surrogate": eqg.surrogates.superspike(10.0), "zero gradient": jnp.zeros_like}
COLORS = ("#00798c", "#c8553d")
RADIUS, DOT = 0.5, 0.1  # of the circle around (0.5, 0.5), and of the dots in it


def which_class(x, y):  # yin, yang or dot: 0, 1 or 2
    from_left = np.hypot(x - RADIUS / 2, y - RADIUS)
    from_right = np.hypot(x - 3 * RADIUS / 2, y - RADIUS)
    yang = (from_left <= RADIUS / 2) | ((y > RADIUS) & (from_right > RADIUS / 2))
    return np.where((from_left < DOT) | (from_right < DOT), 2, np.where(yang, 1, 0))


def yin_yang(size, seed):
    """The points and classes of Kriener, Goltz and Petrovici (2022), bitwise."""
    rng = np.random.RandomState(seed)
    points, labels = np.empty((size, 2)), np.empty(size, int)
    for i in range(size):
        labels[i] = rng.randint(3)
        x = y = 2.0
        while np.hypot(x - RADIUS, y - RADIUS) > RADIUS or which_class(x, y) != labels[i]:
            x, y = points[i] = rng.rand(2) * 2 * RADIUS
    return jnp.asarray(points, jnp.float32), jnp.asarray(labels)


class Network(eqx.Module):
    to_hidden: Float[Array, "inputs neurons"]
    to_output: Float[Array, "neurons classes"]
    layers: list[eqg.nn.Recurrent]
    gain: Float[Array, ""]
    bias: Float[Array, " classes"]

    def __init__(self, name: str, *, key):
        key1, key2 = jr.split(key)
        # With this mean most neurons have spikes. A neuron without any is not trained.
        self.to_hidden = 0.3 + jr.normal(key1, (5, NEURONS))
        self.to_output = 0.3 * jr.normal(key2, (NEURONS, 3))
        cell = lambda size: eqg.nn.LIFCell(size, DECAY, surrogate=SURROGATES[name])
        self.layers = [eqg.nn.Recurrent(cell(NEURONS)), eqg.nn.Recurrent(cell(3))]
        self.gain, self.bias = jnp.array(0.5), jnp.zeros(3)

    def __call__(self, point):
        # Five inputs have a spike each: both coordinates, one minus each, and one at the start.
        numbers = jnp.concatenate([point, 1 - point, jnp.zeros(1)])
        spikes = jax.nn.one_hot(jnp.round(LATEST * numbers).astype(int), TICKS, axis=0)
        hidden, _ = self.layers[0](spikes @ self.to_hidden)
        output, _ = self.layers[1](hidden @ self.to_output)
        return self.gain * output.sum(axis=0) + self.bias


def loss(network, points, labels):
    logits = jax.vmap(network)(points)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return value, (logits.argmax(axis=1) == labels).mean()


@eqx.filter_jit
def epoch(network, state, optimizer, key, points, labels):
    arrays, rest = eqx.partition(network, eqx.is_array)
    grad = jax.grad(lambda arrays, *args: loss(eqx.combine(arrays, rest), *args), has_aux=True)

    def update(carry, batch):
        grads, accuracy = grad(carry[0], points[batch], labels[batch])
        updates, state = optimizer.update(grads, carry[1])
        return (eqx.apply_updates(carry[0], updates), state), accuracy

    n = len(points) // BATCH
    batches = jr.permutation(key, len(points))[: n * BATCH].reshape(n, BATCH)
    (arrays, state), accuracies = jax.lax.scan(update, (arrays, state), batches)
    return eqx.combine(arrays, rest), state, accuracies.mean()


def train(name, seed, optimizer, epochs, training):
    key1, key2 = jr.split(jr.key(seed))
    network, accuracies = Network(name, key=key1), np.zeros(epochs)
    state = optimizer.init(eqx.filter(network, eqx.is_array))
    for i in trange(epochs, desc=f"{name}, seed {seed}", leave=False, disable=None):
        key = jr.fold_in(key2, i)
        network, state, accuracies[i] = epoch(network, state, optimizer, key, *training)
    return network, accuracies


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(runs, medians):
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    left, *right = figure.subplots(1, 3, width_ratios=(1.15, 1, 1))
    x, y = np.meshgrid(*2 * [np.linspace(0, 2 * RADIUS, 160)])
    grid = jnp.asarray(np.stack([x.ravel(), y.ravel()], axis=1), jnp.float32)
    inside = np.hypot(x - RADIUS, y - RADIUS) <= RADIUS
    for panel, (name, trained), color in zip(right, runs.items(), COLORS, strict=True):
        label = f"{name}: {medians[name]:.1%} of the test points"
        left.plot(np.mean([curve for _, curve in trained], axis=0), color=color, label=label)
        found = jax.lax.map(trained[0][0], grid, batch_size=500).argmax(axis=1)
        panel.imshow(np.where(inside, found.reshape(x.shape), np.nan), origin="lower")
        panel.set(title=f"Predictions, {name}", xticks=[], yticks=[])
    left.set(title="Training points right", xlabel="epoch", ylim=(0, 1))
    left.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Teach a network of spikes yin and yang.")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    epochs, seeds = (1, 1) if args.quick else (EPOCHS, SEEDS)
    training, test = yin_yang(5000, seed=42), yin_yang(1000, seed=40)
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, epochs * 5000 // BATCH))
    runs, medians = {}, {}
    for name in SURROGATES:
        runs[name] = [train(name, s, optimizer, epochs, training) for s in range(seeds)]
        medians[name] = float(np.median([loss(run[0], *test)[1] for run in runs[name]]))
        print(f"{name}: {medians[name]:.1%} of the test points (median of {seeds} seeds)")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(medians))
    picture = args.out / "yin-yang.png"
    draw(runs, medians).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
