"""Implicit functions and fixed points."""

import equinox as eqx
import eqx_grads as eqg
import jax.numpy as jnp

from .registry import case, vectors


def _residual(y, a, b):
    return {"u": jnp.sinh(y["u"]) - a * b, "v": jnp.tanh(y["v"]) * 2 - jnp.sum(a) * y["u"] / 4}


def _closed_form(a, b):
    u = jnp.arcsinh(a * b)
    return {"u": u, "v": jnp.arctanh(jnp.sum(a) * u / 8)}


@case("implicit", reference=_closed_form)
def _():
    def step(state):
        i, u, ab = state
        return i + 1, u - (jnp.sinh(u) - ab) / jnp.cosh(u), ab

    is_early = lambda state: state[0] < 20

    @eqg.implicit(_residual)
    def solve(a, b):
        _, u, _ = eqg.filter_while_loop(is_early, step, (0, 0.1 * a, a * b))
        return {"u": u, "v": jnp.arctanh(jnp.sum(a) * u / 8)}

    return solve, vectors()


def _objective(w, x, y):
    return jnp.sum((x @ w - y) ** 2) + jnp.sum(w**2)


def _ridge(x, y):
    return jnp.linalg.solve(x.T @ x + jnp.eye(x.shape[1], dtype=x.dtype), x.T @ y)


@case("implicit: a minimum", reference=_ridge)
def _():
    solve = eqg.implicit(eqx.filter_grad(_objective))(_ridge)
    a, b = vectors()
    return solve, (jnp.stack([a, b, a * b]), a)
