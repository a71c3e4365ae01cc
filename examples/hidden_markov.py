"""Train hidden Markov models of speech, with a gradient for the counts of Baum and Welch.

The utterances are the Japanese Vowels of Kudo, Toyama and Shimbo (1999): nine men say two
vowels, 640 times, in 7 to 29 frames of twelve cepstral coefficients. Each speaker is a
left-right model: five states, which are visited in order, each with a Gaussian of the frames. A
step to an earlier state is impossible, and its log probability is minus infinity.

The derivative of the log likelihood with respect to a log transition probability is the
expected number of such transitions, given the utterance; with respect to the log density of a
frame in a state, it is the probability of the state. So the expectation step of Baum and Welch
is one call of `jax.grad`, if minus infinity does not turn it into NaN, as it does with
`jax.nn.logsumexp`.
"""

import argparse
import importlib.util
import json
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure


STATES = 5  # as in the paper of 1999, in which they reach 96.2 % with Gaussians
FRAMES, CEPSTRA, SPEAKERS = 29, 12, 9
ITERATIONS = 12
LEAST_VARIANCE = 0.02  # of a standardized coefficient
SHOWN = 3  # the speaker in the picture

# ---------------------------------------------------------------- the utterances


class Utterances(NamedTuple):
    frames: Float[Array, "utterance frame coefficient"]  # zero after the end
    lengths: Int[Array, " utterance"]
    speakers: Int[Array, " utterance"]


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
    return jnp.pad(jnp.asarray(frames, float), ((0, FRAMES - len(frames)), (0, 0)))


# ---------------------------------------------------------------- the model


class Model(NamedTuple):
    """A left-right model of each speaker."""

    log_transitions: Float[Array, "*speaker state state"]
    means: Float[Array, "*speaker state coefficient"]
    variances: Float[Array, "*speaker state coefficient"]


def log_densities(model, frames):
    """Of each frame in each state, `(frame, state)`."""
    z = (frames[:, None] - model.means[None]) ** 2 / model.variances[None]
    return -0.5 * jnp.sum(z + jnp.log(2 * jnp.pi * model.variances)[None], axis=-1)


def log_likelihood(log_transitions, densities, length, logsumexp):
    """The forward algorithm: a matrix product for each frame, in the semiring of logarithms."""

    def step(log_p, inputs):
        index, density = inputs
        moved = logsumexp(log_p[:, None] + log_transitions, axis=0) + density
        return jnp.where(index < length, moved, log_p), None

    # The first state comes first.
    log_p = jnp.where(jnp.arange(STATES) == 0, densities[0], -jnp.inf)
    steps = jnp.arange(1, len(densities)), densities[1:]
    log_p, _ = jax.lax.scan(step, log_p, steps)
    return logsumexp(log_p, axis=0)


class Expected(NamedTuple):
    log_likelihood: Float[Array, "*batch"]
    transitions: Float[Array, "*batch state state"]  # how often each happened
    states: Float[Array, "*batch frame state"]  # the probability of each


def expect(model, frames, length, logsumexp: Callable = eqg.safe.logsumexp):
    """The expectation step, for one utterance: a gradient."""
    value_and_grad = jax.value_and_grad(log_likelihood, argnums=(0, 1))
    densities = log_densities(model, frames)
    value, counts = value_and_grad(model.log_transitions, densities, length, logsumexp)
    return Expected(value, *counts)


# ---------------------------------------------------------------- Baum and Welch


def first_guess(training):
    """Each utterance is cut into equal parts, one for each state."""
    index = jnp.arange(FRAMES)[None]
    length = training.lengths[:, None]
    state = jnp.minimum(STATES * index // length, STATES - 1)
    states = jnp.where((index < length)[..., None], jax.nn.one_hot(state, STATES), 0.0)
    i = jnp.arange(STATES)
    possible = (i[None] == i[:, None]) | (i[None] == i[:, None] + 1)
    transitions = jnp.where(possible, 1.0, 0.0)
    transitions = jnp.broadcast_to(transitions, (len(training.lengths), STATES, STATES))
    return maximize(training, Expected(jnp.zeros(len(length)), transitions, states))


def maximize(training, expected):
    """The maximization step: the model of each speaker whose counts are the expected ones."""
    spoken_by = jax.nn.one_hot(training.speakers, SPEAKERS)
    counts = jnp.einsum("us,uij->sij", spoken_by, expected.transitions)
    log_transitions = jnp.log(counts / counts.sum(-1, keepdims=True))
    weights = jnp.einsum("us,uti->suti", spoken_by, expected.states)
    total = weights.sum((1, 2))[..., None]
    means = jnp.einsum("suti,utc->sic", weights, training.frames) / total
    squares = jnp.einsum("suti,utc->sic", weights, training.frames**2) / total
    variances = jnp.maximum(squares - means**2, LEAST_VARIANCE)
    return Model(log_transitions, means, variances)


@jax.jit
def iterate(model, training):
    own = jax.tree.map(lambda x: x[training.speakers], model)
    expected = jax.vmap(expect)(own, training.frames, training.lengths)
    return maximize(training, expected), expected.log_likelihood.mean()


@jax.jit
def accuracy(model, utterances):
    def likelihood(model, frames, length):
        densities = log_densities(model, frames)
        return log_likelihood(model.log_transitions, densities, length, eqg.safe.logsumexp)

    of_speakers = jax.vmap(likelihood, (0, None, None))
    scores = jax.vmap(of_speakers, (None, 0, 0))(model, utterances.frames, utterances.lengths)
    return jnp.mean(scores.argmax(1) == utterances.speakers)


def train(training, test, iterations):
    model = first_guess(training)
    accuracies, likelihoods = [float(accuracy(model, test))], []
    for _ in range(iterations):
        model, likelihood = iterate(model, training)
        accuracies.append(float(accuracy(model, test)))
        likelihoods.append(float(likelihood))
    return model, accuracies, likelihoods


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
def draw(frames, ours, plain, accuracies):
    """An utterance; the probabilities of its states and the counts, which are gradients."""
    figure = Figure(figsize=(12.5, 6), layout="constrained")
    panels = figure.subplot_mosaic(
        [
            ["speech", "safe", "plain"],
            ["states", "safe", "plain"],
            ["states", *2 * ["training"]],
        ],
        width_ratios=(1.5, 1, 1),
        height_ratios=(3, 0.7, 1.6),
    )
    panels["speech"].imshow(frames.T, cmap="Greys", aspect="auto", vmin=-2, vmax=2)
    panels["speech"].set(title="An utterance: cepstral coefficients", xticks=[], yticks=[])
    for state, color in enumerate(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, STATES))):
        panels["states"].plot(ours.states[: len(frames), state], color=color, linewidth=1.6)
        at = int(ours.states[: len(frames), state].argmax())
        panels["states"].text(at, 1.04, str(state + 1), color=color, ha="center")
    panels["states"].set(
        title="Gradient by the densities:\nthe probability of each state\n",
        xlabel="frame",
        xlim=(-0.5, len(frames) - 0.5),
        yticks=[0, 1],
    )
    draw_counts(panels["safe"], ours.transitions, "safe.logsumexp", TEAL)
    draw_counts(panels["plain"], plain.transitions, "jax.nn.logsumexp", RUST)
    panels["training"].plot(accuracies, color=TEAL)
    panels["training"].set(
        title="Test accuracy", xlabel="iteration of Baum and Welch", ylim=(0.95, 1)
    )
    text = f"{accuracies[-1]:.1%}"
    panels["training"].text(len(accuracies) - 1, accuracies[-1] + 0.004, text, color=TEAL)
    return figure


def draw_counts(panel, counts, name, color):
    panel.imshow(np.nan_to_num(counts), cmap="Blues", aspect="auto", vmin=0, vmax=6)
    for (i, j), count in np.ndenumerate(counts):
        # An impossible transition is left blank.
        text = "NaN" if np.isnan(count) else (f"{count:.1f}" if count > 0 else "")
        shade = color if np.isnan(count) else (INK if count < 4 else "white")
        panel.text(j, i, text, ha="center", va="center", color=shade, fontsize=8)
    labels = [str(i + 1) for i in range(STATES)]
    panel.set_xticks(range(STATES), labels)
    panel.set_yticks(range(STATES), labels)
    total = f"{counts.sum():.5f}" if np.isfinite(counts.sum()) else "NaN"
    panel.set(
        title=f"Expected transitions with\n{name}: sum {total}", xlabel="to", ylabel="from"
    )


# ---------------------------------------------------------------- all of it


def main():
    parser = argparse.ArgumentParser(description="Hidden Markov models of speakers.")
    parser.add_argument("--quick", action="store_true", help="two iterations")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    start = time.perf_counter()

    training, test = load()
    model, accuracies, likelihoods = train(training, test, 2 if args.quick else ITERATIONS)
    print(f"Log likelihood of an utterance: {likelihoods[0]:.1f} -> {likelihoods[-1]:.1f}")
    print(f"Test accuracy: {accuracies[0]:.1%} -> {accuracies[-1]:.1%}")

    shown = int(jnp.argmax(test.speakers == SHOWN))
    own = jax.tree.map(lambda x: x[SHOWN], model)
    length = int(test.lengths[shown])
    ours, plain = (
        jax.tree.map(np.asarray, expect(own, test.frames[shown], length, logsumexp))
        for logsumexp in (eqg.safe.logsumexp, jax.nn.logsumexp)
    )
    print(f"{length} frames, {ours.transitions.sum():.5f} expected transitions")
    print(f"With `jax.nn.logsumexp`: {plain.transitions.sum()}")

    args.out.mkdir(parents=True, exist_ok=True)
    result = {
        "accuracy": accuracies[-1],
        "likelihoods": likelihoods,
        "frames": length,
        "transitions": float(ours.transitions.sum()),
        "plain": float(plain.transitions.sum()),
    }
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "hidden-markov.png"
    frames = np.asarray(test.frames[shown, :length])
    draw(frames, ours, plain, accuracies).savefig(picture, dpi=150)
    print(f"After {time.perf_counter() - start:.0f} s. The picture is {picture}.")


if __name__ == "__main__":
    main()
