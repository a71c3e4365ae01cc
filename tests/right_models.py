"""Models with a right gradient. A careless check would accuse many."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .model_faults import between, DATA, Dense


KEY = jr.key(5)
X0 = jnp.asarray(DATA[0])
ONES = jnp.ones(3)


def mean_square(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def relu_at_its_kink():
    """The second layer is zero, so that the input of its `relu` is."""
    model = eqx.nn.MLP(3, 2, 4, 2, key=KEY)
    zero = lambda m: (m.layers[1].weight, m.layers[1].bias)
    return mean_square, eqx.tree_at(zero, model, replace_fn=jnp.zeros_like), DATA


def max_pool_with_ties():
    """All entries of a window are equal."""
    layers = [eqx.nn.Conv2d(1, 2, 3, key=KEY), eqx.nn.MaxPool2d(2, 2)]
    return lambda m, x: jnp.sum(jnp.sin(m(x))), eqx.nn.Sequential(layers), jnp.ones((1, 6, 6))


def batch_norm_with_state():
    class Net(eqx.Module):
        dense: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.dense(x), state)

    def make(key):
        norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
        return Net(eqx.nn.Linear(3, 3, key=key), norm)

    def batch_loss(model, state, x):
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return jnp.mean((call(x, state)[0] - x) ** 2 * jnp.arange(1.0, 4.0)[None])

    return batch_loss, *eqx.nn.make_with_state(make)(KEY), jnp.asarray(DATA)


def filter_scan_auto():
    def fn(m, xs):
        step = lambda h, x: (m(h + x),) * 2
        h, hs = eqg.filter_scan(step, jnp.zeros(3), xs, checkpoint="auto")
        return jnp.sum((h + jnp.sum(hs, 0)) ** 2)

    return fn, Dense(1), jnp.asarray(DATA)


def float32_only():
    """The type of the state does not admit float64."""

    def fn(m, x):
        step = lambda h, x: (jnp.tanh(m * h + x).astype(jnp.float32), None)
        return jnp.sum(jax.lax.scan(step, jnp.zeros(3, jnp.float32), x)[0])

    return fn, jnp.full(3, 0.5, jnp.float32), jnp.asarray(DATA, jnp.float32)


def stiff_equation_by_implicit_euler():
    """Time constants of one and a million."""

    def fn(rates, y0):
        matrix = jnp.diag(-rates) + jnp.diag(rates[:2] / 2, -1)
        step = lambda y, _: (jnp.linalg.solve(jnp.eye(3) - 0.1 * matrix, y), None)
        return jnp.sum(jax.lax.scan(step, y0, length=20)[0] ** 2)

    return fn, jnp.array([1.0, 1e3, 1e6]), jnp.array([1.0, 2.0, 3.0])


def exponential_growth():
    """By twelve orders of magnitude."""
    step = lambda rate: lambda y, _: (y + 0.1 * rate * y, None)
    fn = lambda rate, y0: jnp.sum(jax.lax.scan(step(rate), y0, length=300)[0])
    return fn, jnp.array([1.0, 0.9, -0.5]), jnp.array([1.0, 2.0, 3.0])


def chaotic_map(n=30):
    """After 30 steps, a change of a parameter has grown by nine orders of magnitude. After 60
    steps, what changes the last digit changes all."""
    step = lambda r: lambda x, _: (r * x * (1 - x), None)
    fn = lambda r, x: jnp.sum(jax.lax.scan(step(r), x, length=n)[0])
    return fn, jnp.array([3.9, 3.7]), jnp.array([0.3, 0.4])


def a_hundred_thousand_kinks():
    """The slope between two kinks differs from the slope of steps across many."""
    fn = lambda m, kinks: jnp.mean(jnp.abs(m[0] - kinks)) + m[1] ** 2
    return fn, jnp.array([0.3, 0.2]), np.linspace(-1, 1, 100_001)


def parameters_of_very_different_size():
    fn = lambda m, x: jnp.sum(jnp.sin(m["a"] * 1e-9 * x)) + jnp.sum(jnp.exp(m["b"] * 1e6 * x))
    return fn, {"a": 1e9 * ONES, "b": 1e-6 * ONES, "n": 3}, X0


RIGHT: dict[str, Callable[[], tuple[Any, ...]]] = {
    "lasso_at_zero": lambda: (
        lambda m, x: jnp.mean((x @ m - 1.0) ** 2) + jnp.sum(jnp.abs(m)),
        jnp.zeros(3),
        DATA,
    ),
    # The gradient is zero, and so are the differences.
    "rounded_then_unused": lambda: between(lambda x: jnp.round(x * 3)),
    # Differences of this loss, which is a step function, are zero or infinite.
    "float16_inside": lambda: between(lambda x: jnp.sin(x.astype(jnp.float16)).astype(x.dtype)),
    "high_frequency": lambda: (
        lambda m: jnp.sum(jnp.sin(1e6 * m)),
        jnp.array([0.1, 0.2, 0.3]),
    ),
    "chaotic_map_of_60_steps": lambda: chaotic_map(60),
    **{
        make.__name__: make
        for make in (
            relu_at_its_kink,
            max_pool_with_ties,
            batch_norm_with_state,
            filter_scan_auto,
            float32_only,
            stiff_equation_by_implicit_euler,
            exponential_growth,
            chaotic_map,
            a_hundred_thousand_kinks,
            parameters_of_very_different_size,
        )
    },
}
