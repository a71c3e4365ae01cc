"""Train a spiking network to classify handwritten digits.

The neurons are leaky integrate-and-fire neurons. Their spike is a step function of the membrane
potential, whose derivative is zero almost everywhere. `spike` is the same step with a surrogate
derivative. For comparison, the same network is trained with the plain step.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

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
NEURONS = 200  # hidden ones
TICKS_PER_ROW = 4  # a digit has 8 rows of 8 pixels, and the input for so many time steps
DECAY = 0.8  # of a potential in one time step
NOISE = 0.2  # added to the pixels in training, against overfitting
BATCH = 64
STEPS = 840  # 40 epochs
LEARNING_RATE = 5e-3

# ---------------------------------------------------------------- the network


def step(v):
    """One above the threshold, zero elsewhere."""
    return (v > 0).astype(v.dtype)


def bump(out, v):
    """The surrogate derivative, with its maximum at the threshold."""
    return 1 / (1 + 2 * jnp.abs(v)) ** 2


spike = eqg.elementwise(step, bump)


class Neurons(eqx.Module):
    """A layer of recurrently connected leaky integrate-and-fire neurons."""

    weight: Float[Array, "neurons inputs"]
    recurrent: Float[Array, "neurons neurons"]
    fire: Callable

    def __init__(self, inputs: int, neurons: int, fire: Callable, *, key):
        key1, key2 = jr.split(key)
        self.weight = jr.normal(key1, (neurons, inputs), jnp.float32) / inputs**0.5
        self.recurrent = 0.5 * jr.normal(key2, (neurons, neurons), jnp.float32) / neurons**0.5
        self.fire = fire

    def at_rest(self):
        zero = jnp.zeros_like(self.weight[:, 0])
        return zero, zero

    def __call__(self, state, inputs):
        potential, spikes = state
        current = self.weight @ inputs + self.recurrent @ spikes
        potential = DECAY * potential + current - spikes  # a spike subtracts the threshold
        return potential, self.fire(potential - 1)


class Network(eqx.Module):
    """A layer of hidden neurons, and one output neuron for each digit.

    The readout uses spikes of the output neurons only. A readout of the hidden neurons would
    not need their derivatives: with the plain step its accuracy is some 80 %.
    """

    hidden: Neurons
    output: Neurons
    gain: Float[Array, ""]
    bias: Float[Array, " 10"]

    def __init__(self, fire: Callable, *, key):
        key1, key2 = jr.split(key)
        self.hidden = Neurons(8, NEURONS, fire, key=key1)
        self.output = Neurons(NEURONS, 10, fire, key=key2)
        self.gain = jnp.array(0.5, jnp.float32)
        self.bias = jnp.zeros(10, jnp.float32)

    def __call__(self, image):
        """The spikes of the hidden and of the output neurons at every time step."""

        def tick(state, row):
            hidden = self.hidden(state[0], row)
            output = self.output(state[1], hidden[1])
            return (hidden, output), (hidden[1], output[1])

        at_rest = (self.hidden.at_rest(), self.output.at_rest())
        _, spikes = jax.lax.scan(tick, at_rest, jnp.repeat(image, TICKS_PER_ROW, axis=0))
        return spikes

    @eqg.custom_vjp
    def readout(self, counts):
        """The log-probabilities of the digits, from the spike counts of the output neurons."""
        return jax.nn.log_softmax(self.gain * counts + self.bias)

    @readout.def_fwd
    def _readout_fwd(self, counts):
        log_p = self.readout(counts)
        return log_p, (self, counts, log_p)

    @readout.def_bwd
    def _readout_bwd(residuals: Any, ct):
        self, counts, log_p = residuals
        ct_logits = ct - jnp.exp(log_p) * ct.sum()  # of log_p[i]: one-hot minus p
        ct_self = eqg.tangents.of(self, gain=ct_logits @ counts, bias=ct_logits)
        return ct_self, self.gain * ct_logits

    def log_probabilities(self, image):
        _, output = self(image)
        return self.readout(output.sum(axis=0))


# ---------------------------------------------------------------- training


class Run(NamedTuple):
    network: Network
    losses: np.ndarray
    accuracy: float  # on the test digits


def load():
    """The training digits and the test digits."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    return (images, labels), (test_images, test_labels)


def loss(network, images, labels):
    log_p = jax.vmap(network.log_probabilities)(images)
    return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()


@eqx.filter_jit
def accuracy(network, images, labels):
    log_p = jax.vmap(network.log_probabilities)(images)
    return (log_p.argmax(axis=1) == labels).mean()


@eqx.filter_jit
def update(network, opt_state, optimizer, key, images, labels):
    key1, key2 = jr.split(key)
    batch = jr.randint(key1, (BATCH,), 0, len(images))
    noisy = images[batch] + NOISE * jr.normal(key2, (BATCH, 8, 8), images.dtype)
    value, grads = eqx.filter_value_and_grad(loss)(network, noisy, labels[batch])
    with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
        updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(network, updates), opt_state, value


def train(fire, seed, optimizer, steps, training, test):
    key1, key2 = jr.split(jr.key(seed))
    network = Network(fire, key=key1)
    opt_state = optimizer.init(eqx.filter(network, eqx.is_array))
    losses = []
    name = f"seed {seed}, {'spike' if fire is spike else 'plain step'}"
    # `disable=None`: no bar where there is no terminal.
    for i in trange(steps, desc=name, leave=False, disable=None):
        key = jr.fold_in(key2, i)
        network, opt_state, value = update(network, opt_state, optimizer, key, *training)
        losses.append(float(value))
    return Run(network, np.array(losses), float(accuracy(network, *test)))


# ---------------------------------------------------------------- the picture


INK, GRAY, TEAL, RUST = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d"
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top"), False),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
}


@matplotlib.rc_context(STYLE)
def draw(spiking, plain, image, label):
    """Left: the training losses. Right: the spikes of the first network for one digit."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    panels = figure.subplot_mosaic(
        [["loss", "rows", "digit"], ["loss", "hidden", "digit"], ["loss", "output", "p"]],
        width_ratios=(1.1, 1.5, 0.34),
        height_ratios=(1, 2.4, 1.3),
    )
    draw_losses(panels["loss"], "plain step", RUST, plain)
    draw_losses(panels["loss"], "spike", TEAL, spiking)
    draw_digit(panels, spiking[0].network, np.asarray(image), int(label))
    return figure


def draw_losses(panel, name, color, runs):
    n = 1 + len(runs[0].losses) // 20
    smooth = [np.convolve(run.losses, np.full(n, 1 / n), mode="valid") for run in runs]
    steps = np.arange(n, n + len(smooth[0]))
    panel.plot(steps, np.stack(smooth, axis=1), color=color, linewidth=1.3)
    text = f"{name}: {np.median([run.accuracy for run in runs]):.0%} of the test digits right"
    panel.text(steps[-1], smooth[0][-1] + 0.35, text, color=color, ha="right")
    panel.set(title="Training loss (nats)", xlabel="training step", ylim=(0, None))


def draw_digit(panels, network, image, label):
    hidden, output = map(np.asarray, network(image))
    p = np.exp(network.readout(output.sum(axis=0)))
    colors = [TEAL if digit == label else INK for digit in range(10)]
    ticks = np.arange(len(hidden))
    fired = hidden[:, hidden.any(axis=0)]
    fired = fired[:, np.argsort(ticks @ fired / fired.sum(axis=0), kind="stable")]

    for name, title in (
        ("digit", f"A digit: {label}"),
        ("rows", "What goes in: its rows, one after another"),
        ("hidden", f"Hidden neurons: {fired.shape[1]} of {NEURONS} fire, sorted by time"),
        ("output", "Output neurons"),
        ("p", "Probability"),
    ):
        panels[name].set(title=title, xticks=[], yticks=[])
    panels["digit"].imshow(image, cmap="Greys")
    panels["digit"].set(anchor="N")
    panels["digit"].spines[:].set_visible(True)
    # A row is drawn as a column, because the horizontal axis is time.
    ends = (-0.5, len(ticks) - 0.5)
    panels["rows"].imshow(image.T, cmap="Greys", aspect="auto", extent=(*ends, 7.5, -0.5))
    draw_spikes(panels["hidden"], fired, INK)
    draw_spikes(panels["output"], output, colors)
    panels["p"].barh(range(10), p, color=colors)
    panels["p"].set(xlim=(0, 1), xticks=(0, 1), ylim=panels["output"].get_ylim())

    starts = ticks[::TICKS_PER_ROW]
    for name in ("rows", "hidden", "output"):
        panels[name].vlines(starts[1:] - 0.5, *panels[name].get_ylim(), GRAY, linewidth=0.5)
        panels[name].set(xlim=ends)
    middles = starts + (TICKS_PER_ROW - 1) / 2
    panels["output"].set_xticks(middles, [f"row {i}" for i in range(1, 9)])
    panels["output"].set_yticks(range(10))


def draw_spikes(panel, spikes, color):
    times = [np.flatnonzero(neuron) for neuron in spikes.T]
    panel.eventplot(times, colors=color, linewidths=4, linelengths=0.75)
    panel.set(ylim=(len(times) - 0.3, -0.7))


# ---------------------------------------------------------------- all of it


def main():
    parser = argparse.ArgumentParser(description="Teach a spiking network to read digits.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--seeds", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (5, 1) if args.quick else (STEPS, args.seeds)

    start = time.perf_counter()
    training, test = load()
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    spiking, plain = [], []
    print("test accuracy    spike    plain step")
    for seed in range(seeds):
        spiking.append(train(spike, seed, optimizer, steps, training, test))
        plain.append(train(step, seed, optimizer, steps, training, test))
        print(f"seed {seed:<9}  {spiking[-1].accuracy:7.1%}    {plain[-1].accuracy:10.1%}")
    medians = [float(np.median([run.accuracy for run in runs])) for runs in (spiking, plain)]
    seconds = time.perf_counter() - start
    print(f"median          {medians[0]:7.1%}    {medians[1]:10.1%}    in {seconds:.0f} s")

    args.out.mkdir(parents=True, exist_ok=True)
    result = {"spike": medians[0], "plain_step": medians[1], "seconds": seconds}
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "spiking-digits.png"
    draw(spiking, plain, test[0][0], test[1][0]).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
