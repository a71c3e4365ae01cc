"""Layers that change or record a gradient, or solve an equation."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np

from .entry import entry
from .over_time import CHEAP, draws


# A line has as many arguments as there is room for.
# fmt: off
nn = eqg.nn
normal = draws(4)
SOME = {**CHEAP, "orders": ("value", "jvp", "vjp", "RR")}


def backward(rule, *args):
    """The identity of the first argument, whose cotangents are `rule(ct)`, in raw JAX."""

    @jax.custom_vjp
    def fn(x, *rest):
        return x

    fn.defvjp(lambda x, *rest: (x, None), lambda _, ct: rule(ct))
    return fn(*args)


# ---------------------------------------------------------------- gradient ops

TREE = {"a": normal(2, 3), "b": normal(3)}
double = lambda tree, factor: jax.tree.map(lambda x: factor * x, tree)
for name, layer, factor in (
    ("nn.GradientReversal", lambda: nn.GradientReversal(0.4), -0.4),
    ("nn.GradientReversal: the default", lambda: nn.GradientReversal(), -1.0),
):
    entry(name, lambda tree, layer=layer: layer()(tree), TREE, plain=lambda tree: tree,
        smooth=lambda tree, factor=factor: double(tree, factor),
        **{**CHEAP, "orders": ("value", "jvp", "vjp")})
def statistics(ct):
    x = jnp.concatenate([x.ravel() for x in jax.tree.leaves(ct)])
    one = jnp.ones((), x.dtype)
    return ct, (jnp.max(jnp.abs(x)), 0 * one, jnp.sqrt(jnp.sum(x**2)), one)


def with_statistics(tree, slot):
    empty = eqg.GradientStatistics()
    fields = lambda slot: (slot.max, slot.nonfinite, slot.norm, slot.steps)
    return nn.GradientProbe(eqx.tree_at(fields, empty, slot))(tree)


ZEROS = tuple(np.zeros(()) for _ in range(4))
entry("nn.GradientProbe", with_statistics, TREE, ZEROS, plain=ft.partial(backward, statistics),
    **CHEAP)
entry("nn.GradientProbe: the whole gradient", lambda x, slot: nn.GradientProbe(slot)(x),
    normal(3), np.zeros(3), plain=lambda x, slot: x + slot, **CHEAP)


# ---------------------------------------------------------------- fixed points


class Cell(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x, z):
        return jnp.tanh(self.weight @ z + self.bias + x)


def fixed_point(backward, x, weight, bias, z0):
    return nn.FixedPoint(Cell(weight, bias), 3, backward=backward)(x, z0)


def steps(x, weight, bias, z0):
    start = jnp.zeros_like(x) if z0 is None else jax.lax.stop_gradient(z0)
    step = lambda z, _: (Cell(weight, bias)(x, z), None)
    return jax.lax.scan(step, start, None, length=60)[0]


for method, z0, options in (
    ("implicit", None, {**SOME, "orders": ("value", "jvp", "vjp", "RF")}),
    ("fixed_point", normal(3), CHEAP),
):
    entry(f"nn.FixedPoint: {method}", ft.partial(fixed_point, method), normal(3),
        normal(3, 3, scale=0.3), normal(3), z0, plain=steps,
        **{**options, "tolerance": 1e-8, "leaks": False})
