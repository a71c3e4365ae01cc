"""Claim: with matrices of 64 by 64, `gated_delta_rule` trains 12 to 14 times as fast as plain
scan, in 1/20 of its bytes. It is 1.4 to 1.5 times as fast as the same chunks with the
derivative of JAX, in 0.6 of their bytes; `docs/benchmarks.md` has the table.

The gradient of a weighted sum over all outputs with respect to all arguments, in single
precision. "Plain" is `jax.lax.scan` of one step of the recurrence. "Chunks" is the same form in
chunks of 32 steps with the derivative of JAX, which solves a triangular system in each chunk.
The variants alternate in one process, and the clock is CPU time; a speed is the median over
rounds of the ratio to plain scan in the same round. The bytes are the temporary memory of the
compiled program. "Error" is the largest difference of the value and of all gradients from plain
scan in double precision, relative to the largest number of each.

    python benchmarks/delta_rule.py [--quick] [--rounds 9]
"""

import argparse

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
from timing import busy_time, compiled, in_turn, speed


# Steps, heads, and the size of keys and values.
SHAPES = [(2048, 4, 64), (8192, 4, 64), (2048, 4, 16), (64, 4, 16), (64, 2, 4)]


def plain(q, k, v, beta, g):
    def step(s, x):
        q, k, v, beta, g = x
        s = jnp.exp(g)[:, None, None] * s
        new = beta[:, None] * (v - jnp.einsum("hkv,hk->hv", s, k))
        s = s + k[:, :, None] * new[:, None]
        return s, jnp.einsum("hkv,hk->hv", s, q)

    zero = jnp.zeros((*k.shape[1:], v.shape[-1]), v.dtype)
    return jax.lax.scan(step, zero, (q, k, v, beta, g))[1]


def in_chunks(q, k, v, beta, g, chunk=32):
    """The chunked form as one writes it from the paper, with JAX's derivative."""
    split = lambda x: x.reshape(-1, chunk, *x.shape[1:]).swapaxes(1, 2)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    strict = jnp.tril(lower, -1)

    def step(s, x):
        q, k, v, beta, g = x
        c = jnp.cumsum(g, -1)[..., None]
        decay = jnp.exp(jnp.where(lower, c - c.mT, 0))
        a = jnp.where(strict, beta[..., None] * decay * (k @ k.mT), 0)
        right = beta[..., None] * (v - jnp.exp(c) * (k @ s))
        u = jax.scipy.linalg.solve_triangular(
            jnp.eye(chunk) + a, right, lower=True, unit_diagonal=True
        )
        out = jnp.exp(c) * (q @ s) + jnp.where(lower, decay * (q @ k.mT), 0) @ u
        last = c[:, -1:]
        return jnp.exp(last) * s + (k * jnp.exp(last - c)).mT @ u, out

    zero = jnp.zeros((*k.shape[1:], v.shape[-1]), v.dtype)
    out = jax.lax.scan(step, zero, tuple(map(split, (q, k, v, beta, g))))[1]
    return out.swapaxes(1, 2).reshape(v.shape)


def library(*args):
    return eqg.gated_delta_rule(*args)[0]


def arguments(steps, heads, size, dtype=jnp.float32):
    keys = jr.split(jr.key(0), 6)
    q, k, v, ct = (jr.normal(key, (steps, heads, size), dtype) for key in keys[:4])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    beta = jax.nn.sigmoid(jr.normal(keys[4], (steps, heads), dtype))
    g = -0.1 * jax.nn.softplus(jr.normal(keys[5], (steps, heads), dtype))
    return ct, (q, k, v, beta, g)


def train(fn):
    def gradient(ct, args):
        out, pull = jax.vjp(fn, *args)
        return out, pull(ct)

    return gradient


def error(fn, shape, dtype):
    """The largest one, relative to plain scan in double precision."""
    with jax.enable_x64(True):
        wide = arguments(*shape, dtype=jnp.float64)
        exact = jax.jit(train(plain))(*wide)
        got = jax.jit(train(fn))(*jax.tree.map(lambda x: x.astype(dtype), wide))
        relative = lambda x, y: float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)))
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
        return max(relative(x.astype(y.dtype), y) for x, y in pairs)


def measure(shape, rounds):
    variants = {"plain": plain, "ours": library, "chunks": in_chunks}
    programs = {name: compiled(train(fn), *arguments(*shape)) for name, fn in variants.items()}
    runs = {name: program.run for name, program in programs.items()}
    times = in_turn(runs, rounds, busy_time)
    fastest = 1e3 * min(times["ours"])
    mb = {name: program.memory / 2**20 for name, program in programs.items()}
    errors = "too large"  # plain scan in double precision would take gigabytes
    if shape[0] <= 2048:
        both = (error(library, shape, dtype) for dtype in (jnp.float32, jnp.float64))
        errors = ", ".join(f"{x:.0e}" for x in both)
    print(
        f"| {', '.join(map(str, shape))} | {fastest:.1f} | {speed(times, 'ours', 'plain'):.1f}"
        f" | {speed(times, 'ours', 'chunks'):.1f} | {mb['plain']:.1f} | {mb['chunks']:.1f}"
        f" | {mb['ours']:.1f} | {errors} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    titles = ("T, heads, size", "ms", "over plain", "over chunks")
    titles += ("plain, MB", "chunks, MB", "ours, MB", "error in 32 and 64 bits")
    print("| " + " | ".join(titles) + " |")
    print("| --- " * len(titles) + "|")
    for shape in [(64, 2, 4)] if args.quick else SHAPES:
        measure(shape, 2 if args.quick else args.rounds)


if __name__ == "__main__":
    main()
