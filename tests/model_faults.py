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


class Cell(eqx.Module):
    weight: Array
    bias: Array
    act: Callable[..., Any] = eqx.field(static=True)

    def __init__(self, seed, act=jnp.tanh, n=3):
        self.weight, self.bias = normal(seed, n, n), normal(seed + 100, n)
        self.act = act

    def __call__(self, h, x):
        return self.act(self.weight @ h + self.bias + x)


class Recurrent(eqx.Module):
    cell: Cell
    scan: Callable[..., Any] = eqx.field(static=True)

    def __init__(self, seed, act=jnp.tanh, scan=jax.lax.scan):
        self.cell, self.scan = Cell(seed, act), scan

    def __call__(self, x):
        def step(h, _):
            return self.cell(h, x), None

        return self.scan(step, jnp.zeros_like(x), jnp.arange(4))[0]


class Stack(eqx.Module):
    layers: tuple[Any, ...]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


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


def with_rule(fn, fwd, bwd):
    decorated = eqg.custom_vjp(fn)
    decorated.def_fwd(fwd)
    decorated.def_bwd(bwd)
    return decorated


def _affine(weight, bias, x):
    return weight @ x + bias


def _affine_fwd(weight, bias, x):
    return _affine(weight, bias, x), (weight, x)


UP_TO_1 = ("layers[0].weight", "layers[0].bias", "layers[1].weight", "layers[1].bias")
LAYER_0 = UP_TO_1[:2]

# ---------------------------------------------------------------- rules of a layer


@_fault("layers[1].bias", layer="layers[1]", function="_affine")
def wrong_sign_of_a_bias():
    bwd = lambda res, ct: (jnp.outer(ct, res[1]), -ct, res[0].T @ ct)
    return dense_stack(with_rule(_affine, _affine_fwd, bwd))


@_fault("layers[1].bias", layer="layers[1]", function="_affine", kind="cut")
def missing_cotangent_of_a_bias():
    bwd = lambda res, ct: (jnp.outer(ct, res[1]), jnp.zeros_like(ct), res[0].T @ ct)
    return dense_stack(with_rule(_affine, _affine_fwd, bwd))


@_fault("layers[1].weight", layer="layers[1]", function="_affine")
def transposed_gradient_of_a_square_weight():
    bwd = lambda res, ct: (jnp.outer(res[1], ct), ct, res[0].T @ ct)
    return dense_stack(with_rule(_affine, _affine_fwd, bwd))


@_fault("layers[1].bias", layer="layers[1]", function="_affine")
def second_leaf_wrong_by_one_in_a_thousand():
    bwd = lambda res, ct: (jnp.outer(ct, res[1]), 1.001 * ct, res[0].T @ ct)
    return dense_stack(with_rule(_affine, _affine_fwd, bwd))


@_fault("layers[1].weight", layer="layers[1]", function="_affine")
def one_row_of_a_weight_missing():
    bwd = lambda res, ct: (jnp.outer(ct, res[1]).at[2].set(0.0), ct, res[0].T @ ct)
    return dense_stack(with_rule(_affine, _affine_fwd, bwd))


# The error of the bias in single precision is less than that of rounding.
@_fault(*LAYER_0, "layers[1].weight", layer="")
def float16_in_a_backward_rule():
    def bwd(res, ct):
        ct = ct.astype(jnp.float16).astype(ct.dtype)
        return jnp.outer(ct, res[1]), ct, res[0].T @ ct

    return dense_stack(with_rule(_affine, _affine_fwd, bwd))


def _batched(weight, bias, x):
    return x @ weight.T + bias[None]


def _batched_loss(model, xs):
    return jnp.mean((model(xs) - 0.3) ** 2)


def _batched_stack(reduce):
    rule = with_rule(
        _batched,
        lambda weight, bias, x: (_batched(weight, bias, x), (weight, x)),
        lambda res, ct: (ct.T @ res[1], reduce(ct), ct @ res[0]),
    )
    whole = lambda weight, bias, x: jnp.tanh(_batched(weight, bias, x))
    layers = (Dense(0, whole), Dense(1, rule), Dense(2, whole))
    return _batched_loss, Stack(layers), DATA[:3]


@_fault("layers[1].bias", layer="layers[1]", function="_batched")
def summed_over_the_wrong_axis():
    return _batched_stack(lambda ct: jnp.sum(ct, 1))


# ---------------------------------------------------------------- rules of an activation


def square(x):
    return x**2


@_fault(*LAYER_0, layer="layers[1]", function="square")
def missing_factor():
    rule = with_rule(square, lambda x: (x**2, x), lambda x, ct: (x * ct,))
    layers = (Dense(0), Then(rule), Dense(2))
    return loss, Stack(layers), DATA


def smooth(x):
    return jnp.tanh(x)


@_fault(*LAYER_0, layer="layers[1]", function="smooth")
def stale_residual():
    rule = with_rule(smooth, lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * (1 - x**2),))
    return between(rule)


@_fault(*LAYER_0, layer="layers[1]", function="raw")
def wrong_rule_of_jax():
    @jax.custom_jvp
    def raw(x):
        return jnp.sin(x)

    raw.defjvp(lambda p, t: (raw(*p), jnp.sin(p[0]) * t[0]))
    return between(raw)


@_fault(*LAYER_0, layer="layers[1]", function="raw")
def wrong_reverse_rule_of_jax():
    @jax.custom_vjp
    def raw(x):
        return jnp.sin(x)

    raw.defvjp(lambda x: (raw(x), x), lambda x, ct: (1.01 * ct * jnp.cos(x),))
    return between(raw)


@_fault("layers[0].bias", "layers[0].weight", layer="layers[1]", function="square")
def wrong_rule_under_checkpoint():
    rule = with_rule(square, lambda x: (x**2, x), lambda x, ct: (3 * x * ct,))
    inner = Then(jax.checkpoint(lambda x: rule(x)))
    return loss, Stack((Dense(0), inner, Dense(2))), DATA


@_fault("layers[0].bias", "layers[0].weight", layer="layers[1]", function="square")
def wrong_rule_in_a_branch():
    rule = with_rule(square, lambda x: (x**2, x), lambda x, ct: (3 * x * ct,))
    branch = lambda x: jax.lax.cond(jnp.sum(x) > -99.0, rule, jnp.sin, x)
    return between(branch)


@_fault(*LAYER_0, layer="layers[1]", function="square")
def wrong_rule_beside_a_right_one():
    rule = with_rule(square, lambda x: (x**2, x), lambda x, ct: (3 * x * ct,))
    right = with_rule(smooth, lambda x: (smooth(x),) * 2, lambda y, ct: (ct * (1 - y**2),))
    layers = (Dense(0), Then(lambda x: right(rule(right(x)))), Dense(2))
    return loss, Stack(layers), DATA


# ---------------------------------------------------------------- in loops


@_fault(
    *UP_TO_1,
    "layers[2].cell.weight",
    "layers[2].cell.bias",
    layer="layers[2].cell",
    function="smooth",
)
def wrong_rule_deep_in_a_scan():
    rule = with_rule(smooth, lambda x: (smooth(x),) * 2, lambda y, ct: (ct * (1 - y),))
    layers = (Dense(0), Dense(1), Recurrent(2, rule), Dense(3))
    return loss, Stack(layers), DATA


@_fault(
    "layers[0].cell.weight", "layers[0].cell.bias", layer="layers[0].cell", function="smooth"
)
def wrong_rule_in_a_filter_scan():
    rule = with_rule(smooth, lambda x: (smooth(x),) * 2, lambda y, ct: (ct * (1 - y),))
    layers = (Recurrent(2, rule, eqg.filter_scan), Dense(3))
    return loss, Stack(layers), DATA


@_fault(
    "layers[1].cell.weight",
    "layers[1].cell.bias",
    *LAYER_0,
    layer="layers[1].cell",
    kind="stopped",
)
def detached_state_in_a_scan():
    detached = lambda h: jax.lax.stop_gradient(0.5 * h) + 0.5 * jnp.tanh(h)
    return loss, Stack((Dense(0), Recurrent(1, detached), Dense(3))), DATA


# ---------------------------------------------------------------- gradients that are cut


class Scaled(eqx.Module):
    scale: Array
    fn: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, x):
        return self.fn(self.scale, x)


def _stack_scaled(fn, scale=0.8):
    return loss, Stack((Dense(0), Scaled(jnp.asarray(scale), fn), Dense(2))), DATA


@_fault("layers[1].scale", layer="layers[1]", kind="stopped")
def stop_gradient_left_in():
    return _stack_scaled(lambda scale, x: jax.lax.stop_gradient(scale) * x)


@_fault(*LAYER_0, layer="layers[1]", kind="stopped")
def stop_gradient_in_a_normalization():
    norm = lambda x: x / jax.lax.stop_gradient(jnp.sqrt(1 + jnp.sum(x**2)))
    return between(norm)


@_fault("layers[1].scale", layer="layers[1]", kind="cut")
def root_by_bisection():
    def root(scale, x):
        """`y + tanh(y) = scale * x` by a search that has no derivative."""

        def halve(bounds, _):
            low, high = bounds
            middle = (low + high) / 2
            is_low = middle + jnp.tanh(middle) < scale * 2.0
            return (jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)), None

        bounds = (jnp.full_like(scale, -4.0), jnp.full_like(scale, 4.0))
        (low, _), _ = jax.lax.scan(halve, bounds, length=60)
        return low * x

    return _stack_scaled(root)


# ---------------------------------------------------------------- other rules


@_fault("table", layer="Embedding", function="lookup")
def repeated_tokens_overwrite_each_other():
    def lookup(table, tokens):
        return table[tokens]

    def bwd(res, ct):
        table, tokens = res
        return jnp.zeros_like(table).at[tokens].set(ct), None

    rule = with_rule(lookup, lambda t, i: (t[i], (t, i)), bwd)

    class Embedding(eqx.Module):
        table: Array

        def __call__(self, tokens):
            return jnp.tanh(rule(self.table, tokens))

    tokens = jnp.array([0, 2, 2, 1, 2])
    embed_loss = lambda model, tokens: jnp.sum(model(tokens) ** 2)
    return embed_loss, Embedding(normal(3, 4, 3)), tokens


def _solve(a, b):
    return jnp.linalg.solve(a, b)


@_fault("layers[0].weight", "layers[0].bias", layer="layers[1]", function="_solve")
def adjoint_solve_without_the_transpose():
    matrix = jnp.eye(3) * 2 + normal(11, 3, 3)
    rule = with_rule(
        _solve,
        lambda a, b: (_solve(a, b), a),
        lambda a, ct: (jnp.zeros_like(a), jnp.linalg.solve(a, ct)),
    )
    return between(lambda x: rule(matrix, x))


@_fault("layers[1].scale", *LAYER_0, layer="layers[1]", function="fixed_point")
def fixed_point_with_one_step_backwards():
    step = lambda scale, x, y: jnp.tanh(scale * y + x)

    def fixed_point(scale, x):
        y = jnp.zeros_like(x)
        return jax.lax.scan(lambda y, _: (step(scale, x, y), None), y, length=200)[0]

    def fwd(scale, x):
        y = fixed_point(scale, x)
        return y, (scale, x, y)

    def bwd(res, ct):
        scale, x, y = res
        return jax.vjp(lambda scale, x: step(scale, x, y), scale, x)[1](ct)

    return _stack_scaled(with_rule(fixed_point, fwd, bwd), 0.5)


@_fault("kernel", layer="Phase", function="power")
def conjugate_missing_in_a_complex_rule():
    @eqg.custom_jvp
    def power(z):
        return jnp.abs(z) ** 2

    def power_jvp(primals, tangents):
        (z,), (t_z,) = primals, tangents
        return power(z), 2 * jnp.real(z * t_z)  # conj(z)

    power.def_jvp(power_jvp)

    class Phase(eqx.Module):
        kernel: Array

        def __call__(self, x):
            return power(self.kernel * jax.lax.complex(x, jnp.zeros_like(x)))

    return loss, Phase(jax.lax.complex(normal(1, 3), normal(2, 3))), DATA


@_fault("layers[1].weight", layer="layers[1]", function="_affine")
def factor_of_a_bfloat16_weight():
    bwd = lambda res, ct: (1.5 * jnp.outer(ct, res[1]), ct, res[0].T @ ct)
    fn, model, data = dense_stack(with_rule(_affine, _affine_fwd, bwd))
    half = lambda x: x.astype(jnp.bfloat16)
    return fn, jax.tree.map(half, model), jnp.asarray(data, jnp.bfloat16)


@_fault(*LAYER_0, layer="layers[0]", kind="not finite")
def root_of_zero_behind_a_mask():
    root = lambda x: jnp.where(x > 9.0, jnp.sqrt(x * 0.0), x)
    return between(root)


@_fault(*LAYER_0, layer="layers[0]", kind="modes disagree")
def wrong_forward_rule_beside_a_right_reverse_rule():
    rule = with_rule(smooth, lambda x: (smooth(x),) * 2, lambda y, ct: (ct * (1 - y**2),))
    rule.def_jvp(lambda p, t: (rule(*p), 2 * t[0]))
    return between(rule)
