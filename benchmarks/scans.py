"""Claim: where `filter_scan(checkpoint="auto")` replays, five cells train 1.00 to 2.44 times
as fast as with plain scan (median 1.36). They need 0.09 to 0.39 of the temporary bytes.

A GRU over 4096 steps trains in 1/50 of the bytes with `checkpoint="sqrt"`, at 0.97 to 0.99 of
the speed. `docs/benchmarks.md` has the table.

Value and gradient of a sum over all outputs (for the long sequence, over the last state), with
respect to all parameters and the inputs, in single precision. The variants alternate in one
process. The speed is the median over rounds of the ratio to plain scan in the same round. The
bytes are the temporary memory of the compiled program, and "compile" includes tracing.

    python benchmarks/scans.py [--quick] [--cells GRU attention] [--rounds 9]
"""

import argparse
import functools as ft
import statistics

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
from timing import compiled, in_turn, speed


SHAPES = [
    (128, 32, 128, 64),
    (512, 32, 256, 128),
    (256, 128, 512, 256),
    (1024, 1, 128, 128),
    (2048, 8, 64, 32),
]


class Attention(eqx.Module):
    """A cell with attention over a memory, a layer norm and a perceptron."""

    memory: jax.Array
    query: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    hidden_size: int

    def __init__(self, size, hidden, *, key):
        keys = jr.split(key, 3)
        self.memory = jr.normal(keys[0], (16, hidden))
        self.query = eqx.nn.Linear(hidden, hidden, key=keys[1])
        self.norm = eqx.nn.LayerNorm(hidden)
        self.mlp = eqx.nn.MLP(hidden + size, hidden, hidden, 1, key=keys[2])
        self.hidden_size = hidden

    def __call__(self, x, h):
        weights = jax.nn.softmax(self.memory @ self.query(h) / h.size**0.5)
        return self.norm(h + self.mlp(jnp.concatenate([weights @ self.memory, x])))


class Gated(eqx.Module):
    """A cell as a user may write it: a convex combination of the state and a perceptron."""

    gate: eqx.nn.Linear
    new: eqx.nn.MLP
    hidden_size: int

    def __init__(self, size, hidden, *, key):
        keys = jr.split(key)
        self.gate = eqx.nn.Linear(hidden + size, hidden, key=keys[0])
        self.new = eqx.nn.MLP(hidden + size, hidden, hidden, 1, jax.nn.gelu, key=keys[1])
        self.hidden_size = hidden

    def __call__(self, x, h):
        both = jnp.concatenate([h, x])
        z = jax.nn.sigmoid(self.gate(both))
        return z * h + (1 - z) * jnp.tanh(self.new(both))


CELLS = {
    "GRU": eqx.nn.GRUCell,
    "LSTM": eqx.nn.LSTMCell,
    "RNN": eqg.nn.RNNCell,
    "attention": Attention,
    "user's": Gated,
}


def run(cell, xs, *, checkpoint=None, plain=False, outside=False):
    """All outputs, with the batch inside or outside of the scan."""
    scan = jax.lax.scan if plain else ft.partial(eqg.filter_scan, checkpoint=checkpoint)
    over_batch = (lambda f: f) if outside else jax.vmap
    zero = jnp.zeros((*(() if outside else xs.shape[1:2]), cell.hidden_size))
    state = (zero, zero) if isinstance(cell, eqx.nn.LSTMCell) else zero

    def step(state, x):
        state = over_batch(cell)(x, state)
        return state, jax.tree.leaves(state)[0]

    all_of_it = lambda xs: scan(step, state, xs)[1]
    return jax.vmap(all_of_it, 1, 1)(xs) if outside else all_of_it(xs)


def train(forward, static):
    def loss(params, xs, ct):
        return jnp.sum(forward(eqx.combine(params, static), xs) * ct)

    return jax.value_and_grad(loss, (0, 1))


def make(name, shape):
    """The static part of the cell, and the arguments of the function that `train` returns."""
    steps, batch, hidden, size = shape
    cell = CELLS[name](size, hidden, key=jr.key(0))
    params, static = eqx.partition(cell, eqx.is_inexact_array)
    xs_key, ct_key = jr.split(jr.key(1))
    xs, ct = jr.normal(xs_key, (steps, batch, size)), jr.normal(ct_key, (steps, batch, hidden))
    return static, (params, xs, ct)


def measure(name, shape, rounds):
    static, args = make(name, shape)
    programs = {}
    for outside in (False, True):
        where = "outside" if outside else "inside"
        plain = ft.partial(run, plain=True, outside=outside)
        programs[f"plain, {where}"] = compiled(train(plain, static), *args)
        for checkpoint in ("auto", "replay", "sqrt"):
            ours = ft.partial(run, checkpoint=checkpoint, outside=outside)
            programs[f"{checkpoint}, {where}"] = compiled(train(ours, static), *args)
    times = in_turn({name: p.run for name, p in programs.items()}, rounds)
    plain = programs["plain, inside"]
    cells = [name, ", ".join(map(str, shape))]
    cells.append(f"{1e3 * statistics.median(times['plain, inside']):.1f}")
    for checkpoint in ("auto", "replay", "sqrt"):
        ratios = [
            speed(times, f"{checkpoint}, {where}", f"plain, {where}")
            for where in ("inside", "outside")
        ]
        program = programs[f"{checkpoint}, inside"]
        cells.append(f"{ratios[0]:.2f} / {ratios[1]:.2f}")
        cells.append(f"{program.memory / plain.memory:.2f}")
    cells.append(f"{programs['replay, inside'].seconds / plain.seconds:.2f}")
    print("| " + " | ".join(cells) + " |", flush=True)


def long_sequence(rounds, quick):
    """Training on a long sequence, where the loss depends on the last state only."""
    steps, batch, hidden, size = (9, 2, 4, 3) if quick else (4096, 16, 128, 64)
    cell = eqx.nn.GRUCell(size, hidden, key=jr.key(0))
    xs = jr.normal(jr.key(1), (steps, batch, size))

    def loss(cell, **options):
        scan = ft.partial(eqg.filter_scan, **options) if options else jax.lax.scan
        step = lambda h, x: (jax.vmap(cell)(x, h), None)
        return jnp.sum(scan(step, jnp.zeros((batch, hidden)), xs)[0])

    variants = {
        "plain": {},
        '`checkpoint="sqrt"`': {"checkpoint": "sqrt"},
        '`checkpoint="replay"`': {"checkpoint": "replay"},
        "`truncate=64`": {"truncate": 64},
    }
    programs = {
        name: compiled(jax.value_and_grad(ft.partial(loss, **options)), cell)
        for name, options in variants.items()
    }
    times = in_turn({name: p.run for name, p in programs.items()}, rounds)
    print(f"\n| T = {steps}, loss of the last state | ms | speed | bytes |\n|{' --- |' * 4}")
    for name, program in programs.items():
        print(
            f"| {name} | {1e3 * statistics.median(times[name]):.0f} | "
            f"{speed(times, name, 'plain'):.2f} | "
            f"{program.memory / programs['plain'].memory:.3f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for the tests")
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    shapes = [(6, 2, 4, 3)] if args.quick else [SHAPES[i] for i in args.shapes]
    rounds = 2 if args.quick else args.rounds
    names = ["cell", "T, B, H, I", "plain, ms"]
    names += [n for c in ("auto", "replay", "sqrt") for n in (f'`"{c}"`', "bytes")]
    print("| " + " | ".join([*names, "compile"]) + " |\n|" + " --- |" * (len(names) + 1))
    for name in args.cells[:1] if args.quick else args.cells:
        for shape in shapes:
            measure(name, shape, rounds)
    long_sequence(rounds, args.quick)


if __name__ == "__main__":
    main()
