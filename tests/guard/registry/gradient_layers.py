"""Layers that change a gradient, solve an equation, call the host, or have a loss."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry
from .over_time import CHEAP, draws


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
# A line has as many arguments as there is room for.
# fmt: off
for name, layer, factor in (
    ("nn.GradientReversal", lambda: nn.GradientReversal(0.4), -0.4),
    ("nn.GradientReversal: the default", lambda: nn.GradientReversal(), -1.0),
    ("nn.GradientScale", lambda: nn.GradientScale(2.3), 2.3),
):
    entry(
        name, lambda tree, layer=layer: layer()(tree), TREE, plain=lambda tree: tree,
        smooth=lambda tree, factor=factor: double(tree, factor),
        **{**CHEAP, "orders": ("value", "jvp", "vjp")},
    )
entry(
    "nn.GradientClip",
    lambda tree: nn.GradientClip(-0.5, 0.8)(tree),
    TREE,
    plain=ft.partial(
        backward, lambda ct: (jax.tree.map(lambda x: jnp.clip(x, -0.5, 0.8), ct),)
    ),
    **CHEAP,
)


def to_norm(max_norm, axis, ct):
    if axis is None:
        total = sum(jnp.sum(x**2) for x in jax.tree.leaves(ct))
        norms = jax.tree.map(lambda _: jnp.sqrt(total), ct)
    else:
        norm = lambda x: jnp.sqrt(jnp.sum(x**2, axis, keepdims=True))
        norms = jax.tree.map(norm, ct)
    scaled = lambda x, n: x * jnp.minimum(1, max_norm / n)
    return (jax.tree.map(scaled, ct, norms),)


for max_norm, axis, args in (
    (0.6, None, TREE), (50.0, None, TREE), (1.3, 1, {"a": normal(5, 3)}),
):
    entry(
        f"nn.GradientNormClip: {max_norm} over {axis}",
        lambda tree, n=max_norm, axis=axis: nn.GradientNormClip(n, axis)(tree), args,
        plain=ft.partial(backward, ft.partial(to_norm, max_norm, axis)), **CHEAP,
    )


def statistics(ct):
    x = jnp.concatenate([x.ravel() for x in jax.tree.leaves(ct)])
    one = jnp.ones((), x.dtype)
    return ct, (jnp.max(jnp.abs(x)), 0 * one, jnp.sqrt(jnp.sum(x**2)), one)


def with_statistics(tree, slot):
    empty = eqg.GradientStatistics()
    fields = lambda slot: (slot.max, slot.nonfinite, slot.norm, slot.steps)
    return nn.GradientProbe(eqx.tree_at(fields, empty, slot))(tree)


ZEROS = tuple(np.zeros(()) for _ in range(4))
entry(
    "nn.GradientProbe", with_statistics, TREE, ZEROS, plain=ft.partial(backward, statistics),
    **CHEAP,
)
entry(
    "nn.GradientProbe: the whole gradient", lambda x, slot: nn.GradientProbe(slot)(x),
    normal(3), np.zeros(3), plain=lambda x, slot: x + slot, **CHEAP,
)


# ---------------------------------------------------------------- host, fixed points


def convolve(parameters, x):
    return np.convolve(x, parameters["weight"]) + parameters["bias"]


def convolve_bwd(residuals, ct):
    parameters, x = residuals
    weight = np.correlate(ct, x, "valid")
    return {"weight": weight, "bias": np.sum(ct)}, np.correlate(
        ct, parameters["weight"], "valid"
    )


def host_layer(x, parameters):
    out = lambda parameters, x: jax.ShapeDtypeStruct((x.shape[0] + 2,), x.dtype)
    function = eqg.host_function(convolve, out=out)
    function.def_fwd(lambda parameters, x: (convolve(parameters, x), (parameters, x)))
    function.def_bwd(convolve_bwd)
    return nn.HostLayer(function, parameters)(x)


entry(
    "nn.HostLayer", host_layer, normal(5), {"weight": normal(3), "bias": normal()},
    plain=lambda x, p: jnp.convolve(x, p["weight"], precision="highest") + p["bias"],
    **{**CHEAP, "orders": ("value", "vjp")},
)


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
    entry(
        f"nn.FixedPoint: {method}", ft.partial(fixed_point, method), normal(3),
        normal(3, 3, scale=0.3), normal(3), z0, plain=steps,
        **{**options, "tolerance": 1e-8, "leaks": False},
    )


# ---------------------------------------------------------------- the head with its loss

LABELS = np.array([2, -1, 0, 4, 3, -1, 1])


def cross_entropy(x, weight, bias, labels, smoothing=0.0, z_loss=0.0, reduction="mean"):
    logits = x @ weight.T + (0 if bias is None else bias[None])
    log_z = jax.nn.logsumexp(logits, -1)
    counts = labels != -1
    right = jnp.take_along_axis(logits, jnp.where(counts, labels, 0)[:, None], 1)[:, 0]
    target = (1 - smoothing) * right + smoothing * jnp.mean(logits, -1)
    losses = jnp.where(counts, log_z - target + z_loss * log_z**2, 0)
    if reduction == "none":
        return losses
    return jnp.sum(losses) / (int(np.sum(LABELS != -1)) if reduction == "mean" else 1)


def head(options, x, weight, bias, labels):
    options = {"ignore_index": -1, "chunk": 3, **options}
    layer = nn.LinearCrossEntropy(4, 5, bias is not None, x.dtype, key=jr.key(0), **options)
    fields = lambda layer: (layer.weight, layer.bias)
    layer = eqx.tree_at(fields, layer, (weight, bias), is_leaf=lambda x: x is None)
    if bias is not None:
        linear = eqx.nn.Linear(4, 5, key=jr.key(0), dtype=x.dtype)
        linear = eqx.tree_at(fields, linear, (weight, bias))
        layer = nn.LinearCrossEntropy.from_layer(linear, **options)
    return layer(x, labels), layer.logits(x[0])


def head_plain(options, x, weight, bias, labels):
    names = {"label_smoothing": "smoothing"}
    options = {names.get(name, name): value for name, value in options.items()}
    logits = weight @ x[0] + (0 if bias is None else bias)
    return cross_entropy(x, weight, bias, labels, **options), logits


def ignored(x):
    return np.where((LABELS == -1)[:, None], np.inf, x)


for name, options, bias in (
    ("", {"label_smoothing": 0.1, "z_loss": 0.03}, None),
    (": sum", {"label_smoothing": 0.1, "z_loss": 0.03, "reduction": "sum"}, normal(5)),
    (": none", {"z_loss": 0.03, "reduction": "none"}, normal(5)),
):
    x, weight = normal(7, 4), normal(5, 4)
    entry(
        f"nn.LinearCrossEntropy{name}", ft.partial(head, options), x, weight, bias, LABELS,
        plain=ft.partial(head_plain, options), garbage=(ignored(x), weight, bias, LABELS),
        **SOME,
    )
