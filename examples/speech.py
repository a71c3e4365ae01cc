"""Train a spiking network to tell nine speakers apart by how they say two vowels.

The utterances are the Japanese Vowels of Kudo, Toyama and Shimbo (1999): 640 recordings of nine
men, each a sequence of 7 to 29 frames of twelve cepstral coefficients. A layer of recurrently
connected neurons is given the frames, and the prediction is the speaker whose output neuron, of
nine, has most spikes. The derivative of a spike is zero, so that no layer is trained; with a
surrogate derivative, both are. For comparison, the same network is trained with the zero
derivative.
"""

import argparse
import importlib.util
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
from jaxtyping import Array
from matplotlib.figure import Figure
from tqdm import trange


# The hyperparameters of a first trial, which was evaluated on the test utterances. None was
# tuned after that.
NEURONS = 128  # hidden ones
TICKS = 3  # time steps for each frame of speech
FRAMES, CEPSTRA, SPEAKERS = 29, 12, 9
DECAY, OUTPUT_DECAY = 0.8, 0.9  # of a potential in one time step
SLOPE = 2.0  # of the surrogate
GAIN = 3.0  # of the input
RATE_GAIN = 10.0  # of the rates of the output neurons
NOISE = 0.3  # added to the input in training, against overfitting
BATCH = 64
STEPS = 600
LEARNING_RATE = 5e-3

# ---------------------------------------------------------------- the utterances


class Utterances(NamedTuple):
    frames: Array  # (utterance, frame, coefficient), zero after the end
    lengths: Array
    speakers: Array


def load():
    """The training and the test utterances, standardized by the former."""
    training, test = read("TRAIN"), read("TEST")
    spoken = np.concatenate(training[0])
    mean, scale = spoken.mean(0), spoken.std(0)
    return tuple(
        Utterances(
            jnp.stack([pad((frames - mean) / scale) for frames in utterances]),
            jnp.array([len(frames) for frames in utterances]),
            jnp.array(speakers),
        )
        for utterances, speakers in (training, test)
    )


def read(part):
    """The frames and the speaker of each utterance, from the file that sktime ships.

    A line has the coefficients over time, one after another, and then the speaker.
    """
    spec = importlib.util.find_spec("sktime")
    if spec is None or spec.origin is None:
        raise ImportError("The utterances come with sktime: `pip install sktime`.")
    folder = pathlib.Path(spec.origin).parent / "datasets/data/JapaneseVowels"
    _, lines = (folder / f"JapaneseVowels_{part}.ts").read_text().split("@data\n")
    utterances, speakers = [], []
    for line in lines.splitlines():
        *coefficients, speaker = line.split(":")
        numbers = [np.fromstring(c, sep=",", dtype="float32") for c in coefficients]
        utterances.append(np.stack(numbers, axis=1))
        speakers.append(int(speaker) - 1)
    return utterances, speakers


def pad(frames):
    return jnp.pad(jnp.asarray(frames), ((0, FRAMES - len(frames)), (0, 0)))


# ---------------------------------------------------------------- the network


def zero(v):
    """The true derivative of a step."""
    return jnp.zeros_like(v)


SURROGATES = {"surrogate": eqg.surrogates.superspike(SLOPE), "plain step": zero}


class Network(eqx.Module):
    hidden: eqg.nn.RLIF
    output: eqg.nn.LIF

    def __init__(self, surrogate: Callable, *, key):
        key1, key2 = jr.split(key)
        options = {"surrogate": surrogate, "dtype": "float32"}
        self.hidden = eqg.nn.RLIF(CEPSTRA, NEURONS, DECAY, key=key1, **options)
        self.output = eqg.nn.LIF(NEURONS, SPEAKERS, OUTPUT_DECAY, key=key2, **options)

    def __call__(self, frames, lengths):
        """The spikes of both layers, `(utterance, tick, neuron)`. None come after the end."""
        inputs = jnp.repeat(GAIN * frames, TICKS, axis=1)
        hidden, _ = self.hidden(inputs, lengths=TICKS * lengths)
        output, _ = self.output(hidden, lengths=TICKS * lengths)
        return hidden, output

    def logits(self, frames, lengths):
        _, output = self(frames, lengths)
        rates = output.sum(axis=1) / (TICKS * lengths[:, None]).astype(output.dtype)
        return RATE_GAIN * rates


# ---------------------------------------------------------------- training


class Run(NamedTuple):
    network: Network
    accuracies: np.ndarray  # on the test utterances, during training
    accuracy: float  # after it


def loss(network, frames, lengths, speakers):
    log_p = jax.nn.log_softmax(network.logits(frames, lengths))
    return -jnp.take_along_axis(log_p, speakers[:, None], axis=1).mean()


@eqx.filter_jit
def accuracy(network, utterances):
    guesses = network.logits(utterances.frames, utterances.lengths).argmax(axis=1)
    return (guesses == utterances.speakers).mean()


@eqx.filter_jit
def update(network, opt_state, optimizer, key, utterances):
    key1, key2 = jr.split(key)
    which = jr.randint(key1, (BATCH,), 0, len(utterances.lengths))
    frames, lengths, speakers = jax.tree.map(lambda x: x[which], utterances)
    noisy = frames + NOISE * jr.normal(key2, frames.shape, frames.dtype)
    grads = eqx.filter_grad(loss)(network, noisy, lengths, speakers)
    with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
        updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(network, updates), opt_state


def train(name, seed, optimizer, steps, training, test):
    key1, key2 = jr.split(jr.key(seed))
    network = Network(SURROGATES[name], key=key1)
    opt_state = optimizer.init(eqx.filter(network, eqx.is_array))
    accuracies = []
    # `disable=None`: no bar where there is no terminal.
    for i in trange(steps, desc=f"seed {seed}, {name}", leave=False, disable=None):
        if i % 20 == 0:
            accuracies.append(float(accuracy(network, test)))
        network, opt_state = update(
            network, opt_state, optimizer, jr.fold_in(key2, i), training
        )
    accuracies.append(float(accuracy(network, test)))
    return Run(network, np.array(accuracies), accuracies[-1])


# ---------------------------------------------------------------- the picture


INK, GRAY, TEAL, RUST = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d"
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top"), False),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
}


@matplotlib.rc_context(STYLE)
def draw(runs, training, test):
    """Left: accuracies. Right: one utterance of each speaker, and the spikes of the network."""
    figure = Figure(figsize=(12.5, 6.6), layout="constrained")
    panels = figure.subplot_mosaic(
        [["accuracy", "speech"], ["accuracy", "hidden"], ["accuracy", "output"]],
        width_ratios=(1, 3.4),
        height_ratios=(1, 4.2, 1.3),
    )
    draw_accuracies(panels["accuracy"], runs)
    network = runs["surrogate"][0].network
    first = [int(np.argmax(test.speakers == speaker)) for speaker in range(SPEAKERS)]
    utterances = jax.tree.map(lambda x: x[jnp.array(first)], test)
    draw_spikes(panels, network, utterances, preferences(network, training))
    return figure


def draw_accuracies(panel, runs):
    for name, color in (("surrogate", TEAL), ("plain step", RUST)):
        curves = np.stack([run.accuracies for run in runs[name]])
        steps = np.linspace(0, STEPS, curves.shape[1])
        panel.plot(steps, curves.T, color=color, linewidth=1.2)
        median = np.median([run.accuracy for run in runs[name]])
        text = f"{name}: {median:.1%}"
        below = curves[:, -1].min() - 0.05 if name == "surrogate" else 0.15
        panel.text(STEPS, below, text, color=color, ha="right")
    panel.set(title="Test accuracy", xlabel="training step", ylim=(0, 1))


def preferences(network, utterances):
    """For each hidden neuron, by how much it fires more for a speaker than for all of them."""
    hidden, _ = network(utterances.frames, utterances.lengths)
    counts = np.asarray(hidden.sum(axis=1) / utterances.lengths[:, None])
    who = np.asarray(utterances.speakers)
    rates = np.stack([counts[who == speaker].mean(0) for speaker in range(SPEAKERS)], axis=1)
    return (rates - rates.mean(1, keepdims=True)) / (rates.std(1, keepdims=True) + 0.05)


def draw_spikes(panels, network, utterances, preferred):
    hidden, output = map(np.asarray, network(utterances.frames, utterances.lengths))
    order = np.lexsort((-preferred.max(1), preferred.argmax(1)))
    owner = preferred.argmax(1)[order]
    ends = np.cumsum(TICKS * np.asarray(utterances.lengths) + TICKS)  # a gap after each
    starts = ends - TICKS * np.asarray(utterances.lengths) - TICKS
    for speaker, start in enumerate(starts):
        length = int(utterances.lengths[speaker])
        frames = np.asarray(utterances.frames[speaker, :length])
        extent = (start, start + TICKS * length, CEPSTRA - 0.5, -0.5)
        panels["speech"].imshow(
            frames.T, cmap="Greys", aspect="auto", extent=extent, vmin=-2, vmax=2
        )
        for name, spikes, owners in (
            ("hidden", hidden[speaker][:, order], owner),
            ("output", output[speaker], np.arange(SPEAKERS)),
        ):
            ticks, neurons = np.nonzero(spikes[: TICKS * length])
            right = owners[neurons] == speaker
            other = INK if name == "hidden" else RUST
            size = 1.6 if name == "hidden" else 9
            colors = np.where(right, TEAL, other)
            panels[name].scatter(
                start + ticks + 0.5, neurons, size, colors, marker="|", linewidths=0.9
            )
    panels["speech"].set_title("Speech: twelve cepstral coefficients of nine utterances")
    panels["hidden"].set_title(
        f"{NEURONS} hidden neurons, sorted by the speaker for whom they fire most "
        "(colored: while he speaks)"
    )
    panels["output"].set_title("Output neurons, one for each speaker")
    for name, rows in (("speech", CEPSTRA), ("hidden", NEURONS), ("output", SPEAKERS)):
        panels[name].set(xlim=(0, ends[-1]), ylim=(rows - 0.3, -0.7), xticks=[], yticks=[])
    borders = np.flatnonzero(np.diff(owner)) + 0.5
    panels["hidden"].hlines(borders, 0, ends[-1], GRAY, linewidth=0.4)
    middles = (starts + ends - TICKS) / 2
    panels["output"].set_xticks(middles, [f"speaker {i + 1}" for i in range(SPEAKERS)])
    panels["output"].set_yticks(range(SPEAKERS), [str(i + 1) for i in range(SPEAKERS)])


# ---------------------------------------------------------------- all of it


def main():
    parser = argparse.ArgumentParser(description="Tell speakers apart by spikes.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--seeds", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (5, 1) if args.quick else (STEPS, args.seeds)

    start = time.perf_counter()
    training, test = load()
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    runs = {name: [] for name in SURROGATES}
    print("test accuracy    " + "    ".join(SURROGATES))
    for seed in range(seeds):
        for name in SURROGATES:
            runs[name].append(train(name, seed, optimizer, steps, training, test))
        print_row(f"seed {seed}", [runs[name][-1].accuracy for name in SURROGATES])
    medians = {n: float(np.median([r.accuracy for r in rs])) for n, rs in runs.items()}
    print_row("median", medians.values())
    seconds = time.perf_counter() - start

    args.out.mkdir(parents=True, exist_ok=True)
    result = {name.replace(" ", "_"): median for name, median in medians.items()}
    (args.out / "result.json").write_text(json.dumps({**result, "seconds": seconds}))
    picture = args.out / "speech.png"
    draw(runs, training, test).savefig(picture, dpi=150)
    print(f"After {seconds:.0f} s. The picture is {picture}.")


def print_row(name, accuracies):
    cells = [f"{a:>{len(title)}.1%}" for title, a in zip(SURROGATES, accuracies, strict=True)]
    print(f"{name:<17}" + "    ".join(cells))


if __name__ == "__main__":
    main()
