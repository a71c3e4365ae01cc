"""Smooth step functions: the antiderivatives of surrogate slopes.

With these rules, the derivative of a step and the density agree to rounding also in the tails,
where autodiff of the step suffers from cancellation.
"""

import math

import jax
import jax.numpy as jnp

from .._rules.elementwise import elementwise


def _abs(u):
    """`|u|`, with the derivative zero at zero: a density has its maximum there."""
    return u * jnp.sign(u)


def softsign_density(out, u):
    del out
    return 1 / (1 + _abs(u)) ** 2


@elementwise(derivative=softsign_density)
def softsign(u):
    """From minus one to one: the density has area two."""
    return jnp.sign(u) / (1 + 1 / jnp.abs(u))  # u / (1 + |u|), and not NaN at infinity


def cauchy_density(out, u):
    del out
    return 0.5 / (1 + (math.pi / 2 * u) ** 2)


@elementwise(derivative=cauchy_density)
def cauchy(u):
    # Not `0.5 + arctan(...) / pi`, which cancels in the left tail.
    return jnp.arctan2(jnp.ones_like(u), -math.pi / 2 * u) / math.pi


def logistic_density(out, u):
    del out
    return jax.nn.sigmoid(u) * jax.nn.sigmoid(-u)


logistic = elementwise(jax.nn.sigmoid, logistic_density)


def normal_density(out, u):
    del out
    return jnp.exp(-(u**2)) / math.sqrt(math.pi)


@elementwise(derivative=normal_density)
def normal(u):
    """The normal distribution of variance one half."""
    return 0.5 * jax.scipy.special.erfc(-u)


def gaussian_density(v, sigma):
    slope = 1 / (math.sqrt(2) * sigma)
    return slope * normal_density(None, slope * v)


def gaussian(v, sigma):
    return normal(v / (math.sqrt(2) * sigma))


def tent_density(out, u):
    del out
    return jnp.maximum(1 - _abs(u), 0)


@elementwise(derivative=tent_density)
def tent(u):
    tail = 0.5 * jnp.maximum(1 - jnp.abs(u), 0) ** 2
    return jnp.where(u < 0, tail, 1 - tail)


def box_density(out, u):
    del out
    return jnp.heaviside(0.5 - jnp.abs(u), jnp.full((), 0.5, u.dtype))


@elementwise(derivative=box_density)
def box(u):
    return jnp.clip(u + 0.5, 0, 1)


def ramp_slope(out, v):
    del out
    return jnp.heaviside(v, jnp.full((), 0.5, v.dtype))


@elementwise(derivative=ramp_slope)
def ramp(v):
    return jnp.maximum(v, 0)
