"""Claim: `filter_scan(online=True)` differentiates 100,000 steps exactly in the temporary bytes
of 1000 steps, except for the loss of each step and its cotangent.

The peers are plain scan and `checkpoint="sqrt"`, whose gradients are the same, and
`truncate=100`, whose gradient is another one: its error is in the table.

The gradient of the mean squared readout of each step in all parameters, in single precision, a
batch of 8. The variants alternate in one process. "Speed" is the median over rounds of the
ratio to `checkpoint="sqrt"`, "bytes" is the temporary memory of the compiled program, and
"error" is the largest difference from plain scan relative to the largest entry of a leaf.

    python benchmarks/online.py [--quick] [--rounds 5]
"""

import argparse
from collections.abc import Callable

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
from timing import compiled, in_turn, speed


BATCH = 8
VARIANTS = {
    "plain": {},
    "sqrt": {"checkpoint": "sqrt"},
    "truncate=100": {"truncate": 100},
    "online": {"online": True},
}


class Spiking(eqx.Module):
    """Leaky integrate-and-fire neurons without recurrent weights."""

    linear: eqx.nn.Linear
    cell: eqg.nn.LIFCell

    def __init__(self, size, hidden, *, key):
        self.linear = eqx.nn.Linear(size, hidden, key=key)
        self.cell = eqg.nn.LIFCell(hidden, 0.99, learn="beta")

    def init(self):
        return self.cell.initial_state()

    def __call__(self, state, x):
        state = self.cell(self.linear(x), state)
        return state, state.spikes


class Layer(eqx.Module):
    """A step of a layer over time."""

    layer: Callable
    size: int

    def init(self):
        state = jax.eval_shape(lambda: self.layer(jnp.zeros((1, self.size)))[1])
        return jnp.zeros(state.shape, state.dtype)

    def __call__(self, state, x):
        ys, state = self.layer(x[None], state)
        return state, ys[0]


def models(size, hidden):
    key = jr.key(0)
    return {
        "LIF": Spiking(size, hidden, key=key),
        "LRU": Layer(eqg.nn.LRU(size, hidden, hidden, r_min=0.9, key=key), size),
        "MinGRU": Layer(eqg.nn.MinGRU(size, hidden, key=key), size),
    }


def gradient(static, options):
    def loss(arrays, xs):
        model = eqx.combine(arrays, static)

        def step(state, x):
            state, y = jax.vmap(model)(state, x)
            return state, jnp.mean(y**2)

        init = jax.tree.map(lambda x: jnp.broadcast_to(x, (BATCH, *x.shape)), model.init())
        return jnp.mean(eqg.filter_scan(step, init, xs, **options)[1])

    return jax.grad(loss)


def error(got, expected):
    worst = lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
    return max(map(worst, jax.tree.leaves(got), jax.tree.leaves(expected)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    sizes = (4, 8) if args.quick else (16, 32)
    lengths = (50, 200) if args.quick else (1000, 10_000, 100_000)
    print("| model | steps | variant | speed | MB | error |")
    print("|---|---|---|---|---|---|")
    for name, model in models(*sizes).items():
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        for steps in lengths:
            xs = jr.normal(jr.key(1), (steps, BATCH, sizes[0]))
            programs = {
                variant: compiled(gradient(static, options), arrays, xs)
                for variant, options in VARIANTS.items()
            }
            rounds = 1 if args.quick else args.rounds
            times = in_turn({v: p.run for v, p in programs.items()}, rounds)
            expected = programs["plain"].run()
            for variant, program in programs.items():
                print(
                    f"| {name} | {steps} | {variant} | {speed(times, variant, 'sqrt'):.2f} "
                    f"| {program.memory / 1e6:.2f} | {error(program.run(), expected):.0e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
