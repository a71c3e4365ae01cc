"""Claim: the new ways of JAX 0.12 to log and to accumulate gradients save at most an eighth of
the time.

Three groups are compared: probes with `jax.custom_vjp.defvjp_with_logs`; sums of weight
gradients in the carry of a loop with sums in a `jax.new_ref`; and a scan with one whose
products have `jax.custom_vjp.defvjp_with_accums`. Printed are FLOPs (those of a loop count
once), temporary bytes, and the CPU time relative to the first of each group. The variants
alternate in one process, and "time" is the median over rounds.

Measured with JAX 0.12.0 on two loaded cores: logs take 0.89 of the time of probes, a ref 0.99
of that of a carry, and accumulators 0.92 of that of a scan. FLOPs and bytes differ by at most a
twentieth.

    python benchmarks/engines.py [--quick] [--rounds 20]
"""

import argparse
import time

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
from timing import compiled, in_turn, speed


def identity(x):
    return x


def log_of(_, ct):
    return (ct,), {"norm": jnp.linalg.norm(ct), "max": jnp.max(jnp.abs(ct))}


def product(x, weight):
    return x @ weight.T


def product_fwd(x, weight):
    return x @ weight.T, (x, weight)


def product_bwd(residuals, ct, ct_x, ct_weight):
    x, weight = residuals
    ct_x.accum(ct @ weight)
    ct_weight.accum(ct.T @ x)


def probes(size, steps):
    """Gradients of a recurrence, and the norms of the gradients of all its states."""
    weight = jr.normal(jr.key(0), (size, size)) / size**0.5
    logged = jax.custom_vjp(identity)
    logged.defvjp_with_logs(lambda x: (x, None), log_of)  # pyright: ignore

    def loss(weight, slots, mark):
        step = lambda h, slot: (mark(jnp.tanh(weight @ h), slot), None)
        return jnp.sum(jax.lax.scan(step, jnp.ones(size), slots, length=steps)[0])

    def with_logs(weight):
        run = lambda weight: loss(weight, None, lambda h, _: logged(h))
        return jax.vjp(run, weight)[1].with_logs(1.0)  # pyright: ignore

    def with_probes(weight):
        run = lambda weight, slots: loss(weight, slots, eqg.probe)
        return jax.grad(run, (0, 1))(weight, eqg.GradientStatistics(steps))

    return {"probe": (with_probes, weight), "logs": (with_logs, weight)}


def chunks(size, steps):
    """The gradient of a weight, summed over chunks of steps."""
    xs = jr.normal(jr.key(0), (16, steps, size))
    cts = jr.normal(jr.key(1), (16, steps, 3 * size))

    def in_carry(xs, cts):
        add = lambda total, x_ct: (total + x_ct[1].T @ x_ct[0], None)
        return jax.lax.scan(add, jnp.zeros((3 * size, size)), (xs, cts))[0]

    def in_ref(xs, cts):
        total = jax.new_ref(jnp.zeros((3 * size, size)))

        def add(_, x_ct):
            total[...] += x_ct[1].T @ x_ct[0]
            return None, None

        jax.lax.scan(add, None, (xs, cts))
        return total[...]

    return {"carry": (in_carry, xs, cts), "ref": (in_ref, xs, cts)}


def scans(size, steps):
    """The gradient of the weights of a recurrent network, a step at a time."""
    weights = tuple(jr.normal(key, (size, size)) / size for key in jr.split(jr.key(0)))
    xs = jr.normal(jr.key(1), (steps, 8, size))
    accumulated = jax.custom_vjp(product)
    accumulated.defvjp_with_accums(product_fwd, product_bwd)  # pyright: ignore

    def loss(weights, xs, matmul):
        step = lambda h, x: (jnp.tanh(matmul(x, weights[0]) + matmul(h, weights[1])), None)
        return jnp.sum(jax.lax.scan(step, jnp.zeros((8, size)), xs)[0])

    def plain(weights, xs):
        return jax.grad(loss)(weights, xs, product)

    def with_accumulators(weights, xs):
        refs = jax.tree.map(lambda w: jax.new_ref(jnp.zeros_like(w)), weights)
        pull_back = jax.vjp(lambda weights: loss(weights, xs, accumulated), weights)[1]
        pull_back.with_refs(refs)(1.0)  # pyright: ignore
        return jax.tree.map(lambda ref: ref[...], refs)

    return {"scan": (plain, weights, xs), "accumulators": (with_accumulators, weights, xs)}


def main():
    parser = argparse.ArgumentParser(description="Engines of JAX 0.12 beside ours.")
    parser.add_argument("--quick", action="store_true", help="small arrays, two rounds")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if not hasattr(jax.custom_vjp, "defvjp_with_accums"):
        print("JAX 0.12 or newer has these.")
        return
    size, steps, rounds = (4, 5, 2) if args.quick else (128, 128, args.rounds)
    for group in (probes, chunks, scans):
        programs = group(size, steps)
        variants = {name: compiled(fn, *args) for name, (fn, *args) in programs.items()}
        runs = {name: variant.run for name, variant in variants.items()}
        times = in_turn(runs, rounds, time.process_time)
        first = next(iter(programs))
        print(group.__doc__)
        for name, (fn, *arrays) in programs.items():
            flops = jax.jit(fn).lower(*arrays).compile().cost_analysis()["flops"]  # pyright: ignore
            taken = 1 / speed(times, name, first)
            used = variants[name].memory
            print(f"  {name:14} {flops:.3g} FLOPs {used:9} bytes, time {taken:.2f}")


if __name__ == "__main__":
    main()
