"""Claim: from 8 steps of 8 units on, the recurrent layers train 0.96 to 2.94 times as fast as
plain scan, at the measured shapes.

The layers run at 47 shapes from 8 steps of one sequence with 4 units to 256 steps of 128
sequences with 512 units. `docs/benchmarks.md` has the number of shapes that were measured, the
ranges and the exception.

Value and gradient of a sum over all outputs, with respect to all parameters, in single
precision, on one thread. The speed is the median over alternating rounds of the ratio to
`jax.lax.scan` in the same round, in CPU time, which leaves out the time of other processes.

    python benchmarks/sizes.py [--quick] [--layers GRU LSTM]
"""

import argparse
import functools as ft
import os
import statistics


FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

import equinox as eqx  # noqa: E402
import eqx_grads as eqg  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax.random as jr  # noqa: E402
from timing import busy_time  # noqa: E402


# T, B, H, I
SHAPES = [
    *[(8, 1, 4, 2), (8, 1, 16, 8), (8, 16, 16, 8), (8, 64, 32, 16), (8, 256, 64, 32)],
    *[(16, 4, 8, 4), (16, 1, 64, 32), (16, 32, 32, 16), (16, 128, 64, 64), (16, 16, 128, 64)],
    *[(32, 1, 8, 4), (32, 8, 16, 8), (32, 32, 64, 32), (32, 64, 128, 64), (32, 256, 16, 16)],
    *[(50, 256, 16, 16), (50, 1, 32, 8), (50, 32, 96, 48), (64, 64, 48, 1), (64, 128, 32, 8)],
    *[(64, 16, 96, 32), (64, 1, 64, 64), (64, 8, 256, 128), (100, 1, 16, 4), (100, 1, 64, 64)],
    *[(100, 32, 20, 10), (100, 16, 128, 64), (100, 128, 64, 32), (128, 1, 32, 16)],
    *[(128, 32, 64, 32), (128, 32, 128, 64), (128, 4, 96, 32), (200, 64, 32, 4)],
    *[(256, 1, 16, 8), (256, 8, 48, 24), (256, 32, 128, 32), (256, 128, 512, 256)],
    *[(300, 16, 40, 20), (365, 64, 20, 5), (512, 1, 64, 32), (512, 32, 256, 128)],
    *[(512, 64, 16, 8), (1000, 1, 8, 4), (1000, 4, 32, 16), (1024, 1, 128, 128)],
    *[(2000, 1, 16, 1), (2048, 8, 64, 32)],
]
LAYERS = {
    "GRU": eqx.nn.GRUCell,
    "LSTM": eqx.nn.LSTMCell,
    "RNN": eqg.nn.RNNCell,
}


class Program:
    """A compiled program with its arguments, and its temporary bytes."""

    def __init__(self, fn, args):
        start = busy_time()
        self._run = jax.jit(fn).lower(*args).compile()
        self.seconds = busy_time() - start
        self._args = args
        analysis = self._run.memory_analysis()
        self.memory = 0 if analysis is None else analysis.temp_size_in_bytes

    def time(self, times):
        start = busy_time()
        outs = [self._run(*self._args) for _ in range(times)]
        jax.block_until_ready(outs)
        return (busy_time() - start) / times


def speed(plain, ours, rounds):
    """The median over rounds of the speed of `ours` relative to `plain`."""
    for program in (plain, ours):
        program.time(2)
    once = max(plain.time(1), ours.time(1), 1e-6)
    times = max(1, int(4e-3 / once))
    rounds = max(rounds, min(60, int(0.3 / (once * times))))
    ratios = []
    for i in range(rounds):
        if i % 2:
            a, b = plain.time(times), ours.time(times)
        else:
            b, a = ours.time(times), plain.time(times)
        ratios.append(a / b)
    return statistics.median(ratios)


def gradient(run, cell, xs):
    """A function of the parameters and the inputs, and its arguments."""
    params, static = eqx.partition(cell, eqx.is_inexact_array)
    types = jax.eval_shape(lambda: run(cell, xs))
    ct = jr.normal(jr.key(2), types.shape)

    def loss(params, xs, ct):
        return jnp.sum(run(eqx.combine(params, static), xs) * ct)

    return jax.value_and_grad(loss), (params, xs, ct)


def plain_scan(cell, xs, *, outside):
    zero = jnp.zeros((*(() if outside else xs.shape[1:2]), cell.hidden_size))
    state = (zero, zero) if isinstance(cell, eqx.nn.LSTMCell) else zero

    def step(state, x):
        state = (cell if outside else jax.vmap(cell))(x, state)
        return state, jax.tree.leaves(state)[0]

    all_of_it = lambda xs: jax.lax.scan(step, state, xs)[1]
    return jax.vmap(all_of_it, 1, 1)(xs) if outside else all_of_it(xs)


def layer(cell, xs, *, outside):
    run = eqg.nn.Recurrent(cell, time_major=True)
    return jax.vmap(lambda x: run(x)[0], 1, 1)(xs) if outside else run(xs)[0]


def compare(plain, ours, cell, xs, rounds):
    """The end of a row of the table, and the speeds for both placements of the batch."""
    speeds, memory, compilation = [], [], []
    for outside in (False, True):
        first, second = (Program(*gradient(run(outside), cell, xs)) for run in (plain, ours))
        speeds.append(speed(first, second, rounds))
        memory.append(second.memory / max(first.memory, 1))
        compilation.append(second.seconds / first.seconds)
    of_both = lambda values: " / ".join(f"{value:.2f}" for value in values)
    print(" | ".join(map(of_both, (speeds, memory, compilation))), "|", flush=True)
    return speeds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for the tests")
    parser.add_argument("--layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    ratios = []
    print(f"| cell | T, B, H, I | speed | bytes | compile |\n|{' --- |' * 5}")
    for name in args.layers[:1] if args.quick else args.layers:
        make_cell = LAYERS[name]
        for steps, batch, hidden, size in SHAPES[:1] if args.quick else SHAPES:
            cell = make_cell(size, hidden, key=jr.key(0))
            xs = jr.normal(jr.key(1), (steps, batch, size))
            print(f"| {name} layer | {steps}, {batch}, {hidden}, {size} | ", end="")
            plain = lambda outside: ft.partial(plain_scan, outside=outside)
            ours = lambda outside: ft.partial(layer, outside=outside)
            ratios += compare(plain, ours, cell, xs, rounds)
    if ratios:
        slower = sum(ratio < 0.97 for ratio in ratios)
        print(f"\n{len(ratios)} programs: {min(ratios):.2f} to {max(ratios):.2f}")
        print(f"{slower} below 0.97")


if __name__ == "__main__":
    main()
