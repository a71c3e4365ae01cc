"""Claim: in eager mode, a call of `filter_custom_jvp` or `filter_custom_vjp` takes at most half
of Equinox's Python time. A gradient or its tracing takes at most 1.1 times as long.

A function of two arrays of 1000 elements, with the same rules. "us" is the median CPU time of
the process for one run, "ratio" the median over rounds of its ratio to Equinox's in the same
round. Compiled programs are not compared: what costs time there is what the rules compute.

    python benchmarks/drop_ins.py [--quick]
"""

import argparse
import statistics
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
from timing import busy_time, in_turn, repeated


def forward(package: Any):
    @package.filter_custom_jvp
    def f(x, y):
        return jnp.sin(x) * y

    @f.def_jvp
    def f_jvp(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return jnp.sin(x) * y, jnp.cos(x) * y * t_x + jnp.sin(x) * t_y

    return f


def reverse(package: Any):
    @package.filter_custom_vjp
    def f(xy):
        x, y = xy
        return jnp.sin(x) * y

    @f.def_fwd
    def f_fwd(perturbed, xy):
        return f(xy), None

    @f.def_bwd
    def f_bwd(residuals, grad_out, perturbed, xy):
        x, y = xy
        return grad_out * jnp.cos(x) * y, grad_out * jnp.sin(x)

    return lambda x, y: f((x, y))


def grad(f):
    return jax.grad(lambda x, y: jnp.sum(f(x, y)), (0, 1))


PROGRAMS = {
    "eager call": lambda f: f,
    "eager gradient": grad,
    "tracing a gradient": lambda f: lambda *args: jax.make_jaxpr(grad(f))(*args).consts,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, times = (3, 2) if quick else (15, 40)
    args = jnp.linspace(0.0, 1.0, 1000), jnp.ones(1000)
    print(f"{'program':40} {'Equinox, us':>12} {'us':>8} {'ratio':>6}")
    for name, make in (("filter_custom_jvp", forward), ("filter_custom_vjp", reverse)):
        for kind, program in PROGRAMS.items():
            variants = {
                package.__name__: repeated(program(make(package)), args, times)
                for package in (eqx, eqg)
            }
            seconds = in_turn(variants, rounds, busy_time)
            theirs, ours = (seconds[package.__name__] for package in (eqx, eqg))
            ratio = statistics.median(b / a for a, b in zip(theirs, ours, strict=True))
            us = [1e6 * statistics.median(x) / times for x in (theirs, ours)]
            print(f"{name + ', ' + kind:40} {us[0]:12.0f} {us[1]:8.0f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
