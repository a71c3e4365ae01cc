"""Train hidden Markov models of speech, with a gradient for the counts of Baum and Welch.

The utterances are the Japanese Vowels of Kudo, Toyama and Shimbo (1999): nine men say two
vowels. Each is a left-right model: five states, visited in order, each with a Gaussian of the
frames. A step to an earlier state has the log probability minus infinity. The derivatives of
the log likelihood with respect to these log probabilities are the expected numbers of steps,
if minus infinity does not turn them into NaN, as it does with `jax.nn.logsumexp`.
"""

import argparse
import json
import pathlib
from typing import Any, NamedTuple

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from sktime.datasets import load_japanese_vowels
from tqdm import trange


STATES = 5  # as in the paper of 1999, in which they reach 96.2 % with Gaussians
FRAMES, CEPSTRA, ITERATIONS, SHOWN = 29, 12, 12, 3  # SHOWN: the speaker in the picture


class Utterances(NamedTuple):
    frames: Float[Array, "utterance frame coefficient"]  # zero after the end
    lengths: Int[Array, " utterance"]
    speakers: Int[Array, " utterance"]


def load(split):
    """The utterances that sktime ships, standardized by those for training."""
    read: Any = load_japanese_vowels
    training, _ = read(split="TRAIN", return_type="pd-multiindex")
    table, speakers = read(split=split, return_type="pd-multiindex")
    which, frame = (table.index.get_level_values(i) for i in (0, 1))
    frames = np.zeros((len(speakers), FRAMES, CEPSTRA), "float32")
    frames[which, frame] = (table - training.mean()) / training.std(ddof=0)
    return Utterances(*map(jnp.array, (frames, np.bincount(which), speakers.astype(int) - 1)))


class Model(NamedTuple):
    log_transitions: Float[Array, "*speaker state state"]
    means: Float[Array, "*speaker state coefficient"]
    variances: Float[Array, "*speaker state coefficient"]


def log_likelihood(log_transitions, densities, length, logsumexp):
    """The forward algorithm: a matrix product for each frame, in the semiring of logarithms."""

    def step(log_p, inputs):
        moved = logsumexp(log_p[:, None] + log_transitions, axis=0) + inputs[1]
        return jnp.where(inputs[0] < length, moved, log_p), None

    log_p = jnp.where(jnp.arange(STATES) == 0, densities[0], -jnp.inf)
    log_p, _ = jax.lax.scan(step, log_p, (jnp.arange(1, len(densities)), densities[1:]))
    return logsumexp(log_p, axis=0)


def expect(model, frames, length, logsumexp=eqg.safe.logsumexp):
    """The log likelihood, how often each transition happened, the probability of each state."""
    z = (frames[:, None] - model.means[None]) ** 2 / model.variances[None]
    densities = -jnp.sum(z + jnp.log(2 * jnp.pi * model.variances)[None], axis=-1) / 2
    value_and_grad = jax.value_and_grad(log_likelihood, argnums=(0, 1))
    return value_and_grad(model.log_transitions, densities, length, logsumexp)


def first_guess(training):
    """Each utterance is cut into equal parts, one for each state."""
    index, length = jnp.arange(FRAMES)[None], training.lengths[:, None]
    state = jnp.minimum(STATES * index // length, STATES - 1)
    states = jnp.where((index < length)[..., None], jax.nn.one_hot(state, STATES), 0.0)
    possible = jnp.eye(STATES) + jnp.eye(STATES, k=1)
    return maximize(training, jnp.tile(possible, (len(length), 1, 1)), states)


def maximize(training, transitions, states):
    """The model of each speaker whose counts are these."""
    spoken_by = jax.nn.one_hot(training.speakers, 9)
    counts = jnp.einsum("us,uij->sij", spoken_by, transitions)
    weights = jnp.einsum("us,uti->suti", spoken_by, states)
    weights = weights / weights.sum((1, 2), keepdims=True)
    means = jnp.einsum("suti,utc->sic", weights, training.frames)
    squares = jnp.einsum("suti,utc->sic", weights, training.frames**2)
    variances = jnp.maximum(squares - means**2, 0.02)
    return Model(jnp.log(counts / counts.sum(-1, keepdims=True)), means, variances)


@jax.jit
def iterate(model, training):
    own = jax.tree.map(lambda x: x[training.speakers], model)
    values, counts = jax.vmap(expect)(own, training.frames, training.lengths)
    return maximize(training, *counts), values.mean()


@jax.jit
def accuracy(model, utterances):
    of_speakers = jax.vmap(lambda *args: expect(*args)[0], (0, None, None))
    scores = jax.vmap(of_speakers, (None, 0, 0))(model, utterances.frames, utterances.lengths)
    return jnp.mean(scores.argmax(1) == utterances.speakers)


def draw(safe, plain, length, accuracies):
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    states, *both, right = figure.subplots(1, 4)
    states.plot(safe[1][:length])
    states.set(title="The probability of each state", xlabel="frame")
    for panel, counts, name in zip(both, (safe[0], plain[0]), ("safe", "jax.nn"), strict=True):
        panel.imshow(jnp.nan_to_num(counts), cmap="Blues")
        title = f"Expected transitions,\n{name}.logsumexp: sum {counts.sum():.5f}"
        panel.set(title=title, xlabel="to state", ylabel="from state")
    right.plot(accuracies)
    right.set(title="Test accuracy", xlabel="iteration of Baum and Welch", ylim=(0.95, 1))
    return figure


def main():
    parser = argparse.ArgumentParser(description="Hidden Markov models of speakers.")
    parser.add_argument("--quick", action="store_true", help="two iterations")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    training, test = load("TRAIN"), load("TEST")
    model, likelihoods = first_guess(training), []
    accuracies = [float(accuracy(model, test))]
    for _ in trange(2 if args.quick else ITERATIONS, leave=False, disable=None):
        model, likelihood = iterate(model, training)
        likelihoods.append(float(likelihood))
        accuracies.append(float(accuracy(model, test)))
    print(f"Log likelihood of an utterance: {likelihoods[0]:.1f} -> {likelihoods[-1]:.1f}")
    print(f"Test accuracy: {accuracies[0]:.1%} -> {accuracies[-1]:.1%}")
    shown = int(jnp.argmax(test.speakers == SHOWN))
    own, length = jax.tree.map(lambda x: x[SHOWN], model), int(test.lengths[shown])
    safe = expect(own, test.frames[shown], length)[1]
    plain = expect(own, test.frames[shown], length, jax.nn.logsumexp)[1]
    sums = {"transitions": float(safe[0].sum()), "plain": float(plain[0].sum())}
    print(f"Of {length} frames, the expected transitions and those with `jax.nn`: {sums}")
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"accuracy": accuracies[-1], "likelihoods": likelihoods, "frames": length, **sums}
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "hidden-markov.png"
    draw(safe, plain, length, accuracies).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
