"""Right rules over all kinds of arguments: `RIGHT`. `check_rule` may accuse none."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .faults.registry import Case
from .rules.arguments import away_from_zero, normals, well_apart
from .rules.formulas import (
    abs_squared,
    abs_squared_cotangents,
    dropout,
    dropout_cotangents,
    leaky_relu,
    leaky_relu_slope,
    multiply,
    multiply_cotangents,
    sin_times,
    sin_times_cotangents,
    sin_times_tangent,
    spike,
)
from .rules.ways import eqg_jvp, eqg_vjp, eqx_jvp, eqx_vjp, jax_jvp, jax_vjp


tangents = eqg.tangents


class Right(NamedTuple):
    """A right rule: `make(dtype, key)` returns `(fn, args, options)` for
    `check_rule(fn, *args, **options)`, or `None` where JAX has no such dtype."""

    make: Callable[[Any, jax.Array], Case | None]


RIGHT: dict[str, Right] = {}


def right(build):
    """Enter the decorated `build(dtype, key) -> (fn, args)` or `(fn, args, options)`."""

    @ft.wraps(build)
    def make(dtype, key):
        case = build(jnp.dtype(dtype), key)
        return case if case is None or len(case) == 3 else (*case, {})

    assert build.__name__ not in RIGHT
    RIGHT[build.__name__] = Right(make)
    return build


# One rule, written in every way


@right
def raw_jvp_with_symbolic_zeros(dtype, key):
    f = jax.custom_jvp(sin_times)

    def rule(primals, tans):
        x, y = primals
        t_x, t_y = (None if isinstance(t, SymbolicZero) else t for t in tans)
        t = tangents.add(tangents.scale(t_x, jnp.cos(x) * y), tangents.scale(t_y, jnp.sin(x)))
        return sin_times(x, y), jnp.zeros_like(x) if t is None else t

    f.defjvp(rule, symbolic_zeros=True)
    return f, normals(key, dtype, (4,), (4,))


@right
def raw_vjp_of_an_empty_array(dtype, key):
    return jax_vjp(jnp.sin, lambda x, ct: (jnp.cos(x) * ct,)), (jnp.zeros((0, 3), dtype),)


@right
def raw_nondiff_argnums(dtype, key):
    def apply(fn, x):
        return fn(x)

    f = jax.custom_jvp(apply, nondiff_argnums=(0,))
    f.defjvp(lambda fn, primals, tans: jax.jvp(fn, primals, tans))
    return f, (jnp.tanh, *normals(key, dtype, (3,)))


@right
def equinox_jvp(dtype, key):
    def tangent(x, y, t_x, t_y):
        from_x = tangents.scale(t_x, jnp.cos(x) * y)
        return tangents.add(from_x, tangents.scale(t_y, jnp.sin(x)))

    return eqx_jvp(sin_times, tangent), normals(key, dtype, (4,), (4,))


@right
def equinox_vjp(dtype, key):
    rule = eqx_vjp(
        lambda pair: sin_times(*pair), lambda pair, ct: sin_times_cotangents(*pair, ct)
    )
    return rule, (normals(key, dtype, (4,), (4,)),)


@right
def equinox_vjp_that_looks_at_perturbed(dtype, key):
    f = eqx.filter_custom_vjp(lambda pair: sin_times(*pair))
    f.def_fwd(lambda perturbed, pair: (sin_times(*pair), None))

    @f.def_bwd
    def bwd(residuals, ct, perturbed, pair):
        cts = sin_times_cotangents(*pair, ct)
        return tuple(c if p else None for c, p in zip(cts, perturbed, strict=True))

    return f, (normals(key, dtype, (2, 2), (2, 2)),)


@right
def eqg_jvp_with_symbolic_zeros(dtype, key):
    f = eqg.custom_jvp(sin_times)

    @f.def_jvp(symbolic_zeros=True)
    def jvp(primals, tans):
        (x, y), (t_x, t_y) = primals, tans
        from_x = tangents.scale(t_x, jnp.cos(x) * y)
        return f(x, y), tangents.add(from_x, tangents.scale(t_y, jnp.sin(x)))

    return f, normals(key, dtype, (2, 3), (2, 3))


@right
def eqg_vjp_with_perturbed(dtype, key):
    f = eqg.custom_vjp(sin_times)
    f.def_fwd(lambda x, y: (sin_times(x, y), (x, y)))

    @f.def_bwd
    def bwd(residuals, ct, *, perturbed):
        cts = sin_times_cotangents(*residuals, ct)
        return tuple(c if p else None for c, p in zip(cts, perturbed, strict=True))

    return f, normals(key, dtype, (4,), (4,))


@right
def eqg_vjp_with_three_rules(dtype, key):
    f = eqg_vjp(sin_times, sin_times_cotangents)
    f.def_jvp(lambda primals, tans: (sin_times(*primals), sin_times_tangent(*primals, *tans)))
    return f, normals(key, dtype, (), ())


@right
def elementwise_that_broadcasts(dtype, key):
    f = eqg.elementwise(sin_times, lambda out, x, y: (jnp.cos(x) * y, jnp.sin(x)))
    return f, normals(key, dtype, (2, 1), (1, 3))


@right
def batching_rule(dtype, key):
    rule = eqg_vjp(
        lambda w, x: x @ w, lambda w, x, ct: (jnp.outer(x, ct).astype(w.dtype), w @ ct)
    )

    @rule.def_vmap
    def batched(axis_size, is_batched, w, x):
        if is_batched != (False, True):
            return NotImplemented
        return jax.vmap(lambda x: x @ w)(x), True

    return rule, normals(key, dtype, (3, 2), (3,))


@right
def rule_deep_inside_a_model(dtype, key):
    """In a scan, under `checkpoint`, and with plain functions around it."""
    tanh = eqg_vjp(jnp.tanh, lambda x, ct: ((1 - jnp.tanh(x) ** 2) * ct,))

    def model(w, x):
        step = lambda h, x: (jax.checkpoint(tanh)(w * h + x), h)
        return jnp.mean(jax.lax.scan(step, jnp.zeros_like(w), x)[1] ** 2)

    return model, normals(key, dtype, (), (4,))


# Kinds of arguments


@right
def python_floats(dtype, key):
    return eqg_jvp(sin_times, sin_times_tangent), (0.5, 2.0)


def _swap_square_tangent(x, t):
    return 2 * jnp.swapaxes(x, 1, 3) * jnp.swapaxes(t, 1, 3)


@right
def the_same_array_twice(dtype, key):
    (x,) = normals(key, dtype, (3,))
    return eqg_jvp(sin_times, sin_times_tangent), (x, x)


@right
def nested_containers_with_none(dtype, key):
    """Lists, tuples, `None`, a string and an empty dictionary."""

    def weigh(tree):
        (a, _), [b, _, _] = tree["pair"], tree["list"]
        return a * jnp.exp(b)

    def tangent(tree, t):
        (a, _), [b, _, _] = tree["pair"], tree["list"]
        (t_a, _), [t_b, _, _] = t["pair"], t["list"]
        return (t_a + a * t_b) * jnp.exp(b)

    a, b = normals(key, dtype, (3,), (3,))
    return eqg_jvp(weigh, tangent), ({"pair": (a, None), "list": [b, "name", {}]},)


class Affine(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    activation: Callable[..., Any] = jnp.tanh  # a leaf that is not an array
    name: str = eqx.field(static=True, default="affine")

    @eqg.custom_vjp
    def __call__(self, x):
        out = self.weight @ x
        return out if self.bias is None else out + self.bias

    @__call__.def_fwd
    def _fwd(self, x):
        return self(x), (self, x)

    @__call__.def_bwd
    def _bwd(residuals, ct):
        self, x = residuals
        bias = None if self.bias is None else ct
        return tangents.of(self, weight=jnp.outer(ct, x), bias=bias), self.weight.T @ ct

    @eqg.custom_jvp
    def activate(self, x, *, times=1):
        return times * self.activation(x) + self.weight[0, 0]

    @activate.def_jvp
    def _activate_jvp(primals, tans, *, times):
        (self, x), (t_self, t_x) = primals, tans
        t_out = times * jax.jvp(self.activation, (x,), (t_x,))[1] + t_self.weight[0, 0]
        return self.activate(x, times=times), t_out


@right
def method_with_a_missing_leaf(dtype, key):
    weight, x = normals(key, dtype, (2, 3), (3,))
    return Affine.__call__, (Affine(weight, None), x)


@right
def bound_method(dtype, key):
    weight, bias, x = normals(key, dtype, (2, 2), (2,), (2,))
    return Affine(weight, bias).activate, (x,), {"times": 3}


@right
def module_as_an_argument(dtype, key):
    rule = eqx_vjp(
        lambda pair: pair[0](pair[1]),
        lambda pair, ct: (
            tangents.of(pair[0], weight=jnp.outer(ct, pair[1]), bias=ct),
            pair[0].weight.T @ ct,
        ),
    )
    linear = eqx.nn.Linear(3, 2, dtype=dtype, key=key)
    return rule, ((linear, *normals(key, dtype, (3,))),)


@right
def integer_index(dtype, key):
    cotangents = lambda x, i, ct: (jnp.zeros_like(x).at[i].set(ct), None)
    (x,) = normals(key, dtype, (5,))
    return eqg_vjp(lambda x, i: x[i] ** 1, cotangents), (x, jnp.array(2))


@right
def random_key(dtype, key):
    rule = eqg.custom_vjp(dropout)
    rule.def_fwd(lambda x, key: (dropout(x, key), key))
    rule.def_bwd(lambda key, ct: dropout_cotangents(None, key, ct))
    return rule, (*normals(key, dtype, (8,)), key)


@right
def keyword_only_configuration(dtype, key):
    rule = eqg.elementwise(leaky_relu, leaky_relu_slope)
    return rule, (away_from_zero(key, dtype, 5),), {"leak": 0.25}


@right
def closed_over_array(dtype, key):
    x, scale = normals(key, dtype, (3,), (3,))

    @eqg.custom_jvp
    def scaled_sin(x):
        return scale * jnp.sin(x)

    scaled_sin.def_jvp(
        lambda primals, tans: (
            scaled_sin(*primals),
            scale * jnp.cos(primals[0]) * tans[0],
        )
    )
    return scaled_sin, (x,)


@right
def mixed_dtypes(dtype, key):
    def multiply(x, w):
        return x * w.astype(x.dtype)

    cotangents = lambda x, w, ct: (w.astype(x.dtype) * ct, (x * ct).astype(w.dtype))
    x, w = normals(key, dtype, (4,), (4,))
    return jax_vjp(multiply, cotangents), (x, w.astype("bfloat16"))


@right
def not_a_function_of_everything(dtype, key):
    """The derivative with respect to `y` is zero."""
    rule = eqg_vjp(lambda x, y: jnp.sin(x), lambda x, ct: (jnp.cos(x) * ct, None), _sin_fwd)
    return rule, normals(key, dtype, (3,), (2,))


def _sin_fwd(x, y):
    return jnp.sin(x), x


@right
def zero_everywhere(dtype, key):
    steps = jnp.round(2 * away_from_zero(key, dtype, 5)) + 0.25
    return eqg.elementwise(jnp.round, lambda out, x: jnp.zeros_like(x)), (steps,)


# Complex numbers


@right
def complex_to_real(dtype, key):
    z = _complex(dtype, key, 3)
    return z if z is None else (jax_vjp(abs_squared, abs_squared_cotangents), (z,))


@right
def complex_product_in_equinox(dtype, key):
    z = _complex(dtype, key, 3)
    rule = eqx_vjp(
        lambda pair: multiply(*pair), lambda pair, ct: multiply_cotangents(*pair, ct)
    )
    return z if z is None else (rule, ((z, jnp.conj(z) + 1),))


def _complex(dtype, key, *shape):
    if dtype == "bfloat16":
        return None
    return jax.lax.complex(*normals(key, dtype, shape, shape))


# Kinds of outputs


@right
def several_outputs(dtype, key):
    def polar(x, y):
        return {"radius": jnp.sqrt(x**2 + y**2), "angle": jnp.arctan2(y, x)}

    def cotangents(x, y, ct):
        r2 = x**2 + y**2
        r = jnp.sqrt(r2)
        by_x = x / r * ct["radius"] - y / r2 * ct["angle"]
        return by_x, y / r * ct["radius"] + x / r2 * ct["angle"]

    x_key, y_key = jr.split(key)
    args = away_from_zero(x_key, dtype, 3), away_from_zero(y_key, dtype, 3)
    return eqg_vjp(polar, cotangents), args


@right
def integer_output_in_raw_jax(dtype, key):
    f = jax.custom_jvp(lambda x: (jnp.sum(x**2), jnp.argmax(x)))

    def rule(primals, tans):
        (x,), (t,) = primals, tans
        i = jnp.argmax(x)
        return (jnp.sum(x**2), i), (2 * jnp.sum(x * t), np.zeros((), jax.dtypes.float0))

    f.defjvp(rule)
    return f, (well_apart(key, dtype, 5),)


@right
def static_output_in_equinox(dtype, key):
    rule = eqx_vjp(lambda x: (jnp.sin(x), "sin"), lambda x, ct: jnp.cos(x) * ct[0])
    return rule, normals(key, dtype, (3,))


@right
def output_without_entries(dtype, key):
    rule = eqg_jvp(lambda x: x[:0] ** 2, lambda x, t: 2 * x[:0] * t[:0])
    return rule, normals(key, dtype, (3,))


# No rule at all


@right
def multilayer_perceptron(dtype, key):
    mlp = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, dtype=dtype, key=key)
    return mlp, normals(key, dtype, (3,))


@right
def gated_recurrent_unit(dtype, key):
    cell = eqx.nn.GRUCell(2, 3, dtype=dtype, key=key)
    x, h = normals(key, dtype, (2,), (3,))
    return (lambda cell, x, h: cell(x, h)), (cell, x, h)


@right
def rules_of_jax(dtype, key):
    """`relu`, `silu` and `softplus` have some."""
    fn = lambda x: jax.nn.relu(x) + jax.nn.silu(x) * jax.nn.softplus(x)
    return fn, (away_from_zero(key, dtype, 5),)


# Wrong on purpose


@right
def straight_through(dtype, key):
    def straight_through_round(x):
        return eqg.replace_gradient(jnp.round(x), x)

    x = jnp.round(2 * away_from_zero(key, dtype, 5)) + 0.25
    return straight_through_round, (x,), {"reference": lambda x: x}


@right
def surrogate(dtype, key):
    rule = eqg.with_gradient_of(spike, jax.nn.sigmoid)
    return rule, (away_from_zero(key, dtype, 5),), {"reference": jax.nn.sigmoid}


@right
def reversal_in_both_modes(dtype, key):
    rule = eqg_jvp(lambda x: x, lambda x, t: -t)
    return rule, normals(key, dtype, (4,)), {"reference": lambda x: -x}


@right
def clipping(dtype, key):
    bwd = lambda _, ct: (jnp.clip(ct, -0.5, 0.5),)
    rule, reference = (eqg_vjp(lambda x: x, bwd, lambda x: (x, None)) for _ in range(2))
    return rule, normals(key, dtype, (5,)), {"nonlinear": True, "reference": reference}


@right
def not_differentiable_in_one_argument(dtype, key):
    def descend(x, rate):
        return jnp.sin(x) * eqg.nondifferentiable(rate, "the rate")

    x, rate = normals(key, dtype, (3,), ())
    return descend, (x, rate), {"nondifferentiable": ("rate",)}


# Algorithms


@right
def host_function(dtype, key):
    def on_host(fn):
        def call(x):
            host = lambda x: fn(np.asarray(x, np.float64)).astype(x.dtype)
            return jax.pure_callback(host, x, x, vmap_method="expand_dims")

        return call

    sin, cos = (eqg.custom_jvp(on_host(fn)) for fn in (np.sin, np.cos))
    sin.def_jvp(lambda primals, tans: (sin(*primals), cos(*primals) * tans[0]))
    cos.def_jvp(lambda primals, tans: (cos(*primals), -sin(*primals) * tans[0]))
    return sin, normals(key, dtype, (3,))


@right
def implicit_derivative(dtype, key):
    """The root y of y + exp(y) = a, by Newton's method in a `while_loop`."""

    @eqg.custom_jvp
    def root(a):
        small = 4 * jnp.finfo(a.dtype).eps
        step = lambda y: (y + jnp.exp(y) - a) / (1 + jnp.exp(y))
        go_on = lambda state: (state[1] > small) & (state[2] < 30)

        def body(state):
            y, _, i = state
            return y - step(y), jnp.abs(step(y)), i + 1

        return jax.lax.while_loop(go_on, body, (jnp.zeros_like(a), jnp.ones_like(a), 0))[0]

    @root.def_jvp
    def jvp(primals, tans):
        y = root(*primals)
        return y, tans[0] / (1 + jnp.exp(y))

    return root, normals(key, dtype, ())


@right
def scan_with_its_adjoint(dtype, key):
    """A leaky integrator, and its adjoint backwards in time."""

    def integrate(decay, x):
        step = lambda v, x: (decay * v + x, v)
        v, before = jax.lax.scan(step, jnp.zeros_like(decay), x)
        return v, before

    rule = eqg.custom_vjp(lambda decay, x: integrate(decay, x)[0])

    @rule.def_fwd
    def fwd(decay, x):
        v, before = integrate(decay, x)
        return v, (decay, before)

    @rule.def_bwd
    def bwd(residuals, ct):
        decay, before = residuals
        step = lambda adjoint, v: (decay * adjoint, (adjoint, adjoint * v))
        _, (ct_x, ct_decay) = jax.lax.scan(step, ct, before, reverse=True)
        return jnp.sum(ct_decay), ct_x

    decay, x = jr.uniform(key, (), dtype, 0.5, 0.9), *normals(key, dtype, (6,))
    return rule, (decay, x)


@right
def layer_norm_in_single_precision(dtype, key):
    """At least: half precision is raised to it, and the result rounded."""

    def normalize_wide(x):
        wide = x.astype(jnp.float32 if jnp.finfo(x.dtype).bits < 32 else x.dtype)
        centered = wide - jnp.mean(wide)
        scale = 1 / jnp.sqrt(jnp.mean(centered**2) + 1e-3)
        return centered * scale, scale

    def normalize(x):
        return normalize_wide(x)[0].astype(x.dtype)

    def cotangents(x, ct):
        out, scale = normalize_wide(x)
        wide = ct.astype(out.dtype)
        ct_x = (wide - jnp.mean(wide) - out * jnp.mean(out * wide)) * scale
        return (ct_x.astype(x.dtype),)

    return jax_vjp(normalize, cotangents), normals(key, dtype, (6,))


@right
def solving(dtype, key):
    return _solve(dtype, key, 0.0)


@right
def solving_what_is_ill_conditioned(dtype, key):
    """The condition number is about 1000."""
    return _solve(dtype, key, 2.0)


def _solve(dtype, key, spread):
    if dtype == "bfloat16":
        return None

    def solve(a, b):
        return jnp.linalg.solve(a, b)

    def fwd(a, b):
        x = solve(a, b)
        return x, (a, x)

    def bwd(residuals, ct):
        a, x = residuals
        ct_b = jnp.linalg.solve(a.T, ct)
        return -jnp.outer(ct_b, x), ct_b

    noise, b = normals(key, dtype, (3, 3), (3,))
    scales = 10 ** jnp.linspace(-spread, 1.0, 3).astype(dtype)
    q, _ = jnp.linalg.qr(noise)
    return eqg_vjp(solve, bwd, fwd), ((q * scales[None, :]) @ q.T, b)


# Sizes and scales


@right
def two_thousand_entries(dtype, key):
    return eqg_jvp(sin_times, sin_times_tangent), normals(key, dtype, (2000,), (2000,))


@right
def tiny_and_huge(dtype, key):
    x, y = normals(key, dtype, (3,), (3,))
    rule = eqg_vjp(multiply, multiply_cotangents)
    return rule, (x * 1e-6, y * 1e6)


@right
def scales_side_by_side(dtype, key):
    """Entries from 1e-6 to 1e6 in one array."""
    x = away_from_zero(key, dtype, 5) * 10 ** jnp.linspace(-6.0, 6.0, 5).astype(dtype)
    return eqg_jvp(lambda x: x**2 / 2, lambda x, t: x * t), (x,)


@right
def more_exact_than_autodiff(dtype, key):
    """log(1 + exp(x)) as it is written loses digits; the rule does not."""
    x = -4 - 2 * jr.uniform(key, (3,), dtype)
    rule = jax_jvp(lambda x: jnp.log(1 + jnp.exp(x)), lambda x, t: jax.nn.sigmoid(x) * t)
    return rule, (x,)


@right
def difference_of_near_numbers(dtype, key):
    """The slope 1 - cos(x) cancels as autodiff computes it."""
    x = 0.05 + 0.05 * jr.uniform(key, (3,), dtype)
    rule = jax_vjp(lambda x: x - jnp.sin(x), lambda x, ct: (2 * jnp.sin(x / 2) ** 2 * ct,))
    return rule, (x,)


@right
def autodiff_of_softplus(dtype, key):
    """In the rule, JAX has its own zeros: a tangent for the constant of `logaddexp(x, 0.0)`."""

    @eqg.custom_jvp
    def f(w, x):
        return w * jax.nn.softplus(x)

    @f.def_jvp
    def _(primals, tangents):
        (w, x), (t_w, t_x) = primals, tangents
        y, t_y = jax.jvp(jax.nn.softplus, (x,), (t_x,))
        return w * y, t_w * y + w * t_y

    return f, normals(key, dtype, (), (3,))
