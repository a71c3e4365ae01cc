"""Claim: `GRU` and `LSTM` train 1.00 to 2.22 times as fast as their Equinox cells under
`jax.lax.scan`. They need 0.13 to 0.65 of the temporary bytes; `docs/benchmarks.md` has the
table.

Value and gradient of a sum over all outputs, with respect to all parameters and the inputs, in
single precision. The variants alternate in one process. The speed is the median over rounds of
the ratio to plain scan in the same round, for a batch inside and for `vmap` outside. The bytes
are the temporary memory of the compiled program. The column "floor" has the six matrix products
that every implementation needs, each timed alone at its own shape, for all steps at once or
step by step.

Measured and not adopted, with the gates kept: gates in half precision (0.55 to 0.96 of the
speed), all gates in one array (0.88 to 0.96), chunks of half or twice the length (0.83 to
1.01). Half precision saves no bytes, as XLA computes in single precision on a CPU.

Whole `LRU` and `S5` layers train 1.3 to 2.4 times as fast as a scan of the papers' cell in
complex numbers (1,024 steps of 16 sequences, 64 features and states, two cores under load).
They have 0.7 to 0.8 of the speed of a scan whose step has real products of the batch: there,
the arrays of a step stay in the cache. Half of the time of the layer is the products of all
steps with inputs and outputs, a seventh the recurrence.

Flax and PyTorch are measured if they are installed, and on a GPU the LSTM of cuDNN.

    python benchmarks/recurrent.py [--quick] [--shapes 0 3] [--rounds 9] [--out table.md]
"""

import argparse
import functools as ft
import importlib.util
import pathlib
import statistics
import sys
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
from timing import busy_time, compiled, in_turn, speed


SHAPES = [
    (128, 32, 128, 64),
    (512, 32, 256, 128),
    (256, 128, 512, 256),
    (1024, 1, 128, 128),
    (2048, 8, 64, 32),
]
CELLS: dict[str, Any] = {
    "GRU": (eqx.nn.GRUCell, 3),
    "LSTM": (eqx.nn.LSTMCell, 4),
}


def zero_state(cell, batch):
    h = jnp.zeros((batch, cell.hidden_size))
    return (h, h) if isinstance(cell, eqx.nn.LSTMCell) else h


def plain(cell, xs):
    def step(state, x):
        state = jax.vmap(cell)(x, state)
        return state, jax.tree.leaves(state)[0]

    return jax.lax.scan(step, zero_state(cell, xs.shape[1]), xs)[1]


def layer(cell, xs, *, keep, outside):
    checkpoint = {"gates": None, "states": "replay"}[keep]
    run = nn.Recurrent(cell, checkpoint=checkpoint, time_major=True)
    if outside:
        return jax.vmap(lambda x: run(x)[0], 1, 1)(xs)
    return run(xs)[0]


def train(run):
    return lambda cell, xs, ct: jax.value_and_grad(
        lambda c, x: jnp.sum(run(c, x) * ct), (0, 1)
    )(cell, xs)


def floor(gates, steps, batch, hidden, size, key):
    """The six matrix products: the products with the state step by step, the others at once."""
    g = gates * hidden
    w_in, w_state = jr.normal(key, (g, size)), jr.normal(key, (g, hidden))
    x, h = jr.normal(key, (steps * batch, size)), jr.normal(key, (steps * batch, hidden))
    d = jr.normal(key, (steps * batch, g))

    def step_by_step(rows, weight):
        rows = rows.reshape(steps, batch, -1)
        # The sum makes each product depend on the last, so that the compiler keeps all of them.
        body = lambda carry, row: (carry + (row + 1e-9 * carry[0, 0]) @ weight, None)
        return jax.lax.scan(body, jnp.zeros((batch, weight.shape[1])), rows)[0]

    return {
        "in": (lambda x, w: x @ w.T, (x, w_in)),
        "state": (lambda h, w: step_by_step(h, w.T), (h, w_state)),
        "state, back": (step_by_step, (d, w_state)),
        "in, back": (lambda d, w: d @ w, (d, w_in)),
        "weight in": (lambda d, x: jax.lax.optimization_barrier(d.T) @ x, (d, x)),
        "weight state": (lambda d, h: jax.lax.optimization_barrier(d.T) @ h, (d, h)),
    }


def has_peer(peer, name):
    if peer == "cuDNN":  # of JAX; PyTorch uses it as well, if it finds a GPU
        return name == "LSTM" and jax.default_backend() == "gpu"
    return importlib.util.find_spec({"PyTorch": "torch", "Flax": "flax"}[peer]) is not None


def peers(name, shape):
    """Training steps of the libraries that are there, as functions without arguments."""
    return {peer: make(name, *shape) for peer, make in PEERS.items() if has_peer(peer, name)}


def in_torch(name, steps, batch, hidden, size):
    torch = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = getattr(torch.nn, name)(size, hidden, device=device)
    x = torch.randn(steps, batch, size, device=device, requires_grad=True)

    def run():
        net.zero_grad()
        net(x)[0].sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def compiled_cudnn(steps, batch, hidden, size):
    """The LSTM of cuDNN in `jax.experimental`, which may change. It has two biases."""
    rnn = importlib.import_module("jax.experimental.rnn")
    weights = rnn.init_lstm_weight(jr.key(0), size, hidden, 1, False)
    x, zero = jnp.ones((batch, steps, size)), jnp.zeros((1, batch, hidden))
    lengths = jnp.full(batch, steps, "int32")

    def total(weights, x):
        ys, *_ = rnn.lstm(x, zero, zero, weights, lengths, size, hidden, 1, 0.0, False)
        return jnp.sum(ys)

    return compiled(jax.value_and_grad(total, (0, 1)), weights, x)


def in_cudnn(name, *shape):
    del name
    return compiled_cudnn(*shape).run


def in_flax(name, steps, batch, hidden, size):
    nnx = importlib.import_module("flax.nnx")
    rngs = nnx.Rngs(0)
    net = nnx.RNN(getattr(nnx, f"{name}Cell")(size, hidden, rngs=rngs), time_major=True)
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    zero = jnp.zeros((batch, hidden))
    start = (zero, zero) if name == "LSTM" else zero
    total = lambda p, x: jnp.sum(nnx.merge(graph, p, rest)(x, initial_carry=start))
    grad = jax.jit(jax.value_and_grad(total, (0, 1)))
    x = jnp.ones((steps, batch, size))
    return lambda: jax.block_until_ready(grad(params, x))


PEERS = {"Flax": in_flax, "PyTorch": in_torch, "cuDNN": in_cudnn}


def measure(name, shape, rounds):
    steps, batch, hidden, size = shape
    make_cell, gates = CELLS[name]
    key = jr.key(0)
    cell = make_cell(size, hidden, key=key)
    xs, ct = jr.normal(key, (steps, batch, size)), jr.normal(key, (steps, batch, hidden))
    runs: dict[str, Any] = {"plain": plain}
    for keep in ("gates", "states"):
        for where in ("inside", "outside"):
            run = ft.partial(layer, keep=keep, outside=where == "outside")
            runs[f"{keep}, {where}"] = run
    variants, memory, seconds = {}, {}, {}
    for variant, run in runs.items():
        variants[variant], memory[variant], seconds[variant] = compiled(
            train(run), cell, xs, ct
        )
    for product, (fn, args) in floor(gates, steps, batch, hidden, size, key).items():
        variants["floor: " + product] = compiled(fn, *args).run
    variants.update(peers(name, shape))
    times = in_turn(variants, rounds)
    products = [ts for variant, ts in times.items() if variant.startswith("floor")]
    times["floor"] = [sum(ts) for ts in zip(*products, strict=True)]
    return times, memory, seconds


def row(name, shape, times, memory, seconds):
    faster = ft.partial(speed, times, reference="plain")
    plain_ms = 1e3 * statistics.median(times["plain"])
    cells = [name, ", ".join(map(str, shape)), f"{plain_ms:.1f}"]
    for keep in ("gates", "states"):
        inside, outside = f"{keep}, inside", f"{keep}, outside"
        cells.append(f"{faster(inside):.2f} / {faster(outside):.2f}")
        cells.append(f"{memory[inside] / memory['plain']:.2f}")
    cells.append(f"{seconds['gates, inside'] / seconds['plain']:.2f}")
    cells.append(f"{faster('floor'):.2f}")
    shown = [peer for peer in PEERS if any(has_peer(peer, layer) for layer in CELLS)]
    cells.extend(f"{faster(peer):.2f}" if peer in times else "" for peer in shown)
    return "| " + " | ".join(cells) + " |"


def header():
    names = ["layer", "T, B, H, I", "plain, ms", "gates kept", "bytes", "states kept", "bytes"]
    names += ["compile", "floor"]
    names += [peer for peer in PEERS if any(has_peer(peer, layer) for layer in CELLS)]
    return "| " + " | ".join(names) + " |\n|" + " --- |" * len(names)


def recurrences(rounds, quick):
    """The same for `linear_recurrence`, relative to autodiff of scan and `associative_scan`."""
    names = ["T, width", "scan, ms", "`linear_recurrence`", "bytes", "`associative_scan`"]
    names += ['`"associative"`, relative to that', "bytes", "compile"]
    print("\n| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    shapes = [(64, 8)] if quick else [(1024, 256), (4096, 256), (16384, 256), (16384, 32)]
    for shape in shapes:
        a, b, ct = jr.uniform(jr.key(0), (3, *shape))

        def scan(a, b):
            step = lambda h, ab: (ab[0] * h + ab[1],) * 2
            return jax.lax.scan(step, jnp.zeros(b.shape[1]), (a, b))[1]

        def associative(a, b):
            compose = lambda x, y: (y[0] * x[0], y[0] * x[1] + y[1])
            return jax.lax.associative_scan(compose, (a, b))[1]

        runs = {
            "scan": scan,
            "ours": eqg.linear_recurrence,
            "associative": associative,
            "ours, associative": ft.partial(eqg.linear_recurrence, method="associative"),
        }
        programs = {name: compiled(train(run), a, b, ct) for name, run in runs.items()}
        runs = {name: program.run for name, program in programs.items()}
        times = in_turn(runs, rounds, clock=busy_time)
        plain, parallel = programs["scan"], programs["associative"]
        ours, ours_parallel = programs["ours"], programs["ours, associative"]
        cells = [
            f"{shape[0]}, {shape[1]}",
            f"{1e3 * statistics.median(times['scan']):.2f}",
            f"{speed(times, 'ours', 'scan'):.2f}",
            f"{ours.memory / plain.memory:.2f}",
            f"{speed(times, 'associative', 'scan'):.2f}",
            f"{speed(times, 'ours, associative', 'associative'):.2f}",
            f"{ours_parallel.memory / parallel.memory:.2f}",
            f"{ours_parallel.seconds / parallel.seconds:.2f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)

    batches(rounds, quick)


def batches(rounds, quick):
    """`jax.vmap` over sequences: with factors of their own, shared, the same at all times."""
    steps, width, batch = (64, 8, 2) if quick else (1024, 64, 16)
    names = ["factors, of 1024 steps of 64 numbers, 16 sequences", "scan, ms", "speed", "bytes"]
    print("\n| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    b, ct = jr.normal(jr.key(0), (2, batch, steps, width))
    kinds = {
        "of each sequence": ((batch, steps, width), 0),
        "shared by all sequences": ((steps, width), None),
        "the same at all times": ((1, width), None),
    }

    def scan(a, b):
        step = lambda h, ab: (ab[0] * h + ab[1],) * 2
        a = jnp.broadcast_to(a, b.shape)
        return jax.lax.scan(step, jnp.zeros(width), (a, b))[1]

    for name, (shape, axis) in kinds.items():
        a = jr.uniform(jr.key(1), shape)
        of_batch = lambda run, axis=axis: jax.vmap(run, (axis, 0))
        runs = {"scan": of_batch(scan), "ours": of_batch(eqg.linear_recurrence)}
        programs = {name: compiled(train(run), a, b, ct) for name, run in runs.items()}
        times = in_turn({name: p.run for name, p in programs.items()}, rounds, busy_time)
        ratio = programs["ours"].memory / programs["scan"].memory
        milliseconds = 1e3 * statistics.median(times["scan"])
        faster = speed(times, "ours", "scan")
        print(f"| {name} | {milliseconds:.2f} | {faster:.2f} | {ratio:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for the tests")
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path, help="write the table there as well")
    parser.add_argument("--recurrences", action="store_true", help="`linear_recurrence` only")
    args = parser.parse_args()
    if args.recurrences:
        sys.exit(recurrences(args.rounds, args.quick))
    shapes = [(6, 2, 4, 3)] if args.quick else [SHAPES[i] for i in args.shapes]
    rounds = 2 if args.quick else args.rounds
    lines: list[str] = []
    for name in args.cells[:1] if args.quick else args.cells:
        for shape in shapes:
            times, memory, seconds = measure(name, shape, rounds)
            if not lines:
                lines.append(header())
                print(lines[0])
            lines.append(row(name, shape, times, memory, seconds))
            print(lines[-1], flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")
    recurrences(rounds, args.quick)


if __name__ == "__main__":
    main()
