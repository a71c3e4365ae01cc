"""Vanishing and exploding gradients, and clipping at every step of the backward pass.

A recurrent network is trained to repeat, at each of 1000 steps, its input of three steps
before. The gradient shrinks or grows at every step of the backward pass. With small recurrent
weights it vanishes within some dozens of steps. With large weights it overflows, and an
optimizer that clips afterwards receives NaN. If it is clipped at every step, it stays finite
and the network learns.
"""

import argparse
import pathlib
import time

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


TICKS = 1000
DELAY = 3
NEURONS = 32
SMALL, LARGE = 0.8, 2.5  # scale of the recurrent weights
MAX_NORM = 0.01  # of the gradient at one step
STEPS = 150
LEARNING_RATE = 5e-3

# ---------------------------------------------------------------- the network


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


# ---------------------------------------------------------------- training


def make_task(ticks, *, key):
    heard = jr.normal(key, (ticks, 1), jnp.float32)
    return heard, jnp.roll(heard, DELAY, axis=0).at[:DELAY].set(0)


def loss(network, xs, ys):
    return jnp.mean((network(xs) - ys) ** 2)


def loss_at_the_end(network, xs, ys):
    """The loss of the last step, whose gradient at earlier steps is plotted."""
    return jnp.mean((network(xs)[-1] - ys[-1]) ** 2)


@eqx.filter_jit
def train(network, xs, ys, optimizer, steps):
    """Train the network, and return the loss at every training step."""
    weights, rest = eqx.partition(network, eqx.is_array)

    def update(state, _):
        weights, opt_state = state
        of_weights = lambda weights: loss(eqx.combine(weights, rest), xs, ys)
        value, grads = jax.value_and_grad(of_weights)(weights)
        with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
            updates, opt_state = optimizer.update(grads, opt_state)
        return (eqx.apply_updates(weights, updates), opt_state), value

    start = (weights, optimizer.init(weights))
    return jax.lax.scan(update, start, None, length=steps)[1]


# ---------------------------------------------------------------- the picture


INK, GRAY, TEAL, RUST = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d"
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
}


@matplotlib.rc_context(STYLE)
def draw(flows, losses):
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplot_mosaic([[title, "loss"] for title in flows], width_ratios=(1.6, 1))
    for title, flow in flows.items():
        eqg.plot_gradient_flow(flow, axes=panels[title], limits=(1e-36, 1e36))
        panels[title].set(title=title)
    draw_losses(panels["loss"], losses)
    return figure


def draw_losses(panel, losses):
    for (name, values), color in zip(losses.items(), (RUST, TEAL), strict=True):
        finite = values[np.isfinite(values)]
        if len(finite) < len(values):
            name = f"{name}: NaN"
            panel.plot(len(finite) - 1, finite[-1], "x", color=color)
        panel.plot(finite, color=color, label=name)
    panel.spines[["right", "top"]].set_visible(False)
    panel.set(title="Training loss with the large weights", xlabel="training step")
    panel.set(ylim=(0, 1.5 * max(values[0] for values in losses.values())))
    panel.legend(frameon=False, loc="upper left")


# ---------------------------------------------------------------- all of it


def main():
    root = pathlib.Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description="Look at the gradients of recurrent networks.")
    parser.add_argument("--quick", action="store_true", help="few ticks, a few steps")
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs" / "images")
    args = parser.parse_args()
    ticks, steps = (50, 3) if args.quick else (TICKS, STEPS)

    start = time.perf_counter()
    key1, key2 = jr.split(jr.key(0))
    xs, ys = make_task(ticks, key=key1)
    networks = {
        f"Small weights: the gradient of step {ticks} vanishes": Network(SMALL, key=key2),
        "Large weights: it explodes": Network(LARGE, key=key2),
        "Clipped at every step: it stays": Network(LARGE, MAX_NORM, key=key2),
    }
    layers = lambda network: (network.first, network.second)
    flows = {
        title: eqg.gradient_flow(loss_at_the_end, network, xs, ys, where=layers)
        for title, network in networks.items()
    }
    print("norm of the gradient      at the end   half-way   at the start")
    for title, flow in flows.items():
        first = flow["first"]
        norms = (first[-1], first[len(first) // 2], first[0])
        print(
            f"{title.split(':')[0]:<24} " + " ".join(f"{float(norm):11.2g}" for norm in norms)
        )

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    _, large, clipped = networks.values()
    losses = {
        "Clipped by the optimizer only": np.asarray(train(large, xs, ys, optimizer, steps)),
        "Clipped at every step, too": np.asarray(train(clipped, xs, ys, optimizer, steps)),
    }
    for name, values in losses.items():
        print(f"{name}: the loss goes from {values[0]:.2f} to {values[-1]:.2f}")

    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "gradient-flow.png"
    draw(flows, losses).savefig(picture, dpi=150)
    print(f"The picture is {picture}, after {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
