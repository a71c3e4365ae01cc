"""Vanishing and exploding gradients, and clipping at every step of the backward pass.

A recurrent network is trained to repeat, at each of 1000 steps, its input of three steps
before. With small recurrent weights, the gradient vanishes within some dozens of steps. With
large weights it overflows, and an optimizer that clips afterwards receives NaN. If it is
clipped at every step, it stays finite and the network learns.
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


TICKS, DELAY, NEURONS = 1000, 3, 32
SMALL, LARGE = 0.8, 2.5  # scale of the recurrent weights
MAX_NORM = 0.01  # of the gradient at one step
STEPS, LEARNING_RATE = 150, 5e-3


class Cell(eqx.Module):
    """A layer of recurrently connected neurons."""

    weight: Float[Array, "neurons inputs"]
    recurrent: Float[Array, "neurons neurons"]
    max_norm: float | None = eqx.field(static=True)

    def __init__(self, inputs: int, scale: float, max_norm: float | None, *, key):
        key1, key2 = jr.split(key)
        self.weight = jr.normal(key1, (NEURONS, inputs), jnp.float32) / inputs**0.5
        self.recurrent = scale * jr.normal(key2, (NEURONS, NEURONS), jnp.float32) / NEURONS**0.5
        self.max_norm = max_norm

    def __call__(self, h, x):
        h = jnp.tanh(self.recurrent @ h + self.weight @ x)
        if self.max_norm is not None:
            h = eqg.clip_gradient_norm(h, self.max_norm)
        return h


class Network(eqx.Module):
    first: Cell
    second: Cell
    readout: eqx.nn.Linear

    def __init__(self, scale: float, max_norm: float | None = None, *, key):
        key1, key2, key3 = jr.split(key, 3)
        self.first = Cell(1, scale, max_norm, key=key1)
        self.second = Cell(NEURONS, scale, max_norm, key=key2)
        self.readout = eqx.nn.Linear(NEURONS, 1, dtype=jnp.float32, key=key3)

    def __call__(self, xs):
        def tick(state, x):
            first, second = state
            first = self.first(first, x)
            second = self.second(second, first)
            return (first, second), self.readout(second)

        silence = jnp.zeros(NEURONS, jnp.float32)
        return jax.lax.scan(tick, (silence, silence), xs)[1]


def loss(network, xs, ys):
    return jnp.mean((network(xs) - ys) ** 2)


def loss_at_the_end(network, xs, ys):
    """The loss of the last step, whose gradient at earlier steps is plotted."""
    return jnp.mean((network(xs)[-1] - ys[-1]) ** 2)


def train(network, xs, ys, steps, name):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))

    @eqx.filter_jit
    def update(network, state):
        value, grads = eqx.filter_value_and_grad(loss)(network, xs, ys)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(network, updates), state, value

    state, losses = optimizer.init(eqx.filter(network, eqx.is_array)), []
    for _ in trange(steps, desc=name, leave=False, disable=None):
        network, state, value = update(network, state)
        losses.append(float(value))
    return losses


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(flows, losses):
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplot_mosaic([[title, "loss"] for title in flows], width_ratios=(1.6, 1))
    for title, flow in flows.items():
        eqg.plot_gradient_flow(flow, axes=panels[title], limits=(1e-36, 1e36))
        panels[title].set(title=title)
    for (name, values), color in zip(losses.items(), ("#c8553d", "#00798c"), strict=True):
        panels["loss"].plot(values, ".-", color=color, label=name)  # NaN is not drawn
    panels["loss"].set(title="Training loss with the large weights", xlabel="training step")
    panels["loss"].set(ylim=(0, 1.5 * max(values[0] for values in losses.values())))
    panels["loss"].legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Look at the gradients of recurrent networks.")
    parser.add_argument("--quick", action="store_true", help="few ticks, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    ticks, steps = (50, 3) if args.quick else (TICKS, STEPS)
    key1, key2 = jr.split(jr.key(0))
    xs = jr.normal(key1, (ticks, 1))
    ys = jnp.roll(xs, DELAY, axis=0).at[:DELAY].set(0)
    networks = {
        "Small weights: the gradient of the last step vanishes": Network(SMALL, key=key2),
        "Large weights: it explodes": Network(LARGE, key=key2),
        "Clipped at every step: it stays": Network(LARGE, MAX_NORM, key=key2),
    }
    layers = lambda network: (network.first, network.second)
    flows, norms, losses = {}, {}, {}
    print("The norm of the gradient at the end, half-way and at the start")
    for title, network in networks.items():
        flows[title] = eqg.gradient_flow(loss_at_the_end, network, xs, ys, where=layers)
        first = flows[title]["first"]
        norms[title] = [float(norm) for norm in (first[-1], first[len(first) // 2], first[0])]
        print(f"{title}:", *(f"{norm:.2g}" for norm in norms[title]))
    _, large, clipped = networks.values()
    for name, network in {"By the optimizer": large, "At every step, too": clipped}.items():
        losses[name] = train(network, xs, ys, steps, name)
        first, *_, last = losses[name]
        print(f"Clipped: {name.lower()}: the loss goes from {first:.2f} to {last:.2f}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps({"norms": norms, "losses": losses}))
    picture = args.out / "gradient-flow.png"
    draw(flows, losses).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
