"""Loops and solvers behind a rule, checkpoints, run-time checks."""

import equinox as eqx
import jax
import jax.numpy as jnp

from .compositions import x, xs, ys
from .registry import for_each, ran, shape
from .values import both_ways


def root(rules, kind):
    """`z = cos(a * z)`, found in a while loop, with the derivative of the implicit function
    theorem."""

    def solve(a):
        step = lambda state: (state[0] + 1, jnp.cos(a * state[1]))
        return jax.lax.while_loop(lambda state: state[0] < 120, step, (0, a))[1]

    def unrolled(a):
        return jax.lax.fori_loop(0, 120, lambda _, z: jnp.cos(a * z), a)

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

    if kind == "jvp":
        f = rules.jvp(solve, jvp, plain=unrolled)
    else:
        f = rules.vjp(solve, fwd, bwd, plain=unrolled)
    return f


@for_each(("jvp", "vjp"))
def while_loop_behind_a_rule(rules, kind):
    """Reverse mode, which JAX lacks here: https://github.com/jax-ml/jax/issues/18311"""
    f = root(rules, kind)
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


@for_each(("jvp", "vjp"))
def linear_solve(rules, kind):
    """https://github.com/patrick-kidger/lineax/issues/101"""

    def solve(matrix, b):
        return jnp.linalg.solve(matrix, b)

    def jvp(primals, tangents):
        (matrix, b), (t_matrix, t_b) = primals, tangents
        out = f(matrix, b)
        return out, ran(f(matrix, t_b - t_matrix @ out))

    def fwd(matrix, b):
        out = f(matrix, b)
        return out, ran((matrix, out))

    def bwd(residuals, ct):
        matrix, out = residuals
        ct_b = f(matrix.T, ct)
        return -jnp.outer(ct_b, out), ct_b

    f = rules.jvp(solve, jvp) if kind == "jvp" else rules.vjp(solve, fwd, bwd)
    matrix = jnp.eye(3) + 0.1 * jnp.arange(9.0).reshape(3, 3)
    bs = jnp.arange(6.0).reshape(2, 3)
    loss = lambda matrix, bs: jnp.sum(jnp.sin(jax.vmap(f, in_axes=(None, 0))(matrix, bs)))
    outer = jax.grad(jax.jit(loss), (0, 1))(matrix, bs)
    return jax.jit(jax.grad(loss, (0, 1)))(matrix, bs), outer
