"""Smooth steps. Each has its density beside it where autodiff of the step would lose digits in
a tail, or would not have the value at a kink or at NaN that the documentation gives."""

import math

import jax
import jax.numpy as jnp

from .._rules.elementwise import elementwise


def _abs(u):
    """`|u|`, with the derivative zero at zero: a density has its maximum there."""
    return u * jnp.sign(u)


@elementwise(derivative=lambda _, u: 1 / (1 + _abs(u)) ** 2)
def softsign(u):
    """From minus one to one: the density has area two."""
    return jnp.sign(u) / (1 + 1 / jnp.abs(u))  # u / (1 + |u|), and not NaN at infinity


logistic = elementwise(jax.nn.sigmoid, lambda _, u: jax.nn.sigmoid(u) * jax.nn.sigmoid(-u))


def cauchy(u):
    # Not `0.5 + arctan(...) / pi`, which cancels in the left tail.
    return jnp.arctan2(jnp.ones_like(u), -math.pi / 2 * u) / math.pi


def normal(u):
    """The normal distribution of variance one half."""
    return 0.5 * jax.scipy.special.erfc(-u)


@elementwise(derivative=lambda _, u: jnp.maximum(1 - _abs(u), 0))
def tent(u):
    tail = 0.5 * jnp.maximum(1 - jnp.abs(u), 0) ** 2
    return jnp.where(u < 0, tail, 1 - tail)


def _above(u):
    """One above zero, a half at zero, and NaN at NaN."""
    return 0.5 + 0.5 * jnp.sign(u)


relu = elementwise(lambda u: jnp.maximum(u, 0), lambda _, u: _above(u))


@elementwise(
    derivative=(
        lambda _, u, end: _above(end - jnp.abs(u)),
        lambda _, u, end: jnp.sign(u) * _above(jnp.abs(u) - end),
    )
)
def ramp(u, end):
    return jnp.clip(u, -end, end)
