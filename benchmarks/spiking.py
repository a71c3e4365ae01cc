"""Claim: `LIF` trains 1.03 to 1.79 times as fast as its cell in `jax.lax.scan`. It needs 0.45
to 1.46 of the temporary bytes; `docs/benchmarks.md` has the table.

The program returns the spikes, and the gradients with respect to all parameters and inputs, in
single precision. "plain" is `jax.lax.scan` of the cell with its input weights, step by step;
"learned" has a learned decay and a learned threshold, "adaptive" has `rho`, and "current" has
`alpha`. The variants alternate in one process. The speed is the median over rounds of the ratio
to plain scan in the same round, for a batch inside and for `vmap` outside. The bytes are the
temporary memory of the compiled program.

snnTorch, Norse and Spyx are measured if they are installed, with the constants of `LIF`.
PyTorch has `OMP_NUM_THREADS` threads.

    python benchmarks/spiking.py [--quick] [--shapes 0 2] [--rounds 15] [--cpu-time]
"""

import argparse
import functools as ft
import importlib
import importlib.util
import statistics
import time
from typing import Any

import equinox as eqx
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
from eqx_grads.surrogates import superspike
from timing import busy_time, compiled, in_turn, speed


SHAPES = [(100, 64, 128, 256), (25, 128, 784, 512), (500, 16, 64, 128)]
LAYERS: dict[str, Any] = {
    "LIF": ft.partial(nn.LIF, beta=0.9),
    "learned": ft.partial(nn.LIF, beta=0.9, learn=("beta", "threshold")),
    "adaptive": ft.partial(nn.LIF, beta=0.9, rho=0.95),
    "current": ft.partial(nn.LIF, beta=0.9, alpha=0.8),
    "recurrent": ft.partial(nn.LIF, beta=0.9, recurrent=True),
}
PEERS = {"snnTorch": "snntorch", "Norse": "norse", "Spyx": "spyx"}


def plain(layer, xs):
    ((cell,),) = layer.cells

    def step(state, x):
        state = jax.vmap(cell)(x, state)
        return state, state.spikes

    at_rest = jax.tree.map(
        lambda s: jnp.zeros((xs.shape[1], *s.shape), s.dtype), cell.initial_state()
    )
    return jax.lax.scan(step, at_rest, xs)[1]


def inside(layer, xs):
    return layer(xs)[0]


def outside(layer, xs):
    return jax.vmap(lambda x: layer(x)[0], 1, 1)(xs)


RUNS = {"plain": plain, "inside": inside, "outside": outside}


def train(run, static):
    """The spikes and all gradients."""

    def spikes_and_gradients(arrays, xs, ct):
        of_arrays = lambda arrays, xs: run(eqx.combine(arrays, static), xs)
        spikes, pull_back = jax.vjp(of_arrays, arrays, xs)
        return spikes, pull_back(ct)

    return spikes_and_gradients


def measure(name, shape, rounds, clock):
    steps, batch, size, hidden = shape
    key1, key2, key3 = jr.split(jr.key(0), 3)
    layer = LAYERS[name](size, hidden, surrogate=superspike(), time_major=True, key=key1)
    arrays, static = eqx.partition(layer, eqx.is_array)
    xs = jr.normal(key2, (steps, batch, size))
    ct = jr.normal(key3, (steps, batch, hidden))
    programs = {n: compiled(train(run, static), arrays, xs, ct) for n, run in RUNS.items()}
    variants: dict[str, Any] = {n: program.run for n, program in programs.items()}
    if name == "LIF":
        for peer, make in {"snnTorch": in_snntorch, "Norse": in_norse, "Spyx": in_spyx}.items():
            if is_installed(peer):
                variants[peer] = make(xs, ct)
    return programs, in_turn(variants, rounds, clock)


# ---------------------------------------------------------------- peers


def is_installed(peer):
    return importlib.util.find_spec(PEERS[peer]) is not None


def in_snntorch(xs, ct):
    snntorch = importlib.import_module("snntorch")
    surrogate = importlib.import_module("snntorch.surrogate")
    neurons = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(25))

    def spikes_of(x, linear):
        membrane, spikes = neurons.reset_mem(), []
        for x_t in x:
            fired, membrane = neurons(linear(x_t), membrane)
            spikes.append(fired)
        return spikes

    return in_torch(xs, ct, spikes_of)


def in_norse(xs, ct):
    """A membrane that decays by a tenth in a step."""
    norse = importlib.import_module("norse.torch")
    torch = importlib.import_module("torch")
    parameters = norse.LIFBoxParameters(tau_mem_inv=torch.tensor(100.0))
    cell = norse.LIFBoxCell(p=parameters)

    def spikes_of(x, linear):
        state, spikes = None, []
        for x_t in x:
            fired, state = cell(linear(x_t), state)
            spikes.append(fired)
        return spikes

    return in_torch(xs, ct, spikes_of)


def in_torch(xs, ct, spikes_of):
    torch = importlib.import_module("torch")
    linear = torch.nn.Linear(xs.shape[2], ct.shape[2])
    x = torch.tensor(jax.device_get(xs).tolist(), requires_grad=True)
    ct = torch.tensor(jax.device_get(ct).tolist())

    def run():
        linear.zero_grad()
        x.grad = None
        torch.stack(spikes_of(x, linear)).backward(ct)

    return run


def in_spyx(xs, ct):
    spyx = importlib.import_module("spyx.nn")
    axn = importlib.import_module("spyx.axn")
    nnx = importlib.import_module("flax.nnx")
    hidden = ct.shape[2]
    linear = nnx.Linear(xs.shape[2], hidden, rngs=nnx.Rngs(0))
    neurons = spyx.LIF((hidden,), beta=0.9, activation=axn.superspike(25), rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split((linear, neurons), nnx.Param, ...)

    def spikes_of(params, xs):
        linear, neurons = nnx.merge(graph, params, rest)

        def step(membrane, x):
            spikes, membrane = neurons(linear(x), membrane)
            return membrane, spikes

        return jax.lax.scan(step, jnp.zeros(ct.shape[1:]), xs)[1]

    def spikes_and_gradients(params, xs, ct):
        spikes, pull_back = jax.vjp(spikes_of, params, xs)
        return spikes, pull_back(ct)

    return compiled(spikes_and_gradients, params, xs, ct).run


# ---------------------------------------------------------------- the table


def row(name, shape, programs, times):
    plain = programs["plain"]
    cells = [name, ", ".join(map(str, shape)), f"{1e3 * statistics.median(times['plain']):.1f}"]
    cells.append(" / ".join(f"{speed(times, v, 'plain'):.2f}" for v in ("inside", "outside")))
    cells.append(f"{programs['inside'].memory / plain.memory:.2f}")
    cells.append(f"{programs['inside'].seconds / plain.seconds:.2f}")
    for peer in filter(is_installed, PEERS):
        cells.append(f"{speed(times, peer, 'plain'):.3f}" if peer in times else "")
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for the tests")
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, not wall time")
    args = parser.parse_args()
    shapes = [(6, 2, 4, 3)] if args.quick else [SHAPES[i] for i in args.shapes]
    rounds = 2 if args.quick else args.rounds
    clock = busy_time if args.cpu_time else time.perf_counter
    names = ["neurons", "T, B, I, H", "plain, ms", "layer", "bytes", "compile"]
    names += filter(is_installed, PEERS)
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for name in args.layers:
        for shape in shapes:
            print(row(name, shape, *measure(name, shape, rounds, clock)), flush=True)


if __name__ == "__main__":
    main()
