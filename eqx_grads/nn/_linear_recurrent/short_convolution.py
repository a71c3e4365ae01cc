"""Short causal convolutions over time, whose state is a window of the last inputs."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array


def make_convolution(key: Array, size: int, channels: int, dtype: Any) -> Array:
    """A filter for each channel, `(size, channels)`. A filter of one step is one at first."""
    if size == 1:
        return jnp.ones((1, channels), dtype)
    limit = size**-0.5
    return jr.uniform(key, (size, channels), dtype, -limit, limit)


def convolve(
    weight: Array, x: Array, window: Array, valid: Array | None
) -> tuple[Array, Array]:
    """The outputs, `(time, batch, channels)`, and the window, `(batch, size - 1, channels)`,
    after the last step that is `valid`. Valid steps come first."""
    steps, rows = x.shape[0], weight.shape[0] - 1
    x = jnp.concatenate([jnp.moveaxis(window, 1, 0), x])
    terms = (w[None, None] * x[i : i + steps] for i, w in enumerate(weight))
    y = ft.reduce(jnp.add, terms)
    if valid is None:
        end = x[steps:]
    else:
        index = jnp.sum(valid, 0)[None] + jnp.arange(rows)[:, None]
        end = jnp.take_along_axis(x, index[:, :, None], 0)
    return y, jnp.moveaxis(end, 0, 1)


def time_order(reverse: bool, valid: Array | None) -> Callable[[Array], Array]:
    """A function of `(time, batch, ...)` that reverses the order of the steps that count, and
    is its own inverse."""
    if not reverse:
        return lambda x: x
    if valid is None:
        return lambda x: jnp.flip(x, 0)
    times = jnp.arange(valid.shape[0])[:, None]
    index = jnp.where(valid, jnp.sum(valid, 0)[None] - 1 - times, times)
    return lambda x: jnp.take_along_axis(x, index[:, :, None], 0)
