"""Models with a right gradient. A careless check would accuse many."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .model_faults import (
    _affine,
    _affine_fwd,
    between,
    Cell,
    DATA,
    Dense,
    loss,
    normal,
    Recurrent,
    Scaled,
    Stack,
    with_rule,
)


RIGHT: dict[str, Callable[[], tuple[Any, ...]]] = {}


def _right(make):
    RIGHT[make.__name__] = make
    return make


KEY = jr.key(5)


@_right
def right_rule():
    bwd = lambda res, ct: (jnp.outer(ct, res[1]), ct, res[0].T @ ct)
    return loss, Stack((Dense(0), Dense(1, with_rule(_affine, _affine_fwd, bwd)))), DATA


@_right
def relu_network():
    model = eqx.nn.MLP(3, 2, 32, 2, key=KEY)
    return lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2), model, DATA


@_right
def relu_at_its_kink():
    """The second layer is zero, so that the input of its `relu` is."""
    model = eqx.nn.MLP(3, 2, 4, 2, key=KEY)
    zero = lambda m: (m.layers[1].weight, m.layers[1].bias)
    model = eqx.tree_at(zero, model, replace_fn=jnp.zeros_like)
    return lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2), model, DATA


@_right
def lasso_at_zero():
    return (
        lambda m, x: jnp.mean((x @ m - 1.0) ** 2) + jnp.sum(jnp.abs(m)),
        jnp.zeros(3),
        DATA,
    )


@_right
def max_pool_with_ties():
    image = jnp.ones((1, 6, 6))  # all entries of a window are equal

    class Net(eqx.Module):
        conv: eqx.nn.Conv2d
        pool: eqx.nn.MaxPool2d

        def __call__(self, x):
            return self.pool(self.conv(x))

    model = Net(eqx.nn.Conv2d(1, 2, 3, key=KEY), eqx.nn.MaxPool2d(2, 2))
    return lambda m, x: jnp.sum(jnp.sin(m(x))), model, image


@_right
def batch_norm_with_state():
    class Net(eqx.Module):
        dense: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.dense(x), state)

    def make(key):
        norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
        return Net(eqx.nn.Linear(3, 3, key=key), norm)

    model, state = eqx.nn.make_with_state(make)(KEY)

    def batch_loss(model, state, x):
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, _ = call(x, state)
        return jnp.mean((y - x) ** 2 * jnp.arange(1.0, 4.0)[None])

    return batch_loss, model, state, jnp.asarray(DATA)


@_right
def dropout_with_a_key():
    model = eqx.nn.Sequential([eqx.nn.Linear(3, 8, key=KEY), eqx.nn.Dropout(0.5)])

    def drop_loss(model, x, *, key):
        return jnp.mean(model(x, key=key) ** 2)

    return lambda m, x: drop_loss(m, x, key=jr.key(3)), model, jnp.asarray(DATA[0])


@_right
def gru_of_ours():
    model = eqg.nn.GRU(3, 4, key=KEY)
    return lambda m, x: jnp.sum(m(x)[0] ** 2), model, jnp.asarray(DATA)


def _scan_with(**options):
    class Net(eqx.Module):
        cell: Cell

        def __call__(self, xs):
            step = lambda h, x: (self.cell(h, x),) * 2
            h, hs = eqg.filter_scan(step, jnp.zeros(3), xs, **options)
            return h + jnp.sum(hs, 0)

    return lambda m, x: jnp.sum(m(x) ** 2), Net(Cell(1)), jnp.asarray(DATA)


for _option in ("auto", "sqrt"):
    RIGHT[f"filter_scan_{_option}"] = lambda option=_option: _scan_with(checkpoint=option)


@_right
def branches_and_a_loop_without_gradient():
    def fn(x):
        n = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.asarray(0))
        return jax.lax.cond(n > 2, jnp.sin, jnp.cos, x)

    return between(fn)


@_right
def while_loop_in_forward_mode():
    def power(scale, x):
        body = lambda c: (c[0] + 1, c[1] * scale)
        return jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.asarray(0), x))[1]

    return loss, Stack((Dense(0), Scaled(jnp.asarray(0.8), power))), DATA


@_right
def reverse_rule_without_forward_mode():
    @jax.custom_vjp
    def raw(x):
        return jnp.sin(x)

    raw.defvjp(lambda x: (raw(x), x), lambda x, ct: (ct * jnp.cos(x),))
    return between(raw)


@_right
def rounded_then_unused():
    """The gradient is zero, and so are the differences."""
    return between(lambda x: jnp.round(x * 3))


@_right
def complex_parameters():
    model = jax.lax.complex(normal(1, 3, 3), normal(2, 3, 3))

    def fn(m, x):
        z = m @ jax.lax.complex(x, jnp.zeros_like(x))
        return jnp.sum(jnp.real(z * jnp.conj(z)) ** 2) + jnp.sum(jnp.imag(z) ** 3)

    return fn, model, jnp.asarray(DATA[0])


@_right
def bfloat16_leaves():
    fn, model, data = between(jnp.sin)
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    return fn, model, jnp.asarray(data, jnp.bfloat16)


@_right
def float16_inside():
    """Differences of this loss, which is a step function, are zero or infinite."""
    return between(lambda x: jnp.sin(x.astype(jnp.float16)).astype(x.dtype))


@_right
def float32_only():
    """The type of the state does not admit float64."""

    def fn(m, x):
        step = lambda h, x: (jnp.tanh(m * h + x).astype(jnp.float32), None)
        return jnp.sum(jax.lax.scan(step, jnp.zeros(3, jnp.float32), x)[0])

    return fn, jnp.full(3, 0.5, jnp.float32), jnp.asarray(DATA, jnp.float32)


# ---------------------------------------------------------------- stiff


@_right
def stiff_equation_by_implicit_euler():
    """Time constants of one and a million."""

    def fn(rates, y0):
        matrix = jnp.diag(-rates) + jnp.diag(rates[:2] / 2, -1)
        step = lambda y, _: (jnp.linalg.solve(jnp.eye(3) - 0.1 * matrix, y), None)
        return jnp.sum(jax.lax.scan(step, y0, length=20)[0] ** 2)

    return fn, jnp.array([1.0, 1e3, 1e6]), jnp.array([1.0, 2.0, 3.0])


@_right
def exponential_growth():
    """By twelve orders of magnitude."""

    def fn(rate, y0):
        step = lambda y, _: (y + 0.1 * rate * y, None)
        return jnp.sum(jax.lax.scan(step, y0, length=300)[0])

    return fn, jnp.array([1.0, 0.9, -0.5]), jnp.array([1.0, 2.0, 3.0])


@_right
def ill_conditioned_solve():
    """A Hilbert matrix with the condition number 5e5."""
    n = 5
    hilbert = 1 / (np.arange(n)[:, None] + np.arange(n) + 1.0)

    def fn(matrix, b):
        return jnp.sum(jnp.linalg.solve(matrix, b) ** 2)

    return fn, jnp.asarray(hilbert, jnp.float32), jnp.ones(n, jnp.float32)


@_right
def chaotic_map():
    """After 30 steps, a change of a parameter has grown by nine orders of magnitude."""

    def fn(r, x):
        step = lambda x, _: (r * x * (1 - x), None)
        return jnp.sum(jax.lax.scan(step, x, length=30)[0])

    return fn, jnp.array([3.9, 3.7]), jnp.array([0.3, 0.4])


@_right
def chaotic_map_of_60_steps():
    """By thirteen orders of magnitude: what changes the last digit changes all."""

    def fn(r, x):
        step = lambda x, _: (r * x * (1 - x), None)
        return jnp.sum(jax.lax.scan(step, x, length=60)[0])

    return fn, jnp.array([3.9, 3.7]), jnp.array([0.3, 0.4])


@_right
def a_hundred_thousand_kinks():
    """The slope between two kinks differs from the slope of steps across many."""
    kinks = np.linspace(-1, 1, 100_001)
    fn = lambda m, kinks: jnp.mean(jnp.abs(m[0] - kinks)) + m[1] ** 2
    return fn, jnp.array([0.3, 0.2]), kinks


@_right
def high_frequency():
    return lambda m: jnp.sum(jnp.sin(1e6 * m)), jnp.array([0.1, 0.2, 0.3])


@_right
def parameters_of_very_different_size():
    fn = lambda m, x: jnp.sum(jnp.sin(m["a"] * 1e-9 * x)) + jnp.sum(jnp.exp(m["b"] * 1e6 * x))
    return fn, {"a": jnp.full(3, 1e9), "b": jnp.full(3, 1e-6), "n": 3}, jnp.asarray(DATA[0])


@_right
def recurrent_stack():
    return loss, Stack((Recurrent(0), Dense(1), Recurrent(2, jnp.sin))), DATA
