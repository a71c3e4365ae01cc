"""Backward rules with a wrong number in them."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from ..rules.arguments import sample, two
from ..rules.formulas import (
    multiply,
)
from ..rules.ways import eqg_vjp, jax_vjp
from .registry import fault


# A constant factor


@fault("reverse", "5 times(?s:.)*a sum and a mean over 5")
def mean_not_divided_by_n(bug):
    def mean_square(x):
        return jnp.mean(x**2)

    cotangents = lambda x, ct: (2 * x * ct / (1 if bug else x.size),)
    return jax_vjp(mean_square, cotangents), (sample(5),)


@fault("reverse", "at `x`(?s:.)*entries are wrong")
def dropout_of_another_key(bug):
    def dropout(x, key):
        return jnp.where(jr.bernoulli(key, 0.5, x.shape), 2 * x, 0)

    cotangents = lambda x, key, ct: (dropout(ct, jr.split(key)[0] if bug else key), None)
    return eqg_vjp(dropout, cotangents), (sample(8), jr.key(0))


# The wrong argument, leaf, axis or place


@fault("reverse", "belongs to `[xy]`")
def cotangents_swapped(bug):
    cotangents = lambda x, y, ct: (x * ct, y * ct) if bug else (y * ct, x * ct)
    return jax_vjp(multiply, cotangents), two(3)


class LeakyLinear(eqx.Module):
    """A method's rule, with a field forgotten."""

    weight: jax.Array
    leak: jax.Array
    bug: bool = eqx.field(static=True)

    @eqg.custom_vjp
    def step(self, v, x):
        return self.leak * v + self.weight @ x

    @step.def_fwd
    def _step_fwd(self, v, x):
        return self.step(v, x), (self, v, x)

    @step.def_bwd
    def _step_bwd(residuals, ct):
        self, v, x = residuals
        leak = None if self.bug else jnp.dot(ct, v)
        ct_self = eqg.tangents.of(self, weight=jnp.outer(ct, x), leak=leak)
        return ct_self, self.leak * ct, self.weight.T @ ct


@fault("reverse", r"term of `self\.leak` is missing")
def field_of_self(bug):
    cell = LeakyLinear(sample(3, 2), jnp.array(0.9), bug)
    return LeakyLinear.step, (cell, sample(3, seed=1), sample(2, seed=2))


@fault("reverse", "at `x`(?s:.)*off by one")
def index_off_by_one(bug):
    """The cotangent of `x[i]`, with an integer argument."""

    def cotangents(x, i, ct):
        return jnp.zeros_like(x).at[i + 1 if bug else i].set(ct), None

    return eqg_vjp(lambda x, i: x[i], cotangents), (sample(5), jnp.array(0))


@fault("reverse", "at `x`")
def reverse_half_wrong_inside_scan(bug):
    """A cell with a wrong rule, inside a model without a rule."""
    tanh = jax_vjp(jnp.tanh, lambda x, ct: (ct if bug else (1 - jnp.tanh(x) ** 2) * ct,))

    def model(x):
        step = lambda h, x: (tanh(0.5 * h + x), None)
        return jax.lax.scan(step, jnp.zeros((), x.dtype), x)[0]

    return model, (sample(4),)


# Rules that are wrong on purpose, and then wrong


@fault("reverse", "at `x`")
def clipped_elsewhere(bug):
    clipped = lambda k: eqg_vjp(lambda x: x, lambda x, ct: (jnp.clip(ct, -k, k),))
    rule = clipped(0.12 if bug else 0.1)
    return rule, (sample(5),), {"nonlinear": True, "reference": clipped(0.1)}


# Kinks


@fault("reverse", "at `x`")
def both_sides_of_a_tie(bug):
    """Each is between the slopes at the kink, and both are not."""
    to_y = lambda x, y: (y >= x) if bug else (y > x)
    cts = lambda x, y, ct: (jnp.where(x >= y, ct, 0.0), jnp.where(to_y(x, y), ct, 0.0))
    return jax_vjp(lambda x, y: jnp.maximum(x, y), cts), (sample(3), sample(3).at[0].set(9.0))
