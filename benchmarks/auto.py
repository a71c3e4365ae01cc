"""Claim: `filter_scan(checkpoint="auto")` trains 20 cells, at four shapes each, 0.92 to 3.0
times as fast as plain scan, and needs at most its temporary bytes.

At least 155 of the 160 programs (the batch is inside or outside of the scan) have 0.97 of the
speed. The cells are in `judged_cells.py`: the cost model was made with the cells of
`calibration_cells.py`. `docs/benchmarks.md` has the table.

Value and gradient of a sum over all outputs, with respect to all parameters, in single
precision, on one thread. The speed is the median over alternating rounds of the ratio to
`jax.lax.scan` in the same round, in CPU time. The table has the median of several passes over
all pairs of cell and shape. Each pass compiles again.

    python benchmarks/auto.py [--quick] [--calibration] [--cells Euler] [--passes 3]
"""

import argparse
import functools as ft
import statistics


from sizes import gradient, Program, speed  # isort: skip  # before JAX: one thread

import calibration_cells
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import judged_cells


def pairs(table, names):
    return [(name, shape) for name in names for shape in table[name][1]]


def loop(cell, xs, scan, outside):
    """All outputs, with the batch inside or outside of the scan."""
    state = cell.initial_state()
    over_batch = (lambda f: f) if outside else jax.vmap
    if not outside:
        repeat = lambda s: jnp.broadcast_to(s, (xs.shape[1], *s.shape))
        state = jax.tree.map(repeat, state)

    def step(state, x):
        state = over_batch(cell)(x, state)
        return state, over_batch(cell.output)(state)

    all_of_it = lambda xs: scan(step, state, xs)[1]
    return jax.vmap(all_of_it, 1, 1)(xs) if outside else all_of_it(xs)


def measure(make, inputs, shape, rounds):
    """The speed, the bytes and the compilation time relative to plain scan, for the batch
    inside and outside."""
    cell = make(shape[3], shape[2], key=jr.key(0))
    auto = ft.partial(eqg.filter_scan, checkpoint="auto")
    rows = []
    for outside in (False, True):
        runs = [ft.partial(loop, scan=s, outside=outside) for s in (jax.lax.scan, auto)]
        plain, ours = (Program(*gradient(run, cell, inputs)) for run in runs)
        memory = ours.memory / max(plain.memory, 1)
        rows.append((speed(plain, ours, rounds), memory, ours.seconds / plain.seconds))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for the tests")
    parser.add_argument("--calibration", action="store_true", help="the cells of the model")
    parser.add_argument("--cells", nargs="*")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    source = calibration_cells if args.calibration else judged_cells
    grid = pairs(source.CELLS, args.cells or list(source.CELLS))
    if args.quick:
        grid = [(name, (6, 2, 4, 3)) for name, _ in grid[:1]]
    rounds, passes = (2, 1) if args.quick else (args.rounds, args.passes)
    measured: dict = {pair: [] for pair in grid}
    for i in range(passes):
        for name, shape in grid:
            row = measure(source.CELLS[name][0], source.inputs(name, shape), shape, rounds)
            measured[name, shape].append(row)
            print(f"# {i}: {name} {shape} {row[0][0]:.2f} {row[1][0]:.2f}", flush=True)
    print(f"| cell | T, B, H, I | speed | bytes | compile |\n|{' --- |' * 5}")
    speeds = []
    for (name, shape), rows in measured.items():
        # By pass, placement and quantity: the median over passes.
        medians = [
            [statistics.median(row[where][i] for row in rows) for where in (0, 1)]
            for i in range(3)
        ]
        speeds += medians[0]
        columns = " | ".join(" / ".join(f"{x:.2f}" for x in both) for both in medians)
        print(f"| {name} | {', '.join(map(str, shape))} | {columns} |")
    slow = sum(s < 0.97 for s in speeds)
    print(f"\n{len(measured)} pairs, each with the batch inside and outside.")
    print(f"Speed {min(speeds):.2f} to {max(speeds):.2f}, {slow} of {len(speeds)} below 0.97.")


if __name__ == "__main__":
    main()
