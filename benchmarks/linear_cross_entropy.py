"""Claim: at the first size, `losses.linear_cross_entropy` with both gradients needs at most a
sixth of the temporary bytes of Optax on all logits, and about three quarters of its CPU time.

The first peer is `optax.losses.softmax_cross_entropy_with_integer_labels` of all logits. The
second is the same in `jax.lax.map` over chunks with `jax.checkpoint`, which computes the logits
twice. The third uses `losses.chunked`, which computes them once. The last is the three matrix
products alone, chunk by chunk, which is a lower bound. The variants alternate in one process.
"CPU" and "wall" are medians over rounds of the ratio of times to Optax on all logits. "MB" is
the temporary memory of the compiled program, and "error" the largest difference of a gradient
relative to its largest entry.

The ratio of CPU times is 0.71 at these sizes on two cores of a shared machine with JAX 0.10.2,
where the matrix products alone take 0.60. It is worse where a matrix product takes more of the
time: 0.93 for a vocabulary of 32000 with 512 features. With fewer tokens than features there is
one chunk, and only memory is gained.

    python benchmarks/linear_cross_entropy.py [--quick] [--rounds 7] [--dtype float32]
"""

import argparse
import functools as ft
import statistics
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from eqx_grads.losses import chunked, linear_cross_entropy
from timing import busy_time, compiled


SIZES = {
    "claim": (2048, 256, 16384),
    "wide": (2048, 512, 32000),
    "few tokens": (512, 768, 50257),
    "small vocabulary": (8192, 64, 1000),
}
CHUNK = 256


def all_logits(x, weight, labels):
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(x @ weight.T, labels)
    return jnp.mean(losses.astype(jnp.float32))


def in_map(x, weight, labels):
    @jax.checkpoint
    def one(chunk):
        return all_logits(chunk[0], weight, chunk[1])

    split = lambda x: x.reshape(-1, min(CHUNK, len(x)), *x.shape[1:])
    return jnp.mean(jax.lax.map(one, (split(x), split(labels))))


def any_loss(x, weight, labels):
    loss = lambda weight, x, labels: all_logits(x, weight, labels)
    return chunked(loss, 0, CHUNK, reduction="mean")(weight, x, labels)


def each_token(x, weight, labels):
    return jnp.mean(linear_cross_entropy(x, weight, labels, reduction="none"))


def products(x, weight, labels):
    """The matrix products, in the layouts of `linear_cross_entropy`."""
    del labels
    split = x.reshape(-1, min(CHUNK, len(x)), x.shape[1])

    def step(total, x):
        logits = x @ weight.T
        return total + jax.lax.optimization_barrier(x.T) @ logits, logits @ weight

    total, ct_x = jax.lax.scan(step, jnp.zeros_like(weight.T), split)
    return ct_x, total.T


LOSSES = {
    "Optax, all logits": all_logits,
    "lax.map, checkpoint": in_map,
    "chunked": any_loss,
    "linear_cross_entropy": linear_cross_entropy,
    'reduction="none"': each_token,
}


def measure(programs, rounds):
    """The median ratios of CPU and wall time to the first program."""
    ratios = {name: ([], []) for name in programs}
    for _ in range(rounds):
        times = {}
        for name, program in programs.items():
            cpu, wall = busy_time(), time.perf_counter()
            program.run()
            times[name] = busy_time() - cpu, time.perf_counter() - wall
        reference = next(iter(times.values()))
        for name, pair in times.items():
            for kind in (0, 1):
                ratios[name][kind].append(pair[kind] / reference[kind])
    return {name: list(map(statistics.median, pair)) for name, pair in ratios.items()}


def error(got, expected):
    worst = lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
    return max(map(worst, jax.tree.leaves(got[1]), jax.tree.leaves(expected[1])))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    sizes = {"tiny": (64, 8, 128)} if args.quick else SIZES
    print("| tokens, features, vocabulary | variant | MB | CPU | wall | error |")
    print("|---|---|---|---|---|---|")
    for n, d, v in sizes.values():
        keys = jr.split(jr.key(0), 3)
        x = jr.normal(keys[0], (n, d), args.dtype)
        weight = jr.normal(keys[1], (v, d), args.dtype) / d**0.5
        labels = jr.randint(keys[2], (n,), 0, v)
        fns = {
            name: ft.partial(jax.value_and_grad, argnums=(0, 1))(loss)
            for name, loss in LOSSES.items()
        }
        fns["matrix products alone"] = products
        programs = {name: compiled(fn, x, weight, labels) for name, fn in fns.items()}
        results = {name: program.run() for name, program in programs.items()}
        expected = results["Optax, all logits"]
        ratios = measure(programs, 1 if args.quick else args.rounds)
        for name, (cpu, wall) in ratios.items():
            difference = f"{error(results[name], expected):.0e}" if name in LOSSES else ""
            print(
                f"| {n}, {d}, {v} | {name} | {programs[name].memory / 1e6:.1f} "
                f"| {cpu:.2f} | {wall:.2f} | {difference} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
