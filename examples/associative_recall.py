"""Recall values by their keys: where a GRU fails and the delta rule learns.

A sequence lists pairs of a key and a value, all random, and then the keys again in another
order. The model has to name the value of each. A GRU has to keep all pairs in a vector. A
`eqg.nn.GatedDeltaNet` writes them to a matrix, each value under its key, and reads them with
queries. The two have about as many parameters. At the end, the trained model runs one token
at a time, as a model that generates text does: `layer.step` gives the same answers.
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
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from tqdm import trange


PAIRS, KEYS, VALUES = 16, 64, 64  # pairs in a sequence; how many keys and values there are
UNITS, BATCH = 64, 64
STEPS, LEARNING_RATE = 1000, 3e-3
LAYERS = {
    "GRU": lambda key: eqg.nn.GRU(UNITS, UNITS, key=key),
    "Gated DeltaNet": lambda key: eqg.nn.GatedDeltaNet(UNITS, UNITS, heads=2, key=key),
}


class Model(eqx.Module):
    embedding: Float[Array, "tokens units"]
    layer: eqg.nn.GRU | eqg.nn.GatedDeltaNet
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, make, *, key):
        keys = jr.split(key, 3)
        self.embedding = jr.normal(keys[0], (KEYS + VALUES, UNITS))
        self.layer = make(keys[1])
        self.norm = eqx.nn.LayerNorm(UNITS)
        self.head = eqx.nn.Linear(UNITS, VALUES, key=keys[2])

    def read_out(self, x, y):
        return self.head(self.norm(x + y))

    def __call__(self, tokens):
        """The logits of a value after each token of a batch of sequences."""
        x = self.embedding[tokens]
        y, _ = self.layer(x)
        return jax.vmap(jax.vmap(self.read_out))(x, y)

    def step(self, token, state):
        """The logits after one token, and the state for the next."""
        x = self.embedding[token]
        y, state = self.layer.step(x, state)
        return self.read_out(x, y), state


def sequences(key, batch):
    """Tokens, the last `PAIRS` of them queries, and the value of each query."""

    def one(key):
        keys = jr.split(key, 3)
        names = jr.choice(keys[0], KEYS, (PAIRS,), replace=False)
        values = jr.randint(keys[1], (PAIRS,), 0, VALUES)
        order = jr.permutation(keys[2], PAIRS)
        pairs = jnp.stack([names, KEYS + values], 1).reshape(-1)
        return jnp.concatenate([pairs, names[order]]), values[order]

    return jax.vmap(one)(jr.split(key, batch))


def loss(model, tokens, values):
    """The loss at the queries, and how many of the answers are right."""
    logits = model(tokens)[:, -PAIRS:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, values)
    return jnp.mean(losses), jnp.mean(jnp.argmax(logits, -1) == values)


def train(name, steps):
    """The trained model, and the accuracy in each step, on pairs that are always new."""
    model, accuracies = Model(LAYERS[name], key=jr.key(0)), []
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model, state, key):
        of = eqx.filter_value_and_grad(loss, has_aux=True)
        (_, accuracy), grads = of(model, *sequences(key, BATCH))
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, accuracy

    for i in trange(steps, desc=name, leave=False, disable=None):
        model, state, accuracy = update(model, state, jr.key(i + 1))
        accuracies.append(float(accuracy))
    return model, accuracies


@eqx.filter_jit
def answers_in_single_steps(model, tokens):
    """The answers to the queries of one sequence, one token at a time."""

    def step(state, token):
        logits, state = model.step(token, state)
        return state, jnp.argmax(logits)

    _, state = model.step(tokens[0], None)
    _, answers = jax.lax.scan(step, state, tokens[1:])
    return answers[-PAIRS:]


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(accuracies):
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    colors = ("#c8553d", "#00798c")
    for (name, values), color in zip(accuracies.items(), colors, strict=True):
        axes.plot(100 * jnp.array(values), color=color, label=name)
    axes.set(xlabel="training step", ylabel=f"of {PAIRS} values recalled (%)", ylim=(0, 100))
    axes.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Recall values by their keys.")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    tokens, values = sequences(jr.key(0), 256)
    results, accuracies = {}, {}
    for name in LAYERS:
        model, accuracies[name] = train(name, 5 if args.quick else STEPS)
        results[name] = float(eqx.filter_jit(loss)(model, tokens, values)[1])
        print(f"{name}: {100 * results[name]:.1f} % of the values recalled")
        one = answers_in_single_steps(model, tokens[0])
        assert jnp.array_equal(one, jnp.argmax(model(tokens[:1])[0, -PAIRS:], -1))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(results))
    draw(accuracies).savefig(args.out / "associative-recall.png", dpi=150)
    print(f"The picture is in {args.out}.")


if __name__ == "__main__":
    main()
