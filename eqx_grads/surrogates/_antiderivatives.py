"""Smooth steps, each with its density for a derivative.

The two then agree to rounding in the tails as well, where autodiff of a step subtracts large
numbers.
"""

import math

import jax
import jax.numpy as jnp

from .._rules.elementwise import elementwise


def _abs(u):
    """Its derivative at zero, which is a maximum of all bumps, is zero."""
    return u * jnp.sign(u)


def softsign_density(out, u):
    del out
    return 1 / (1 + _abs(u)) ** 2


@elementwise(derivative=softsign_density)
def softsign(u):
    """Of area two, from minus one to one."""
    return jnp.sign(u) / (1 + 1 / jnp.abs(u))  # infinity is no exception


def cauchy_density(out, u):
    del out
    return 0.5 / (1 + (math.pi / 2 * u) ** 2)


@elementwise(derivative=cauchy_density)
def cauchy(u):
    # One half plus an arctangent would be exact to the right only.
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
    """Of variance one half."""
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
