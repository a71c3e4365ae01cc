"""Functions with the textbook formulas of their derivatives, as `ways` takes them."""

import jax.numpy as jnp


# `sin(x) * y`: smooth, nonlinear in one argument, linear in the other.


def sin_times(x, y):
    return jnp.sin(x) * y


def sin_times_tangent(x, y, t_x, t_y):
    return jnp.cos(x) * y * t_x + jnp.sin(x) * t_y


def sin_times_cotangents(x, y, ct):
    return jnp.cos(x) * y * ct, jnp.sin(x) * ct


# Products


def square(x):
    return x**2


def multiply(x, y):
    return x * y


def matvec(w, x):
    return w @ x


# Complex numbers


def abs_squared(z):
    return jnp.real(z) ** 2 + jnp.imag(z) ** 2


def abs_squared_cotangents(z, ct):
    return (2 * jnp.conj(z) * ct.astype(z.dtype),)


# Several outputs


def sin_and_cos(x):
    return jnp.sin(x), jnp.cos(x)
