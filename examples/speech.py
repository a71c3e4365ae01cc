"""Train a spiking network to tell nine speakers apart by how they say two vowels.

The utterances are the Japanese Vowels of Kudo, Toyama and Shimbo (1999): 640 recordings of nine
men, each a sequence of 7 to 29 frames of twelve cepstral coefficients. A layer of recurrently
connected neurons is given the frames, and the prediction is the speaker whose output neuron has
most spikes. With a surrogate derivative of the spikes, both layers are trained; not without.
"""

import argparse
import json
import pathlib
from typing import Any, NamedTuple

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
from sktime.datasets import load_japanese_vowels
from tqdm import trange


# The hyperparameters of a first trial, which was evaluated on the test utterances.
NEURONS, TICKS = 128, 3  # hidden neurons, and time steps for each frame of speech
FRAMES, CEPSTRA, SPEAKERS = 29, 12, 9
GAIN, RATE_GAIN = 3.0, 10.0  # of the input, and of the rates of the output neurons
NOISE = 0.3  # added to the input in training, against overfitting
BATCH, STEPS, SEEDS, LEARNING_RATE = 64, 600, 3, 5e-3
SURROGATES = {"surrogate": eqg.surrogates.superspike(2.0), "plain step": jnp.zeros_like}


class Utterances(NamedTuple):
    frames: Array  # (utterance, frame, coefficient), zero after the end
    lengths: Array
    speakers: Array


def load(split):
    """The utterances that sktime ships, standardized by those for training."""
    read: Any = load_japanese_vowels
    training, _ = read(split="TRAIN", return_type="pd-multiindex")
    table, speakers = read(split=split, return_type="pd-multiindex")
    which, frame = (table.index.get_level_values(i) for i in (0, 1))
    frames = np.zeros((len(speakers), FRAMES, CEPSTRA), "float32")
    frames[which, frame] = (table - training.mean()) / training.std(ddof=0)
    return Utterances(*map(jnp.array, (frames, np.bincount(which), speakers.astype(int) - 1)))


class Network(eqx.Module):
    hidden: eqg.nn.LIF
    output: eqg.nn.LIF

    def __init__(self, name: str, *, key):
        key1, key2 = jr.split(key)
        options = {"surrogate": SURROGATES[name]}
        # A potential decays by these factors in one time step.
        self.hidden = eqg.nn.LIF(CEPSTRA, NEURONS, 0.8, recurrent=True, key=key1, **options)
        self.output = eqg.nn.LIF(NEURONS, SPEAKERS, 0.9, key=key2, **options)

    def __call__(self, frames, lengths):
        """The logits, and the spikes of both layers. None come after the end."""
        inputs = jnp.repeat(GAIN * frames, TICKS, axis=1)
        hidden, _ = self.hidden(inputs, lengths=TICKS * lengths)
        output, _ = self.output(hidden, lengths=TICKS * lengths)
        return RATE_GAIN * output.sum(axis=1) / (TICKS * lengths[:, None]), (hidden, output)


@eqx.filter_jit
def accuracy(network, utterances):
    logits, _ = network(utterances.frames, utterances.lengths)
    return (logits.argmax(axis=1) == utterances.speakers).mean()


def loss(network, frames, lengths, speakers):
    logits, _ = network(frames, lengths)
    return optax.softmax_cross_entropy_with_integer_labels(logits, speakers).mean()


@eqx.filter_jit
def update(network, state, optimizer, key, utterances):
    key1, key2 = jr.split(key)
    which = jr.randint(key1, (BATCH,), 0, len(utterances.lengths))
    frames, lengths, speakers = jax.tree.map(lambda x: x[which], utterances)
    noisy = frames + NOISE * jr.normal(key2, frames.shape)
    grads = eqx.filter_grad(loss)(network, noisy, lengths, speakers)
    updates, state = optimizer.update(grads, state)
    return eqx.apply_updates(network, updates), state


def train(name, seed, optimizer, steps, training, test):
    key1, key2 = jr.split(jr.key(seed))
    network, accuracies = Network(name, key=key1), []
    state = optimizer.init(eqx.filter(network, eqx.is_array))
    for i in trange(steps, desc=f"{name}, seed {seed}", leave=False, disable=None):
        if i % 20 == 0:
            accuracies.append(float(accuracy(network, test)))
        key = jr.fold_in(key2, i)
        network, state = update(network, state, optimizer, key, training)
    return network, [*accuracies, float(accuracy(network, test))]


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(runs, test):
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    rows = ("speech", "hidden", "output")
    panels = figure.subplot_mosaic([["accuracy", row] for row in rows], width_ratios=(1, 2))
    for (name, trained), color in zip(runs.items(), ("#00798c", "#c8553d"), strict=True):
        curves = np.stack([curve for _, curve in trained], axis=1)
        steps = np.linspace(0, STEPS, len(curves))
        panels["accuracy"].plot(steps, curves.mean(axis=1), color=color, label=name)
    panels["accuracy"].set(title="Test accuracy", xlabel="training step", ylim=(0, 1))
    panels["accuracy"].legend(frameon=False)
    _, spikes = runs["surrogate"][0][0](test.frames, test.lengths)
    length = int(test.lengths[0])
    for name, picture in zip(rows, (test.frames, *spikes), strict=True):
        picture = picture[0, : length if name == "speech" else TICKS * length]
        panels[name].imshow(picture.T, cmap="Greys", aspect="auto", interpolation="nearest")
    panels["speech"].set(title="An utterance: cepstral coefficients")
    panels["hidden"].set(title="The spikes of the hidden neurons")
    panels["output"].set(title="The spikes of the output neurons", xlabel="time step")
    return figure


def main():
    parser = argparse.ArgumentParser(description="Tell speakers apart by spikes.")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, seeds = (5, 1) if args.quick else (STEPS, SEEDS)
    training, test = load("TRAIN"), load("TEST")
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    runs, medians = {}, {}
    for name in SURROGATES:
        runs[name] = [train(name, s, optimizer, steps, training, test) for s in range(seeds)]
        medians[name] = float(np.median([curve[-1] for _, curve in runs[name]]))
        print(f"{name}: {medians[name]:.1%} of the test utterances (median of {seeds} seeds)")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(medians))
    picture = args.out / "speech.png"
    draw(runs, test).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
