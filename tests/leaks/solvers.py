"""Loops and solvers behind a rule, checkpoints, run-time checks, Taylor mode."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.jet import jet  # noqa: TID251, a transformation that has no other path

from .compositions import x, xs, ys
from .modules import layer_of
from .registry import Fault, for_each, op_of, ran, shape
from .values import both_ways


def implicit(rules, kind):
    """`solve(a)` is the `z` with `z = cos(a * z)`, found by a while loop, with the derivative
    of the implicit function theorem."""

    def solve(a):
        far = lambda state: jnp.abs(state[0] - state[1]) > 1e-6
        step = lambda state: (state[1], jnp.cos(a * state[1]))
        return jax.lax.while_loop(far, step, (a, jnp.cos(a)))[1]

    def slope(a, z):
        return -jnp.sin(a * z) * z / (1 + a * jnp.sin(a * z))

    def jvp(primals, tangents):
        (a,), (t_a,) = primals, tangents
        z = f(a)
        return z, ran(slope(a, z) * t_a)

    def fwd(a):
        z = f(a)
        return z, ran((a, z))

    def bwd(residuals, ct):
        return (slope(*residuals) * ct,)

    f = rules.jvp(solve, jvp) if kind == "jvp" else rules.vjp(solve, fwd, bwd)
    return f
