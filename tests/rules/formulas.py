"""Functions with the textbook formulas of their derivatives, as `ways` takes them."""

import jax
import jax.numpy as jnp
import jax.random as jr


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


def multiply_tangent(x, y, t_x, t_y):
    return t_x * y + x * t_y


def multiply_cotangents(x, y, ct):
    return y * ct, x * ct


def matvec(w, x):
    return w @ x


def matvec_cotangents(w, x, ct):
    return jnp.outer(ct, x), w.T @ ct


# Complex numbers


def abs_squared(z):
    return jnp.real(z) ** 2 + jnp.imag(z) ** 2


def abs_squared_cotangents(z, ct):
    return (2 * jnp.conj(z) * ct.astype(z.dtype),)


def to_circle(angle):
    return jax.lax.complex(jnp.cos(angle), jnp.sin(angle))


def to_circle_cotangents(angle, ct):
    return (jnp.real(jax.lax.complex(-jnp.sin(angle), jnp.cos(angle)) * ct),)


# Arguments and outputs that are not arrays of floats


def power(x, n):
    return x**n


def power_tangent(x, n, t_x, t_n):
    return n * x ** (n - 1) * t_x


def sin_where(x, mask):
    return jnp.where(mask, jnp.sin(x), x)


def sin_where_tangent(x, mask, t_x, t_mask):
    return jnp.where(mask, jnp.cos(x) * t_x, t_x)


def dropout(x, key):
    return jnp.where(jr.bernoulli(key, 0.5, x.shape), 2 * x, 0)


def dropout_cotangents(x, key, ct):
    return jnp.where(jr.bernoulli(key, 0.5, ct.shape), 2 * ct, 0), None


def max_and_index(x):
    return jnp.max(x), jnp.argmax(x)


def max_and_index_cotangents(x, ct):
    return (jnp.zeros_like(x).at[jnp.argmax(x)].set(ct[0]),)


def sin_and_cos(x):
    return jnp.sin(x), jnp.cos(x)


# Steps, and functions with a kink


def spike(v):
    return (v > 0).astype(v.dtype)


def soft_sign_slope(out, v):
    """The derivative of `jax.nn.soft_sign`, for a spike."""
    return 1 / (1 + jnp.abs(v)) ** 2


def leaky_relu(x, *, leak=0.1):
    return jnp.where(x > 0, x, leak * x)


def leaky_relu_slope(out, x, *, leak=0.1):
    return jnp.where(x > 0, 1.0, leak).astype(x.dtype)


# Straight-through: the derivative of rounding is one, in the middle of more.


def straight_round(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


def fake_quantize(x, scale):
    """To four bits."""
    return scale * jnp.clip(straight_round(x / scale), -8, 7)


def lsq(x, step):
    """To four bits."""
    g = 1 / (x.size * 7) ** 0.5
    step = jax.lax.stop_gradient(step * (1 - g)) + step * g
    return step * straight_round(jnp.clip(x / step, -8, 7))


# Linear maps and their transposes


def shift(x):
    return jnp.roll(x, 1)


def shift_cotangents(x, ct):
    return (jnp.roll(ct, -1),)


def cumulative_sum(x):
    return jnp.cumsum(x)


def cumulative_sum_cotangents(x, ct):
    return (jnp.cumsum(ct[::-1])[::-1],)


def sort(x):
    return jnp.sort(x)


def sort_cotangents(x, ct):
    return (ct[jnp.argsort(jnp.argsort(x))],)
