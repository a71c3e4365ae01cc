"""Claim: in eager mode, a call of `jax_custom_jvp` or `jax_custom_vjp` takes at most a fifth of
JAX's Python time. A gradient takes 0.8 to 1.5 times as long.

The same rules of two numbers, given to both. "us" is the median CPU time of the process for
one run, "ratio" the median over rounds of its ratio to JAX's in the same round.

    python benchmarks/jax_drop_ins.py [--quick]
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import eqx_grads as eqg
import jax
import jax.numpy as jnp
from timing import busy_time, in_turn, repeated


def forward(custom_jvp: Callable[..., Any]):
    @custom_jvp
    def f(x, y):
        return jnp.sin(x) * y

    @f.defjvp
    def f_jvp(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return f(x, y), jnp.cos(x) * y * t_x + jnp.sin(x) * t_y

    return f


def reverse(custom_vjp: Callable[..., Any]):
    @custom_vjp
    def f(x, y):
        return jnp.sin(x) * y

    def f_fwd(x, y):
        return f(x, y), (x, y)

    def f_bwd(residuals, ct):
        x, y = residuals
        return ct * jnp.cos(x) * y, ct * jnp.sin(x)

    f.defvjp(f_fwd, f_bwd)
    return f


PROGRAMS = {
    "eager call": lambda f: f,
    "eager gradient": lambda f: jax.grad(f, (0, 1)),
    "eager gradient, one argument": jax.grad,
}
DECORATORS = {
    "custom_jvp": (forward, jax.custom_jvp, eqg.jax_custom_jvp),
    "custom_vjp": (reverse, jax.custom_vjp, eqg.jax_custom_vjp),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, times = (3, 2) if quick else (15, 30)
    args = jnp.array(1.0), jnp.array(2.0)
    print(f"{'program':44} {'JAX, us':>8} {'us':>8} {'ratio':>6}")
    for name, (make, theirs, ours) in DECORATORS.items():
        for kind, program in PROGRAMS.items():
            variants = {
                "JAX": repeated(program(make(theirs)), args, times),
                "ours": repeated(program(make(ours)), args, times),
            }
            seconds = in_turn(variants, rounds, busy_time)
            pairs = zip(seconds["JAX"], seconds["ours"], strict=True)
            ratio = statistics.median(b / a for a, b in pairs)
            us = [1e6 * statistics.median(x) / times for x in seconds.values()]
            print(f"{name + ', ' + kind:44} {us[0]:8.0f} {us[1]:8.0f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
