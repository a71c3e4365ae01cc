"""Claim: PLACEHOLDER

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
from timing import compiled, in_turn, speed


SHAPES = [(100, 64, 128, 256), (25, 128, 784, 512), (500, 16, 64, 128)]
LEARNED = {"learn_beta": True, "learn_threshold": True}
LAYERS: dict[str, Any] = {
    "LIF": ft.partial(nn.LIF, beta=0.9),
    "LIF, learned": ft.partial(nn.LIF, beta=0.9, **LEARNED),
    "ALIF": ft.partial(nn.ALIF, beta=0.9, rho=0.95),
    "CuBaLIF": ft.partial(nn.CuBaLIF, alpha=0.8, beta=0.9),
    "RLIF": ft.partial(nn.RLIF, beta=0.9),
}


def plain(layer, xs):
    cell = layer.to_cell()

    def step(state, x):
        state = jax.vmap(cell)(x, state)
        return state, state.spikes

    at_rest = jax.tree.map(
        lambda s: jnp.zeros((xs.shape[1], *s.shape), s.dtype), cell.initial_state()
    )
    return jax.lax.scan(step, at_rest, xs)[1]


def outside(layer, xs):
    return jax.vmap(lambda x: layer(x)[0], 1, 1)(xs)


def train(run):
    """The spikes, and the gradients of all arrays and of the inputs. The spikes are outputs, so
    that they are no temporaries of any variant."""

    def spikes_and_gradients(layer, xs, ct):
        spikes, pull_back = eqx.filter_vjp(run, layer, xs)
        return spikes, pull_back(ct)

    return spikes_and_gradients


def measure(name, shape, rounds, clock):
    steps, batch, size, hidden = shape
    key1, key2, key3 = jr.split(jr.key(0), 3)
    layer = LAYERS[name](size, hidden, surrogate=superspike(), time_major=True, key=key1)
    xs = jr.normal(key2, (steps, batch, size))
    ct = jr.normal(key3, (steps, batch, hidden))
    arrays, static = eqx.partition(layer, eqx.is_array)
    runs = {"plain": plain, "inside": lambda layer, xs: layer(xs)[0], "outside": outside, "spikes": lambda layer, xs: type(layer).from_cell(layer.to_cell(), keep="spikes", time_major=True)(xs)[0]}
    programs = {}
    for variant, run in runs.items():
        of_arrays = lambda arrays, xs, run=run: run(eqx.combine(arrays, static), xs)
        programs[variant] = compiled(train(of_arrays), arrays, xs, ct)
    variants = {variant: program.run for variant, program in programs.items()}
    if name == "LIF":
        variants |= peers(layer, xs, ct)
    return programs, in_turn(variants, rounds, clock)


# ---------------------------------------------------------------- peers


def peers(layer, xs, ct):
    """Training steps of the libraries that are installed, as functions without arguments."""
    found = {"snnTorch": ("snntorch", in_snntorch), "Norse": ("norse", in_norse)}
    found["Spyx"] = ("spyx", in_spyx)
    return {
        peer: make(layer, xs, ct)
        for peer, (module, make) in found.items()
        if importlib.util.find_spec(module) is not None
    }


def in_snntorch(layer, xs, ct):
    torch = importlib.import_module("torch")
    snntorch = importlib.import_module("snntorch")
    surrogate = importlib.import_module("snntorch.surrogate")
    linear = torch.nn.Linear(xs.shape[2], ct.shape[2])
    neurons = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(25))
    x, ct = to_torch(torch, xs).requires_grad_(), to_torch(torch, ct)

    def run():
        linear.zero_grad()
        x.grad = None
        membrane, spikes = neurons.reset_mem(), []
        for t in range(len(x)):
            fired, membrane = neurons(linear(x[t]), membrane)
            spikes.append(fired)
        torch.stack(spikes).backward(ct)

    return run


def in_norse(layer, xs, ct):
    torch = importlib.import_module("torch")
    norse = importlib.import_module("norse.torch")
    linear = torch.nn.Linear(xs.shape[2], ct.shape[2])
    parameters = norse.LIFBoxParameters(tau_mem_inv=torch.tensor(100.0))
    neurons = norse.Lift(norse.LIFBoxCell(p=parameters))
    x, ct = to_torch(torch, xs).requires_grad_(), to_torch(torch, ct)

    def run():
        linear.zero_grad()
        x.grad = None
        neurons(linear(x))[0].backward(ct)

    return run


def to_torch(torch, x):
    return torch.tensor(jax.device_get(x).tolist())


def in_spyx(layer, xs, ct):
    """The neurons of Spyx in a scan, with one matrix product for all inputs."""
    spyx = importlib.import_module("spyx")
    raise NotImplementedError(spyx)


def row(name, shape, programs, times):
    bytes_of = lambda variant: programs[variant].memory / programs["plain"].memory
    cells = [name, ", ".join(map(str, shape)), f"{1e3 * statistics.median(times['plain']):.1f}"]
    cells += [f"{speed(times, v, 'plain'):.2f}" for v in ("inside", "outside", "spikes")]
    cells += [f"{bytes_of('spikes'):.2f}"]
    cells += [f"{programs['plain'].memory / 1e6:.1f}", f"{bytes_of('inside'):.2f}"]
    cells += [f"{programs['inside'].seconds / programs['plain'].seconds:.2f}"]
    cells += [f"{p} {speed(times, p, 'plain'):.3f}" for p in times if p not in programs]
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
    clock = time.process_time if args.cpu_time else time.perf_counter
    names = ["layer", "T, B, I, H", "plain, ms", "batch inside", "`vmap` outside"]
    names += ["plain, MB", "bytes", "compile", "peers"]
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for name in args.layers:
        for shape in shapes:
            print(row(name, shape, *measure(name, shape, rounds, clock)), flush=True)


if __name__ == "__main__":
    main()
