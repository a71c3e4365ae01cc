"""Claim: the gradient of a fixed point of 16 x 64 numbers takes at most a fiftieth of the CPU
time of Optimistix's default adjoint. With `backward="implicit"`, it takes a fifteenth.

The state of an equilibrium layer, `z = tanh(z W + x)`, for a batch in one solve, single
precision. The forward pass is the same plain iteration in all variants, and is part of the
time. The peers are Optimistix's `ImplicitAdjoint` by default (a dense Jacobian), with GMRES,
and under `jax.vmap` over the batch, its `RecursiveCheckpointAdjoint`, and 30 steps in a scan
that is differentiated.

The variants alternate in one process. "CPU ms" is the median, and "speed" the median over
rounds of the ratio to Optimistix's default. Both are CPU times of the process, which other
processes influence less than time. "MB" is the temporary memory of the compiled program.
"Error" is the largest difference from the gradient by a linear solve of NumPy in double
precision, relative to its largest entry. OpenBLAS has one thread here. With more threads, the
dense solve of the reference takes about 1.5 times as much CPU time on an idle machine. On a
loaded machine it takes up to 20 times as much, as its threads wait actively.

    python benchmarks/fixed_point.py [--quick] [--rounds 15]
"""

import argparse
import functools as ft
import os
import statistics


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before JAX loads it

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optimistix as optx
from eqx_grads import solvers
from timing import busy_time, compiled, in_turn, speed


TOLERANCE = 1e-6
PLAIN = optx.FixedPointIteration(rtol=TOLERANCE, atol=TOLERANCE)
REPEATS = 10  # for one measurement, since the clock is coarse
REFERENCE = "Optimistix, default"


def cell(z, weight, x):
    return jnp.tanh(z @ weight + x)


def ours(backward):
    def solve(z0, weight, x):
        return eqg.fixed_point(cell, z0, weight, x, solver=PLAIN, backward=backward).value

    return solve


def optimistix(adjoint):
    def solve(z0, weight, x):
        fn = lambda z, args: cell(z, *args)
        return optx.fixed_point(fn, PLAIN, z0, (weight, x), adjoint=adjoint).value

    return solve


def unrolled(z0, weight, x):
    return jax.lax.scan(lambda z, _: (cell(z, weight, x), None), z0, None, length=30)[0]


VARIANTS = {
    REFERENCE: optimistix(optx.ImplicitAdjoint()),
    "Optimistix, vmap": jax.vmap(optimistix(optx.ImplicitAdjoint()), (0, None, 0)),
    "Optimistix, GMRES": optimistix(optx.ImplicitAdjoint(lx.GMRES(rtol=1e-6, atol=1e-6))),
    "Optimistix, checkpoints": optimistix(optx.RecursiveCheckpointAdjoint()),
    "30 steps, unrolled": unrolled,
    "implicit": ours("implicit"),
    "fixed_point": ours("fixed_point"),
    "neumann(5)": ours("neumann"),
    "phantom(5, 0.5)": ours("phantom"),
    "one_step": ours("one_step"),
    "fixed_point, in Optimistix": optimistix(solvers.FixedPointAdjoint()),
}


def problem(batch, size):
    keys = jr.split(jr.key(0), 3)
    weight = jr.normal(keys[0], (size, size))
    weight = 0.6 * weight / jnp.linalg.norm(weight, 2)
    x, ct = jr.normal(keys[1], (batch, size)), jr.normal(keys[2], (batch, size))
    return jnp.zeros((batch, size)), weight, x, ct


def gradient(solve):
    return jax.grad(lambda weight, z0, x, ct: jnp.vdot(solve(z0, weight, x), ct))


def exact(weight, z0, x, ct):
    """The gradient in the weight by a dense solve for each example, in double precision."""
    weight, z, x, ct = (np.asarray(a, np.float64) for a in (weight, z0, x, ct))
    for _ in range(200):
        z = np.tanh(z @ weight + x)
    total = np.zeros_like(weight)
    for z_i, ct_i in zip(z, ct, strict=True):
        slope = 1 - z_i**2  # J = diag(slope) W^T
        u = np.linalg.solve(np.eye(len(z_i)) - (slope[:, None] * weight.T).T, ct_i)
        total += np.outer(z_i, slope * u)
    return total


def repeat(run):
    for _ in range(REPEATS):
        run()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    batch, size = (2, 8) if args.quick else (16, 64)
    z0, weight, x, ct = problem(batch, size)
    programs = {
        name: compiled(gradient(solve), weight, z0, x, ct) for name, solve in VARIANTS.items()
    }
    rounds = 2 if args.quick else args.rounds
    runs = {name: ft.partial(repeat, p.run) for name, p in programs.items()}
    times = in_turn(runs, rounds, busy_time)
    expected = exact(weight, z0, x, ct)
    print("| variant | CPU ms | speed | MB | error |")
    print("|---|--:|--:|--:|--:|")
    for name, program in programs.items():
        got = np.asarray(program.run(), np.float64)
        error = np.max(np.abs(got - expected)) / np.max(np.abs(expected))
        ms = 1e3 * statistics.median(times[name]) / REPEATS
        ratio, memory = speed(times, name, REFERENCE), program.memory / 1e6
        print(f"| {name} | {ms:.2f} | {ratio:.1f} | {memory:.2f} | {error:.0e} |")


if __name__ == "__main__":
    main()
