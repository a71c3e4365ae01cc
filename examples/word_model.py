"""Train a language model over words of Python's manual twice, with the same losses and in
different memory.

Both models have the same parameters and batches: an embedding, a GRU, and a head that has the
weight of the embedding. One computes the logits of all words of the batch, the other calls
`eqx_grads.losses.linear_cross_entropy`, which has the logits of one chunk at a time. The losses
agree up to rounding; memory and time differ.
"""

import argparse
import collections
import functools as ft
import json
import pathlib
import re
import statistics
import time
from pydoc_data.topics import topics
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from matplotlib.figure import Figure
from tqdm import trange


FEATURES, UNKNOWN = 128, 0
BATCH, LENGTH, STEPS, LEARNING_RATE = 32, 64, 100, 3e-3  # LENGTH: words in a sequence


class WordModel(eqx.Module):
    """Predicts the next word. The embedding and the head have one weight."""

    ends: eqx.nn.Shared
    gru: eqg.nn.GRU

    def __init__(self, vocabulary: int, *, key: Key[Array, ""]):
        keys = jr.split(key, 3)
        embedding = eqx.nn.Embedding(vocabulary, FEATURES, key=keys[0])
        head = eqx.nn.Linear(FEATURES, vocabulary, key=keys[1])
        # The weight of the head is drawn for a head: an embedding begins with larger numbers.
        embedding = eqx.tree_at(lambda e: e.weight, embedding, head.weight)
        weights = (lambda ends: ends[1].weight, lambda ends: ends[0].weight)
        self.ends = eqx.nn.Shared((embedding, head), *weights)
        self.gru = eqg.nn.GRU(FEATURES, FEATURES, key=keys[2])

    def features(self, words: Int[Array, "*batch time"]):
        embedding, _ = self.ends()
        return self.gru(FEATURES**0.5 * embedding.weight[words])[0]


def chunked_loss(model: WordModel, words: Int[Array, "batch time"]) -> Float[Array, ""]:
    features, (_, head) = model.features(words[:, :-1]), model.ends()
    loss = ft.partial(eqg.losses.linear_cross_entropy, ignore_index=UNKNOWN)
    return loss(features, head.weight, words[:, 1:], bias=head.bias)


def plain_loss(model: WordModel, words: Int[Array, "batch time"]) -> Float[Array, ""]:
    _, head = model.ends()
    logits = model.features(words[:, :-1]) @ head.weight.T + head.bias
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:])
    return jnp.mean(losses, where=words[:, 1:] != UNKNOWN)


def load() -> tuple[list[str], Int[np.ndarray, " words"]]:
    """The words that occur more than once; the first word replaces all others."""
    text = "\n".join(topics[name] for name in sorted(topics))
    words = re.findall(r"[A-Za-z_]+|[0-9]+|[^\sA-Za-z_0-9]", text)
    counts = collections.Counter(words)
    vocabulary = ["?", *sorted(word for word, count in counts.items() if count > 1)]
    index = {word: i for i, word in enumerate(vocabulary)}
    return vocabulary, np.array([index.get(word, UNKNOWN) for word in words], "int32")


def train(model: WordModel, text: Int[np.ndarray, " words"], steps: int):
    """Train both models in alternation, so that other load on the machine affects both."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def update(loss, model, state, words):
        value, grad = eqx.filter_value_and_grad(loss)(model, words)
        updates, state = optimizer.update(grad, state)
        return eqx.apply_updates(model, updates), state, value

    step: Any = eqx.filter_jit(update)
    first = jnp.zeros((BATCH, LENGTH + 1), "int32")
    runs = {}
    for name, loss in (("all logits", plain_loss), ("in chunks", chunked_loss)):
        compiled = step.lower(loss, model, state, first).compile()
        memory = compiled.compiled.memory_analysis().temp_size_in_bytes
        runs[name] = {"step": ft.partial(compiled, loss), "memory": memory}
        runs[name] |= {"at": (model, state), "losses": [], "seconds": []}
    rng = np.random.default_rng(0)
    for _ in trange(steps, leave=False, disable=None):
        starts = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
        batch = jnp.asarray(text[starts + np.arange(LENGTH + 1)])
        for run in runs.values():
            start = time.perf_counter()
            *at, value = run["step"](*run["at"], batch)
            run["at"] = tuple(at)
            run["losses"].append(float(value))
            run["seconds"].append(time.perf_counter() - start)
    return runs


def draw(runs: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    left.plot(runs["all logits"]["losses"], linewidth=3, color="0.75", label="all logits")
    left.plot(runs["in chunks"]["losses"], linewidth=0.8, color="C1", label="in chunks")
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    megabytes = [run["memory"] / 1e6 for run in runs.values()]
    right.bar(list(runs), megabytes, color=["0.75", "C1"])
    right.set(ylabel="temporary memory of a step (MB)")
    return figure


def main():
    parser = argparse.ArgumentParser(description="Train a model over words twice.")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    vocabulary, text = load()
    print(f"{len(text)} words, of a vocabulary of {len(vocabulary)}")
    model = WordModel(len(vocabulary), key=jr.key(0))
    runs = train(model, text, 2 if args.quick else STEPS)
    result: dict[str, Any] = {"vocabulary": len(vocabulary)}
    for name, run in runs.items():
        milliseconds, megabytes = 1e3 * statistics.median(run["seconds"]), run["memory"] / 1e6
        print(
            f"{name}: {milliseconds:.1f} ms per step, {megabytes:.1f} MB temporary memory, ",
            end="",
        )
        print(f"last loss {run['losses'][-1]:.6f}")
        result[name] = {"ms": milliseconds, "MB": megabytes, "losses": run["losses"]}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "word-model.png"
    draw(runs).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
