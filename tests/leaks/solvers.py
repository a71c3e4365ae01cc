"""Loops and solvers behind a rule, checkpoints, run-time checks."""

import equinox as eqx
import jax
import jax.numpy as jnp

from .compositions import both_ways, x, xs, ys
from .registry import both, ran, shape


@both
def while_loop_behind_a_rule(ruled):
    """`z = cos(a * z)`, with the derivative of the implicit function theorem. Reverse mode,
    which JAX lacks here: https://github.com/jax-ml/jax/issues/18311"""

    def solve(a):
        step = lambda state: (state[0] + 1, jnp.cos(a * state[1]))
        return jax.lax.while_loop(lambda state: state[0] < 120, step, (0, a))[1]

    def unrolled(a):
        return jax.lax.fori_loop(0, 120, lambda _, z: jnp.cos(a * z), a)

    def tangent(a, t_a):
        z = f(a)
        return -jnp.sin(a * z) * z / (1 + a * jnp.sin(a * z)) * t_a

    f = ruled(solve, tangent, lambda a, ct: (tangent(a, ct),), plain=unrolled)
    total = lambda v: jnp.sum(jax.vmap(f)(v))
    loop = lambda x: jax.lax.scan(lambda x, y: (f(x * y / 2), None), x, ys())[0]
    return both_ways(f, x()), both_ways(total, jnp.abs(xs())), both_ways(loop, x())


@shape
def adjoint_of_an_ode(rules):
    """Fixed steps, and a backward pass that is a scan of its own."""

    def step(y, rate):
        return y + 0.1 * rate * jnp.sin(y)

    def states(y, rate):
        return jax.lax.scan(lambda y, _: (step(y, rate), y), y, None, length=10)

    def solve(y, rate):
        return states(y, rate)[0]

    def fwd(y, rate):
        out, path = states(y, rate)
        return out, ran((path, rate))

    def bwd(residuals, ct):
        path, rate = residuals

        def back(carry, y):
            ct_y, ct_rate = carry
            more_y, more_rate = jax.vjp(step, y, rate)[1](ct_y)
            return (more_y, ct_rate + more_rate), None

        return jax.lax.scan(back, (ct, jnp.zeros_like(rate)), path, reverse=True)[0]

    f = rules.vjp(solve, fwd, bwd)
    grad = lambda y, rate: jax.grad(f, (0, 1))(y, rate)
    outer = jax.grad(eqx.filter_jit(f), (0, 1))(x(), x())
    return jax.jit(grad)(x(), x()), outer, jax.vmap(grad, in_axes=(0, None))(xs(), x())


@both
def linear_solve(ruled):
    """https://github.com/patrick-kidger/lineax/issues/101"""

    def tangent(matrix, b, t_matrix, t_b):
        return f(matrix, t_b - t_matrix @ f(matrix, b))

    def cotangents(matrix, b, ct):
        ct_b = f(matrix.T, ct)
        return -jnp.outer(ct_b, f(matrix, b)), ct_b

    f = ruled(lambda matrix, b: jnp.linalg.solve(matrix, b), tangent, cotangents)
    matrix = jnp.eye(3) + 0.1 * jnp.arange(9.0).reshape(3, 3)
    bs = jnp.arange(6.0).reshape(2, 3)
    loss = lambda matrix, bs: jnp.sum(jnp.sin(jax.vmap(f, in_axes=(None, 0))(matrix, bs)))
    outer = jax.grad(jax.jit(loss), (0, 1))(matrix, bs)
    return jax.jit(jax.grad(loss, (0, 1)))(matrix, bs), outer
