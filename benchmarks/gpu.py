"""Claim: on an NVIDIA H200, `GRU` and `LSTM` with `keep="states"` train 1.65 to 2.25 times as
fast as their Equinox cells in `jax.lax.scan`. They need 0.20 to 0.41 of the temporary bytes;
`docs/benchmarks.md` has the table.

The other tables are about linear recurrences, spiking layers and `linear_cross_entropy`. Some
rows are slower than plain JAX. Products have JAX's default precision, which is TF32 on a GPU.
The variants alternate in one process. A speed is the median over rounds of the ratio to the
reference in the same round. PyTorch is measured if it is installed, and cuDNN on a GPU.

    python benchmarks/gpu.py [--quick] [--only rnn linear-recurrence spiking loss] [--rounds 7]
"""

import argparse
import functools as ft
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import recurrent
import spiking
from eqx_grads.losses import linear_cross_entropy
from timing import compiled, in_turn, speed


# T, B, H, I
RNN_SHAPES = [*recurrent.SHAPES[:4], (512, 64, 1024, 512)]
# T, width
RECURRENCE_SHAPES = [(1024, 256), (4096, 1024), (16384, 1024), (65536, 256)]
LONGEST_SCAN = 4096  # plain scan of more steps takes too long
# Tokens, features, vocabulary
LOSS_SHAPES = [(2048, 256, 16384), (8192, 2048, 50304), (8192, 4096, 128256)]


def compiled_together(fns: dict[str, Callable], *args):
    """On a GPU, some programs take half a minute to compile."""
    with ThreadPoolExecutor() as pool:
        waiting = {name: pool.submit(compiled, fn, *args) for name, fn in fns.items()}
        return {name: program.result() for name, program in waiting.items()}


def print_rows(shape, programs, rounds, reference, peers=None):
    """A row for each program, and for each peer, which is a function without arguments."""
    runs = {name: program.run for name, program in programs.items()}
    times = in_turn({**runs, **(peers or {})}, rounds)
    for name, seconds in times.items():
        milliseconds = 1e3 * statistics.median(seconds)
        cells = [", ".join(map(str, shape)), name, f"{milliseconds:.2f}"]
        cells += [f"{speed(times, name, reference):.2f}", "", ""]
        if name in programs:
            program = programs[name]
            cells[-2:] = [f"{program.memory / 1e6:.1f}", f"{program.seconds:.1f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def print_header(title, shape):
    names = [shape, "variant", "ms", "speed", "MB", "compile, s"]
    print(f"\n{title}\n\n| " + " | ".join(names) + " |\n|" + " --- |" * len(names))


# ---------------------------------------------------------------- recurrent layers


def auto(cell, xs):
    """The cell in `filter_scan`, which chooses whether to replay."""

    def step(state, x):
        state = jax.vmap(cell)(x, state)
        return state, jax.tree.leaves(state)[0]

    return eqg.filter_scan(step, recurrent.zero_state(cell, xs.shape[1]), xs)[1]


def measure_rnn(quick, rounds):
    for name, (make_cell, _) in recurrent.CELLS.items():
        print_header(name, "T, B, H, I")
        for shape in [(6, 2, 4, 3)] if quick else RNN_SHAPES:
            steps, batch, hidden, size = shape
            key = jr.key(0)
            cell = make_cell(size, hidden, key=key)
            xs = jr.normal(key, (steps, batch, size))
            ct = jr.normal(key, (steps, batch, hidden))
            layer = ft.partial(recurrent.layer, outside=False)
            runs = {
                "plain scan": recurrent.plain,
                "gates kept": ft.partial(layer, keep="gates"),
                "states kept": ft.partial(layer, keep="states"),
                "`filter_scan`": auto,
            }
            fns = {variant: recurrent.train(run) for variant, run in runs.items()}
            programs, peers = compiled_together(fns, cell, xs, ct), {}
            if recurrent.has_peer("cuDNN", name):
                programs["cuDNN"] = recurrent.compiled_cudnn(*shape)
            if recurrent.has_peer("PyTorch", name):
                peers["PyTorch"] = recurrent.in_torch(name, *shape)
            print_rows(shape, programs, rounds, "plain scan", peers)


# ---------------------------------------------------------------- linear recurrences


def scan(a, b):
    step = lambda h, ab: (ab[0] * h + ab[1],) * 2
    return jax.lax.scan(step, jnp.zeros(b.shape[1]), (a, b))[1]


def associative_scan(a, b):
    compose = lambda x, y: (y[0] * x[0], y[0] * x[1] + y[1])
    return jax.lax.associative_scan(compose, (a, b))[1]


def measure_linear_recurrence(quick, rounds):
    print_header("Linear recurrences", "T, width")
    for shape in [(16, 4)] if quick else RECURRENCE_SHAPES:
        a = jr.uniform(jr.key(0), shape)
        b, ct = jr.normal(jr.key(1), shape), jr.normal(jr.key(2), shape)
        runs = {
            "`associative_scan`": associative_scan,
            "`linear_recurrence`": eqg.linear_recurrence,
            '`method="scan"`': ft.partial(eqg.linear_recurrence, method="scan"),
        }
        if shape[0] <= LONGEST_SCAN:
            runs["plain scan"] = scan
        fns = {variant: recurrent.train(run) for variant, run in runs.items()}
        print_rows(shape, compiled_together(fns, a, b, ct), rounds, "`associative_scan`")


# ---------------------------------------------------------------- spiking layers


def measure_spiking(quick, rounds):
    for name in ("LIF", "recurrent"):
        print_header(name, "T, B, I, H")
        for shape in [(6, 2, 4, 3)] if quick else spiking.SHAPES:
            steps, batch, size, hidden = shape
            layer = spiking.LAYERS[name](size, hidden, time_major=True, key=jr.key(0))
            arrays, static = eqx.partition(layer, eqx.is_array)
            xs = jr.bernoulli(jr.key(1), 0.3, (steps, batch, size)).astype(jnp.float32)
            ct = jr.normal(jr.key(2), (steps, batch, hidden))
            runs = {"plain scan": spiking.plain, "layer": spiking.inside}
            fns = {variant: spiking.train(run, static) for variant, run in runs.items()}
            print_rows(shape, compiled_together(fns, arrays, xs, ct), rounds, "plain scan")


# ---------------------------------------------------------------- the loss of a language model


def token_losses(x, weight, labels):
    logits = (x @ weight.T).astype(jnp.float32)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


def all_logits(x, weight, labels):
    return jnp.mean(token_losses(x, weight, labels))


def in_map(x, weight, labels):
    """Chunks of 1024 tokens, whose logits are computed twice."""
    total = jax.checkpoint(lambda chunk: jnp.sum(token_losses(chunk[0], weight, chunk[1])))
    split = lambda x: x.reshape(-1, min(1024, len(x)), *x.shape[1:])
    return jnp.sum(jax.lax.map(total, (split(x), split(labels)))) / len(x)


LOSSES = {
    "Optax, all logits": all_logits,
    "`lax.map`, checkpoint": in_map,
    "default chunk": linear_cross_entropy,
    "`chunk=1024`": ft.partial(linear_cross_entropy, chunk=1024),
    "`chunk=4096`": ft.partial(linear_cross_entropy, chunk=4096),
}


def measure_loss(quick, rounds):
    for dtype in ("bfloat16", "float32"):
        print_header(f"`linear_cross_entropy`, {dtype}", "tokens, features, vocabulary")
        largest = -1 if dtype == "float32" else None  # measured in bfloat16 only
        for shape in [(64, 8, 128)] if quick else LOSS_SHAPES[:largest]:
            tokens, features, vocabulary = shape
            keys = jr.split(jr.key(0), 3)
            x = jr.normal(keys[0], (tokens, features), dtype)
            weight = (jr.normal(keys[1], (vocabulary, features)) / features**0.5).astype(dtype)
            labels = jr.randint(keys[2], (tokens,), 0, vocabulary)
            fns = {name: jax.value_and_grad(loss, (0, 1)) for name, loss in LOSSES.items()}
            programs = compiled_together(fns, x, weight, labels)
            print_rows(shape, programs, rounds, "Optax, all logits")


TABLES = {
    "rnn": measure_rnn,
    "linear-recurrence": measure_linear_recurrence,
    "spiking": measure_spiking,
    "loss": measure_loss,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for the tests")
    parser.add_argument("--only", nargs="*", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    for name in args.only:
        TABLES[name](args.quick, 2 if args.quick else args.rounds)


if __name__ == "__main__":
    main()
