"""Train a GRU as a character model of English twice, with the same losses and at different
speeds.

Both networks have the same parameters, batches (the text of Python's manual) and loss. One runs
`equinox.nn.GRUCell` in a `jax.lax.scan`, the other runs the same cell as an `eqx_grads.nn.GRU`.
The losses agree up to rounding; time and memory differ. In a long run rounding grows, and the
losses may part: compare the gradients of one step instead.
"""

import argparse
import functools as ft
import json
import pathlib
import statistics
import time
from pydoc_data.topics import topics
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key
from matplotlib.figure import Figure
from tqdm import trange


CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
UNITS = 128
LENGTH = 256  # characters in a sequence
BATCH = 32
STEPS = 150
LEARNING_RATE = 3e-3


class Speller(eqx.Module):
    """Predicts the next character."""

    embedding: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    readout: eqx.nn.Linear

    def __init__(self, *, key: Key[Array, ""]):
        keys = jr.split(key, 3)
        self.embedding = eqx.nn.Embedding(len(CHARACTERS), 64, key=keys[0])
        self.cell = eqx.nn.GRUCell(64, UNITS, key=keys[1])
        self.readout = eqx.nn.Linear(UNITS, len(CHARACTERS), key=keys[2])

    def __call__(self, text: Int[Array, " time"], *, fast: bool) -> Float[Array, "time guess"]:
        xs = self.embedding.weight[text]
        if fast:
            states, _ = eqg.nn.Recurrent(self.cell)(xs)
        else:

            def step(state, x):
                state = self.cell(x, state)
                return state, state

            _, states = jax.lax.scan(step, jnp.zeros(UNITS), xs)
        return jax.vmap(self.readout)(states)


def loss(speller: Speller, text: Int[Array, "batch time"], *, fast: bool) -> Float[Array, ""]:
    logits = jax.vmap(ft.partial(speller, fast=fast))(text[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]))


def make_step(optimizer: optax.GradientTransformation, *, fast: bool) -> Any:
    def step(speller, state, text):
        value, grad = eqx.filter_value_and_grad(loss)(speller, text, fast=fast)
        updates, state = optimizer.update(grad, state)
        return eqx.apply_updates(speller, updates), state, value

    return eqx.filter_jit(step)


def load() -> Int[np.ndarray, " characters"]:
    text = "".join(topics[name] for name in sorted(topics))
    index = {character: i for i, character in enumerate(CHARACTERS)}
    return np.array([index[c] for c in text if c in index], "int32")


def train(steps: int):
    """Train both networks in alternation, so that other load on the machine affects both."""
    text = load()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    speller = Speller(key=jr.key(0))
    state = optimizer.init(eqx.filter(speller, eqx.is_inexact_array))
    window = np.arange(LENGTH + 1)
    rng = np.random.default_rng(0)
    first = jnp.zeros((BATCH, LENGTH + 1), "int32")
    runs = {}
    for name in ("plain", "fast"):
        step = make_step(optimizer, fast=name == "fast").lower(speller, state, first).compile()
        memory = step.compiled.memory_analysis().temp_size_in_bytes
        runs[name] = {"step": step, "memory": memory, "losses": [], "seconds": []}
        runs[name]["at"] = (speller, state)
    for _ in trange(steps, leave=False, disable=None):
        starts = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
        batch = jnp.asarray(text[starts + window])
        for run in runs.values():
            start = time.perf_counter()
            *at, value = run["step"](*run["at"], batch)
            run["at"] = tuple(at)
            run["losses"].append(float(value))
            run["seconds"].append(time.perf_counter() - start)
    return runs


def draw(runs: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(runs["plain"]["losses"], linewidth=3, color="0.75", label="jax.lax.scan")
    axes.plot(runs["fast"]["losses"], linewidth=0.8, color="C1", label="eqg.nn.GRU")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Train a GRU twice: plain, and fast.")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    runs = train(3 if args.quick else STEPS)
    result: dict[str, Any] = {}
    print("               ms per step    temporary MB    last loss")
    for name, run in runs.items():
        milliseconds = 1e3 * statistics.median(run["seconds"])
        megabytes = run["memory"] / 1e6
        print(f"{name:14} {milliseconds:11.2f} {megabytes:15.2f} {run['losses'][-1]:12.6f}")
        result[name] = {"ms": milliseconds, "MB": megabytes, "losses": run["losses"]}
    pairs = zip(runs["plain"]["seconds"], runs["fast"]["seconds"], strict=True)
    result["speed"] = statistics.median(plain / fast for plain, fast in pairs)
    print(f"The fast one is {result['speed']:.2f} times as fast.")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "fast-gru.png"
    draw(runs).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
