"""Train a character model of English with the delta rule, and let it continue a text.

The model is two layers of `eqg.nn.GatedDeltaNet` between an embedding and a head, trained on
the text of Python's manual. Training reads all steps of a text at once, in chunks. To continue
a text, the model reads a prompt at once, and then its own output one character at a time:
`layer.step` takes the state that the prompt left. A character takes as long after a long text
as after a short one.
"""

import argparse
import json
import math
import pathlib
from pydoc_data.topics import topics

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


CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
UNITS, BATCH, LENGTH = 128, 16, 128  # LENGTH: characters in a sequence
STEPS, LEARNING_RATE = 400, 3e-3
PROMPT, MORE, TEMPERATURE = "The value of the ", 240, 0.5


class Model(eqx.Module):
    embedding: Float[Array, "characters units"]
    layers: list[eqg.nn.GatedDeltaNet]
    norms: list[eqx.nn.LayerNorm]  # one before each layer
    last_norm: eqx.nn.LayerNorm
    head: Float[Array, "characters units"]

    def __init__(self, *, key):
        key, *keys = jr.split(key, 3)
        shape = (len(CHARACTERS), UNITS)
        self.embedding, self.head = jr.normal(key, shape), jnp.zeros(shape)
        self.layers = [eqg.nn.GatedDeltaNet(UNITS, UNITS, key=key) for key in keys]
        self.norms = [eqx.nn.LayerNorm(UNITS) for _ in self.layers]
        self.last_norm = eqx.nn.LayerNorm(UNITS)

    def __call__(self, text):
        """The features of the last layer for each character of one text, and all states."""
        x, states = self.embedding[text], []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, state = layer(jax.vmap(norm)(x))
            x, states = x + y, [*states, state]
        return jax.vmap(self.last_norm)(x), states

    def step(self, character, states):
        """The logits of the character after this one, and the states for the next."""
        x, new = self.embedding[character], []
        for norm, layer, state in zip(self.norms, self.layers, states, strict=True):
            y, state = layer.step(norm(x), state)
            x, new = x + y, [*new, state]
        return self.head @ self.last_norm(x), new


def loss(model, texts):
    """The loss of predicting each next character of a batch of texts, in bits."""
    features, _ = jax.vmap(model)(texts[:, :-1])
    return eqg.losses.linear_cross_entropy(features, model.head, texts[:, 1:]) / math.log(2)


@eqx.filter_jit
def continued(model, prompt, *, key):
    """`MORE` characters after a prompt, drawn one at a time."""
    features, states = model(prompt)

    def step(carry, key):
        logits, states = carry
        character = jr.categorical(key, logits / TEMPERATURE)
        return model.step(character, states), character

    return jax.lax.scan(step, (model.head @ features[-1], states), jr.split(key, MORE))[1]


def load():
    """The training text, and a tenth of the manual to test on."""
    text = "".join(topics[name] for name in sorted(topics))
    return np.split(numbers_of(text), [9 * len(text) // 10])


def numbers_of(text):
    return np.array([CHARACTERS.index(c) for c in text if c in CHARACTERS], "int32")


def train(training, steps):
    model, losses = Model(key=jr.key(0)), []
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model, state, texts):
        value, grads = eqx.filter_value_and_grad(loss)(model, texts)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    rng = np.random.default_rng(0)
    for _ in trange(steps, leave=False, disable=None):
        starts = rng.integers(len(training) - LENGTH, size=(BATCH, 1))
        model, state, value = update(model, state, training[starts + np.arange(LENGTH + 1)])
        losses.append(float(value))
    return model, losses


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(losses):
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, color="#00798c")
    axes.set(xlabel="training step", title="Bits per character", ylim=(0, None))
    return figure


def main():
    parser = argparse.ArgumentParser(description="Train a character model, and let it write.")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    training, test = load()
    model, losses = train(training, 3 if args.quick else STEPS)
    n = len(test) // (LENGTH + 1)
    texts = jnp.asarray(test[: n * (LENGTH + 1)].reshape(n, LENGTH + 1))
    bits = float(eqx.filter_jit(loss)(model, texts[:64]))
    print(f"{bits:.2f} bits per character of the test text")
    more = continued(model, numbers_of(PROMPT), key=jr.key(1))
    print(PROMPT + "".join(CHARACTERS[i] for i in more))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps({"bits": bits, "characters": len(more)}))
    draw(losses).savefig(args.out / "continue-text.png", dpi=150)
    print(f"The picture is in {args.out}.")


if __name__ == "__main__":
    main()
