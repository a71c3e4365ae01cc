"""Train a character model of English whose weights have four bits.

The model is two layers of `eqg.nn.MinGRU` between an embedding and a head, trained on the text
of Python's manual. It is trained three times: in single precision; with all matrices rounded to
four bits, with the straight-through derivative of `eqg.nn.FakeQuantize`; and with the same
rounding and its own derivative, which is zero. The loss never has all logits in memory.
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
STEPS, LEARNING_RATE = 500, 3e-3
# `nn.quantize_model` replaces linear layers and convolutions. Here, the loss quantizes all
# matrices, those of the recurrent layers too.
four_bits = eqg.nn.FakeQuantize(bits=4, channel_axis=0)  # a scale for each row of a matrix
QUANTIZERS = {
    "float": lambda weight: weight,
    "4 bits, straight-through": four_bits,
    "4 bits, without": lambda weight: jax.lax.stop_gradient(four_bits(weight)),
}


class Model(eqx.Module):
    embedding: Float[Array, "characters units"]
    layers: list[eqg.nn.MinGRU]
    norms: list[eqx.nn.LayerNorm]  # one before each layer
    last_norm: eqx.nn.LayerNorm
    head: Float[Array, "characters units"]

    def __init__(self, *, key):
        key, _, *layer_keys = jr.split(key, 4)
        shape = (len(CHARACTERS), UNITS)
        self.embedding, self.head = jr.normal(key, shape), jnp.zeros(shape)
        self.layers = [eqg.nn.MinGRU(UNITS, UNITS, key=key) for key in layer_keys]
        self.norms = [eqx.nn.LayerNorm(UNITS) for _ in self.layers]
        self.last_norm = eqx.nn.LayerNorm(UNITS)

    def __call__(self, text):
        """The loss of predicting each next character of a batch of texts, in bits."""
        x = self.embedding[text[:, :-1]]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            outputs, _ = layer(jax.vmap(jax.vmap(norm))(x))
            x = x + outputs
        x = jax.vmap(jax.vmap(self.last_norm))(x)
        loss = eqg.losses.linear_cross_entropy(x, self.head, text[:, 1:])
        return loss / math.log(2)


def loss(model, text, name):
    """The loss of the model with quantized matrices, to be differentiated by the float ones."""
    quantize, is_matrix = QUANTIZERS[name], lambda x: eqx.is_inexact_array(x) and x.ndim == 2
    quantized = jax.tree.map(lambda x: quantize(x) if is_matrix(x) else x, model)
    return quantized(text)


def load():
    """The training text, and a tenth of the manual to test on."""
    text = "".join(topics[name] for name in sorted(topics))
    numbers = np.array([CHARACTERS.index(c) for c in text if c in CHARACTERS], "int32")
    return np.split(numbers, [9 * len(numbers) // 10])


def train(name, training, test, steps):
    """Train with one of `QUANTIZERS`: the losses, and bits per character of the test text."""
    model, losses = Model(key=jr.key(0)), []
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model, state, text):
        value, grads = eqx.filter_value_and_grad(loss)(model, text, name)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    rng = np.random.default_rng(0)
    for _ in trange(steps, desc=name, leave=False, disable=None):
        starts = rng.integers(len(training) - LENGTH, size=(BATCH, 1))
        model, state, value = update(model, state, training[starts + np.arange(LENGTH + 1)])
        losses.append(float(value))
    n = len(test) // (LENGTH + 1)
    text = test[: n * (LENGTH + 1)].reshape(n, LENGTH + 1)
    return losses, float(eqx.filter_jit(loss)(model, jnp.asarray(text), name))


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(losses, bits):
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), color in zip(
        losses.items(), ("#c4c4c4", "#00798c", "#c8553d"), strict=True
    ):
        smooth = np.convolve(values, np.ones(10) / 10, mode="valid")
        axes.plot(smooth, color=color, label=f"{name}: {bits[name]:.2f} on the test text")
    axes.set(xlabel="training step", title="Bits per character", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Train a character model of four bits.")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    training, test = load()
    losses, bits = {}, {}
    for name in QUANTIZERS:
        steps = 20 if args.quick else STEPS
        losses[name], bits[name] = train(name, training, test, steps)
        print(f"{name}: {bits[name]:.3f} bits per character of the test text")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(bits))
    picture = args.out / "character-model.png"
    draw(losses, bits).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
