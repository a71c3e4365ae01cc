"""Right rules over all kinds of arguments: `RIGHT`. `check_rule` may accuse none."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np

from .faults.registry import Case
from .rules.arguments import away_from_zero, normals, well_apart
from .rules.formulas import (
    abs_squared,
    abs_squared_cotangents,
)
from .rules.ways import eqg_jvp, eqg_vjp, jax_vjp


tangents = eqg.tangents


# A right rule: `RIGHT[name](dtype, key)` returns `(fn, args, options)` for
# `check_rule(fn, *args, **options)`, or `None` where JAX has no such dtype.
RIGHT: dict[str, Callable[[Any, jax.Array], Case | None]] = {}


def right(build):
    """Enter the decorated `build(dtype, key) -> (fn, args)` or `(fn, args, options)`."""

    @ft.wraps(build)
    def make(dtype, key):
        case = build(jnp.dtype(dtype), key)
        return case if case is None or len(case) == 3 else (*case, {})

    assert build.__name__ not in RIGHT
    RIGHT[build.__name__] = make
    return build


# One rule, written in every way


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


# Kinds of arguments


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
    if dtype == "bfloat16":
        return None
    z = jax.lax.complex(*normals(key, dtype, (3,), (3,)))
    return jax_vjp(abs_squared, abs_squared_cotangents), (z,)


# Kinds of outputs


@right
def integer_output_in_raw_jax(dtype, key):
    f = jax.custom_jvp(lambda x: (jnp.sum(x**2), jnp.argmax(x)))

    def rule(primals, tans):
        (x,), (t,) = primals, tans
        i = jnp.argmax(x)
        return (jnp.sum(x**2), i), (2 * jnp.sum(x * t), np.zeros((), jax.dtypes.float0))

    f.defjvp(rule)
    return f, (well_apart(key, dtype, 5),)


# No rule at all


# Wrong on purpose


# Algorithms


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
def solving_what_is_ill_conditioned(dtype, key):
    """The condition number is about 1000."""
    if dtype == "bfloat16":
        return None

    def solve(a, b):
        return jnp.linalg.solve(a, b)

    def bwd(residuals, ct):
        a, x = residuals
        ct_b = jnp.linalg.solve(a.T, ct)
        return -jnp.outer(ct_b, x), ct_b

    noise, b = normals(key, dtype, (3, 3), (3,))
    scales = 10 ** jnp.linspace(-2.0, 1.0, 3).astype(dtype)
    q, _ = jnp.linalg.qr(noise)
    rule = eqg_vjp(solve, bwd, lambda a, b: (solve(a, b), (a, solve(a, b))))
    return rule, ((q * scales[None, :]) @ q.T, b)


# Sizes and scales


@right
def scales_side_by_side(dtype, key):
    """Entries from 1e-6 to 1e6 in one array."""
    x = away_from_zero(key, dtype, 5) * 10 ** jnp.linspace(-6.0, 6.0, 5).astype(dtype)
    return eqg_jvp(lambda x: x**2 / 2, lambda x, t: x * t), (x,)
