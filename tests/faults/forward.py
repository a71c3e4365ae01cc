"""Forward rules with a wrong number in them."""

import math

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..rules.arguments import complex_sample, sample
from ..rules.formulas import (
    abs_squared,
    leaky_relu,
    leaky_relu_slope,
    matvec,
    multiply,
    multiply_tangent,
    power,
    power_tangent,
    sin_and_cos,
    sin_where,
    sin_where_tangent,
    soft_sign_slope,
    spike,
    square,
)
from ..rules.ways import eqg_jvp, eqg_vjp, eqx_jvp, jax_jvp
from .registry import fault


# A constant factor


@fault("forward", "every entry is twice")
def twice(bug):
    return jax_jvp(jnp.sin, lambda x, t: (2 if bug else 1) * jnp.cos(x) * t), (sample(5),)


@fault("forward", "every entry is half")
def half(bug):
    return eqg_jvp(square, lambda x, t: (1 if bug else 2) * x * t), (sample(2, 3),)


@fault("forward", r"1\.01 times")
def one_percent(bug):
    factor = 1.01 if bug else 1.0
    return eqx_jvp(jnp.tanh, lambda x, t: factor * (1 - jnp.tanh(x) ** 2) * t), (sample(5),)


@fault("forward", r"1\.001 times")
def one_in_a_thousand(bug):
    factor = 1.001 if bug else 1.0
    return eqg_jvp(jnp.exp, lambda x, t: factor * jnp.exp(x) * t), (sample(4),)


@fault("forward", "sign is wrong")
def sign(bug):
    slope = lambda out, x: jnp.sin(x) if bug else -jnp.sin(x)
    return eqg.elementwise(jnp.cos, slope), (sample(5, low=0.5),)


@fault("forward", r"57\.3 times")
def degrees(bug):
    def sin_of_degrees(x):
        return jnp.sin(x * (jnp.pi / 180))

    unit = 1 if bug else jnp.pi / 180
    rule = lambda x, t: jnp.cos(x * (jnp.pi / 180)) * unit * t
    return jax_jvp(sin_of_degrees, rule), (sample(3, low=10.0, high=80.0),)


@fault("forward", r"0\.6931 times")
def base_of_the_logarithm(bug):
    per_bit = 1.0 if bug else 1 / math.log(2)
    return jax_jvp(jnp.log2, lambda x, t: per_bit * t / x), (sample(5, low=0.5),)


@fault("forward", r"1\.37\d* times")
def norm_not_divided_by(bug):
    def norm(x):
        return jnp.sqrt(jnp.sum(x**2))

    def tangent(x, t):
        return jnp.dot(x, t) / (1.0 if bug else norm(x))

    return eqg_jvp(norm, tangent), (sample(4),)


@fault("forward", "every entry is twice")
def twice_inside_another_function(bug):
    """The function without the rule can't be had: finite differences must tell."""
    sin = jax_jvp(jnp.sin, lambda x, t: (2 if bug else 1) * jnp.cos(x) * t)

    def model(x):
        return 0.5 * sin(3 * x)

    return model, (sample(5),)


@fault("forward", "every entry is twice")
def twice_inside_jit(bug):
    sin = jax_jvp(jnp.sin, lambda x, t: (2 if bug else 1) * jnp.cos(x) * t)
    return jax.jit(sin), (sample(5),)


# Large arrays, on which relative errors are easily lost


@fault("forward", r"1\.5 times")
def fifty_percent_of_300(bug):
    factor = 1.5 if bug else 1.0
    return jax_jvp(jnp.sin, lambda x, t: factor * jnp.cos(x) * t), (sample(300),)


@fault("forward", r"1\.5 times")
def wrong_from_1000_on(bug):
    def tangent(x, t):
        factor = 1.5 if bug and x.size >= 1000 else 1.0
        return factor * jnp.cos(x) * t

    return eqg_jvp(jnp.sin, tangent), (sample(1000),)


@fault("forward", "entries are wrong: .*654321")
def one_in_a_million(bug):
    def tangent(x, t):
        slope = jnp.cos(x)
        return (slope.at[654321].multiply(-1) if bug else slope) * t

    return jax_jvp(jnp.sin, tangent), (sample(10**6),)


@fault("forward", r"entries are wrong: \[3\]")
def one_entry_two_percent(bug):
    def tangent(x, t):
        slope = jnp.cos(x)
        return (slope.at[3].multiply(1.02) if bug else slope) * t

    return jax_jvp(jnp.sin, tangent), (sample(5),)


# Structure


@fault("forward", "at `x`(?s:.)*transposed")
def transposed(bug):
    tangent = lambda w, x, t_w, t_x: (w.T if bug else w) @ t_x + t_w @ x
    return eqg_jvp(matvec, tangent), (sample(4, 4), sample(4, seed=1))


@fault("forward", "at `z`(?s:.)*conjugate")
def conjugate(bug):
    tangent = lambda z, t: 2 * jnp.real((z if bug else jnp.conj(z)) * t)
    return jax_jvp(abs_squared, tangent), (complex_sample(3),)


@fault("forward", "at `x`")
def imaginary_part(bug):
    tangent = lambda z, t: jnp.exp(z) * (t.real.astype(z.dtype) if bug else t)
    return jax_jvp(jnp.exp, tangent), (complex_sample(3),)


@fault("forward", "term of `y` is missing")
def term_of_y(bug):
    without_y = lambda x, y, t_x, t_y: t_x * y
    return eqg_jvp(multiply, without_y if bug else multiply_tangent), (
        sample(3),
        sample(3, seed=1),
    )


@fault("forward", r"at `args\[[01]\]`|at `[xy]`")
def swapped(bug):
    tans = eqg.tangents

    def tangent(x, y, t_x, t_y):
        x, y = (x, y) if bug else (y, x)
        return tans.add(tans.scale(t_x, x), tans.scale(t_y, y))

    return eqx_jvp(multiply, tangent), (sample(3), sample(3, seed=1))


@fault("forward", "at `x[12]`")
def partials_swapped(bug):
    def partials(out, y, x):
        by_y, by_x = x / (x**2 + y**2), -y / (x**2 + y**2)
        return (by_x, by_y) if bug else (by_y, by_x)

    return eqg.elementwise(jnp.arctan2, partials), (sample(3), sample(3, seed=1))


@fault("forward", r"at `tree\['a'\]`(?s:.)*also wrong: `tree\['b'\]`")
def leaves_of_a_dict_swapped(bug):
    def weigh(tree):
        return 2 * tree["a"] + 3 * tree["b"]

    def tangent(tree, t):
        return 3 * t["a"] + 2 * t["b"] if bug else 2 * t["a"] + 3 * t["b"]

    return eqg_jvp(weigh, tangent), ({"a": sample(3), "b": sample(3, seed=1)},)


@fault("forward", r"output\[1\](?s:.)*sign is wrong")
def second_output(bug):
    tangent = lambda x, t: (jnp.cos(x) * t, (1 if bug else -1) * jnp.sin(x) * t)
    return jax_jvp(sin_and_cos, tangent), (sample(4),)


# A term of the derivation forgotten


@fault("forward", "at `x`")
def softmax_normalizer(bug):
    def softmax(x):
        exp = jnp.exp(x - jax.lax.stop_gradient(jnp.max(x)))
        return exp / jnp.sum(exp)

    def tangent(x, t):
        p = softmax(x)
        return p * t if bug else p * (t - jnp.dot(p, t))

    return eqg_jvp(softmax, tangent), (sample(5),)


@fault("forward", "at `x`")
def variance_of_layer_norm(bug):
    def normalize(x):
        centered = x - jnp.mean(x)
        return centered / jnp.sqrt(jnp.mean(centered**2) + 1e-3)

    def tangent(x, t):
        t, out = t - jnp.mean(t), normalize(x)
        scale = jnp.sqrt(jnp.var(x) + 1e-3)
        return t / scale if bug else (t - out * jnp.mean(out * t)) / scale

    return jax_jvp(normalize, tangent), (sample(6),)


@fault("forward", "at `a`")
def implicit_function(bug):
    """The root y of y + exp(y) = a, by Newton's method."""

    def root(a):
        newton = lambda _, y: y - (y + jnp.exp(y) - a) / (1 + jnp.exp(y))
        return jax.lax.fori_loop(0, 20, newton, jnp.zeros_like(a))

    def tangent(a, t):
        return t / jnp.exp(root(a)) if bug else t / (1 + jnp.exp(root(a)))

    return jax_jvp(root, tangent), (sample(3),)


# Wrong in a region only


@fault("forward", "wrong only where `x` is negative|entries are wrong")
def negative_inputs(bug):
    slope = lambda out, x: leaky_relu_slope(out, x, leak=0.01 if bug else 0.1)
    return eqg.elementwise(lambda x: leaky_relu(x), slope), (sample(6),)


@fault("forward", "entries are wrong")
def small_inputs(bug):
    """A guard against zero that is too wide."""
    guard = 1e-5 if bug else 0.0
    return eqg_jvp(jnp.log, lambda x, t: t / (x + guard)), (jnp.array([1e-4, 1e-3, 0.1, 2.0]),)


@fault("forward", "entries are wrong")
def wrong_threshold(bug):
    limit = 1.25 if bug else 1.0
    inside = lambda x, t: jnp.where(jnp.abs(x) < limit, t, 0)
    return jax_jvp(lambda x: jnp.clip(x, -1, 1), inside), (jnp.array([-2.0, -1.1, 0.3, 1.2]),)


# Arguments that are not arrays of floats


@fault("forward", "at `x`")
def integer_exponent(bug):
    one_too_many = lambda x, n, t_x, t_n: n * x**n * t_x
    return eqg_jvp(power, one_too_many if bug else power_tangent), (sample(4, low=0.5), 3)


@fault("forward", "entries are wrong")
def mask_ignored(bug):
    everywhere = lambda x, mask, t_x, t_mask: jnp.cos(x) * t_x
    rule = eqg_jvp(sin_where, everywhere if bug else sin_where_tangent)
    return rule, (sample(4), jnp.array([True, False, True, False]))


@fault("forward", "entries are wrong")
def configuration_ignored(bug):
    ignored = lambda out, x, *, leak: leaky_relu_slope(out, x, leak=0.01)
    return (
        eqg.elementwise(leaky_relu, ignored if bug else leaky_relu_slope),
        (sample(6),),
        {"leak": 0.3},
    )


class Scale(eqx.Module):
    factor: jax.Array
    name: str

    def __call__(self, x):
        return self.factor * x


@fault("forward", r"term of `layer\.factor` is missing")
def module_leaf(bug):
    def apply(layer, x):
        return layer(x)

    def tangent(layer, x, t_layer, t_x):
        from_x = layer.factor * t_x
        return from_x if bug else from_x + t_layer.factor * x

    return eqg_jvp(apply, tangent), (Scale(sample(3), "scale"), sample(3, seed=1))


# Rules that are wrong on purpose, and then wrong


@fault("forward", "at `a`")
def straight_through(bug):
    surrogate = jnp.tanh if bug else (lambda x: x)
    rule = eqg.with_gradient_of(jnp.round, surrogate)
    return rule, (sample(5),), {"reference": lambda x: x}


@fault("forward", "at `v`")
def surrogate_spike(bug):
    not_squared = lambda out, v: 1 / (1 + jnp.abs(v))
    return (
        eqg.elementwise(spike, not_squared if bug else soft_sign_slope),
        (sample(5),),
        {"reference": jax.nn.soft_sign},
    )


@fault("forward", "sign is wrong")
def reversal_in_forward_mode(bug):
    rule = eqg_jvp(lambda x: x, lambda x, t: t if bug else -t)
    return rule, (sample(4),), {"reference": lambda x: -x}


@fault("forward", "at `x`")
def forward_half_of_a_reverse_rule(bug):
    rule = eqg_vjp(jnp.sin, lambda x, ct: (jnp.cos(x) * ct,))
    rule.def_jvp(
        lambda primals, tangents: (
            jnp.sin(primals[0]),
            (1.0 if bug else jnp.cos(primals[0])) * tangents[0],
        )
    )
    return rule, (sample(4),)


# Precision and errors


@fault("forward", "precision was lost")
def through_half_precision(bug):
    def tangent(x, t):
        slope = jnp.cos(x)
        return (slope.astype("float16").astype(x.dtype) if bug else slope) * t

    return jax_jvp(jnp.sin, tangent), (sample(5),)


@fault("forward", "RuleError: .*a tangent that does not fit")
def tangent_of_the_wrong_shape(bug):
    """`eqx_grads` sees this by itself."""
    return eqg_jvp(lambda x: jnp.sum(x), lambda x, t: t if bug else jnp.sum(t)), (sample(3),)


@fault("forward", "at `y`")
def factor_of_one_term(bug):
    f = jax.custom_jvp(multiply)

    def rule(primals, tangents):
        (x, y), ts = primals, tangents
        t_x, t_y = (None if isinstance(t, SymbolicZero) else t for t in ts)
        from_y = t_y if bug else eqg.tangents.scale(t_y, x)
        return x * y, eqg.tangents.add(eqg.tangents.scale(t_x, y), from_y)

    f.defjvp(rule, symbolic_zeros=True)
    return f, (sample(3), sample(3, seed=1))
