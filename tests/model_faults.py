"""Models with a gradient that is wrong in exactly one way: what `check_gradients` is measured
with. Each fault says which leaves are wrong, and in which layer and function the fault is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class ModelFault:
    """- `make`: returns the loss, the model and the arguments.
    - `wrong`: the leaves with a wrong gradient: exactly these.
    - `kind`, `layer`, `function`: what the report says of each of them; without a `layer`, the
        layer of the leaf.
    """

    make: Callable[[], tuple[Any, ...]]
    wrong: tuple[str, ...]
    layer: str
    function: str = ""
    kind: str = "wrong"


FAULTS: dict[str, ModelFault] = {}


def _fault(*wrong, **expected):
    def register(make):
        FAULTS[make.__name__] = ModelFault(make, wrong, **expected)
        return make

    return register


# ---------------------------------------------------------------- models


def normal(seed, *shape):
    return jr.normal(jr.key(seed), shape) / 2


class Dense(eqx.Module):
    """`act` is called as `act(weight, bias, x)`."""

    weight: Array
    bias: Array
    act: Callable[..., Any] = eqx.field(static=True)

    def __init__(self, seed, act=None, n=3):
        self.weight, self.bias = normal(seed, n, n), normal(seed + 100, n)
        self.act = _tanh_layer if act is None else act

    def __call__(self, x):
        return self.act(self.weight, self.bias, x)


def _tanh_layer(weight, bias, x):
    return jnp.tanh(weight @ x + bias)


class Then(eqx.Module):
    """A function between layers."""

    fn: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, x):
        return self.fn(x)


class Recurrent(eqx.Module):
    cell: Dense
    scan: Callable[..., Any] = eqx.field(static=True)

    def __init__(self, seed, act=jnp.tanh, scan=jax.lax.scan):
        self.cell = Dense(seed, lambda weight, bias, h: act(weight @ h + bias))
        self.scan = scan

    def __call__(self, x):
        step = lambda h, _: (self.cell(h + x), None)
        return self.scan(step, jnp.zeros_like(x), jnp.arange(4))[0]


class Stack(eqx.Module):
    layers: tuple[Any, ...]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(eqx.Module):
    scale: Array
    fn: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, x):
        return self.fn(self.scale, x)


def loss(model, xs):
    return jnp.mean((jax.vmap(model)(xs) - 0.3) ** 2)


DATA = np.asarray(normal(7, 5, 3))


def dense_stack(act, at=1, n=3):
    """Three layers; one has an activation with a rule."""
    layers = [Dense(seed, act if seed == at else None) for seed in range(n)]
    return loss, Stack(tuple(layers)), DATA


def between(fn):
    """A function between two layers."""
    return loss, Stack((Dense(0), Then(fn), Dense(2))), DATA


def scaled(fn, scale=0.8):
    return loss, Stack((Dense(0), Scaled(jnp.asarray(scale), fn), Dense(2))), DATA


def with_rule(fn, fwd, bwd):
    decorated = eqg.custom_vjp(fn)
    decorated.def_fwd(fwd)
    decorated.def_bwd(bwd)
    return decorated


LAYER_0 = ("layers[0].weight", "layers[0].bias")
LAYER_1 = ("layers[1].weight", "layers[1].bias")

# ---------------------------------------------------------------- rules of a layer


def _affine(weight, bias, x):
    return weight @ x + bias


def _affine_with(of_weight, of_bias):
    return with_rule(
        _affine,
        lambda weight, bias, x: (_affine(weight, bias, x), (weight, x)),
        lambda res, ct: (of_weight(ct, res[1]), of_bias(ct), res[0].T @ ct),
    )


# What the rule of the layer returns for its weight and for its bias.
OF_LAYER = {
    "missing_cotangent_of_a_bias": (jnp.outer, jnp.zeros_like),
    "second_leaf_wrong_by_one_in_a_thousand": (jnp.outer, lambda ct: 1.001 * ct),
}
for _name, (_of_weight, _of_bias) in OF_LAYER.items():
    FAULTS[_name] = ModelFault(
        lambda of=(_of_weight, _of_bias): dense_stack(_affine_with(*of)),
        LAYER_1[_of_weight is jnp.outer :][:1],
        "layers[1]",
        "_affine",
        "cut" if _of_bias is jnp.zeros_like else "wrong",
    )


# The error of the bias in single precision is less than that of rounding.
@_fault(*LAYER_0, "layers[1].weight", layer="")
def float16_in_a_backward_rule():
    def bwd(res, ct):
        ct = ct.astype(jnp.float16).astype(ct.dtype)
        return jnp.outer(ct, res[1]), ct, res[0].T @ ct

    return dense_stack(with_rule(_affine, lambda w, b, x: (_affine(w, b, x), (w, x)), bwd))


@_fault("layers[1].weight", layer="layers[1]", function="_affine")
def factor_of_a_bfloat16_weight():
    rule = _affine_with(lambda ct, x: 1.5 * jnp.outer(ct, x), lambda ct: ct)
    fn, model, data = dense_stack(rule)
    half = lambda x: x.astype(jnp.bfloat16)
    return fn, jax.tree.map(half, model), jnp.asarray(data, jnp.bfloat16)


# ---------------------------------------------------------------- rules of an activation


def square(x):
    return x**2


def smooth(x):
    return jnp.tanh(x)


def square_by(factor):
    return with_rule(square, lambda x: (x**2, x), lambda x, ct: (factor * x * ct,))


right_tanh = with_rule(smooth, lambda x: (smooth(x),) * 2, lambda y, ct: (ct * (1 - y**2),))
stale_tanh = with_rule(smooth, lambda x: (smooth(x), x), lambda x, ct: (ct * (1 - x**2),))
wrong_tanh = with_rule(smooth, lambda x: (smooth(x),) * 2, lambda y, ct: (ct * (1 - y),))


ACTIVATIONS = {
    "missing_factor": (square_by(1), "square"),
    "wrong_rule_in_a_branch_beside_a_right_one": (
        lambda x: right_tanh(jax.lax.cond(jnp.sum(x) > -99.0, square_by(3), jnp.sin, x)),
        "square",
    ),
    "stale_residual": (stale_tanh, "smooth"),
}
for _name, (_fn, _function) in ACTIVATIONS.items():
    FAULTS[_name] = ModelFault(lambda fn=_fn: between(fn), LAYER_0, "layers[1]", _function)


# ---------------------------------------------------------------- in loops

CELL_2 = ("layers[2].cell.weight", "layers[2].cell.bias")


@_fault(*LAYER_0, *LAYER_1, *CELL_2, layer="layers[2].cell", function="smooth")
def wrong_rule_deep_in_a_scan():
    return loss, Stack((Dense(0), Dense(1), Recurrent(2, wrong_tanh), Dense(3))), DATA


# ---------------------------------------------------------------- gradients that are cut


@_fault("layers[1].scale", layer="layers[1]", kind="stopped")
def stop_gradient_left_in():
    return scaled(lambda scale, x: jax.lax.stop_gradient(scale) * x)


# ---------------------------------------------------------------- other rules


@_fault("table", layer="Embedding", function="lookup")
def repeated_tokens_overwrite_each_other():
    def lookup(table, tokens):
        return table[tokens]

    bwd = lambda res, ct: (jnp.zeros_like(res[0]).at[res[1]].set(ct), None)
    rule = with_rule(lookup, lambda t, i: (t[i], (t, i)), bwd)

    class Embedding(eqx.Module):
        table: Array

        def __call__(self, tokens):
            return jnp.tanh(rule(self.table, tokens))

    embed_loss = lambda model, tokens: jnp.sum(model(tokens) ** 2)
    return embed_loss, Embedding(normal(3, 4, 3)), jnp.array([0, 2, 2, 1, 2])


@_fault("layers[1].scale", *LAYER_0, layer="layers[1]", function="fixed_point")
def fixed_point_with_one_step_backwards():
    step = lambda scale, x, y: jnp.tanh(scale * y + x)

    def fixed_point(scale, x):
        y = jnp.zeros_like(x)
        return jax.lax.scan(lambda y, _: (step(scale, x, y), None), y, length=200)[0]

    fwd = lambda scale, x: (fixed_point(scale, x), (scale, x, fixed_point(scale, x)))
    bwd = lambda res, ct: jax.vjp(lambda scale, x: step(scale, x, res[2]), *res[:2])[1](ct)
    return scaled(with_rule(fixed_point, fwd, bwd), 0.5)
