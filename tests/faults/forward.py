"""Forward rules with a wrong number in them."""

import eqx_grads as eqg
import jax.numpy as jnp

from ..rules.arguments import complex_sample, matrix_and_vector, sample
from ..rules.formulas import (
    abs_squared,
    matvec,
    sin_and_cos,
)
from ..rules.ways import eqg_jvp, jax_jvp
from .registry import fault


# A constant factor


@fault("forward", "every entry is twice")
def twice_inside_another_function(bug):
    """The function without the rule can't be had: finite differences must tell."""
    sin = jax_jvp(jnp.sin, lambda x, t: (2 if bug else 1) * jnp.cos(x) * t)

    def model(x):
        return 0.5 * sin(3 * x)

    return model, (sample(5),)


# Large arrays, on which relative errors are easily lost


@fault("forward", "entries are wrong: .*654321")
def one_in_a_million(bug):
    def tangent(x, t):
        slope = jnp.cos(x)
        return (slope.at[654321].multiply(-1) if bug else slope) * t

    return jax_jvp(jnp.sin, tangent), (sample(10**6),)


# Structure


@fault("forward", "at `x`(?s:.)*transposed")
def transposed(bug):
    tangent = lambda w, x, t_w, t_x: (w.T if bug else w) @ t_x + t_w @ x
    return eqg_jvp(matvec, tangent), matrix_and_vector(4)


@fault("forward", "at `z`(?s:.)*conjugate")
def conjugate(bug):
    tangent = lambda z, t: 2 * jnp.real((z if bug else jnp.conj(z)) * t)
    return jax_jvp(abs_squared, tangent), (complex_sample(3),)


@fault("forward", r"at `tree\['a'\]`(?s:.)*also wrong: `tree\['b'\]`")
def leaves_of_a_dict_swapped(bug):
    def weigh(tree):
        return 2 * tree["a"] + 3 * tree["b"]

    def tangent(tree, t):
        return 3 * t["a"] + 2 * t["b"] if bug else 2 * t["a"] + 3 * t["b"]

    return eqg_jvp(weigh, tangent), ({"a": sample(3), "b": sample(3, seed=1)},)


@fault("forward", r"output\[1\](?s:.)*every entry is minus")
def second_output(bug):
    tangent = lambda x, t: (jnp.cos(x) * t, (1 if bug else -1) * jnp.sin(x) * t)
    return jax_jvp(sin_and_cos, tangent), (sample(4),)


# Arguments that are not arrays of floats


@fault("forward", "at `x`")
def integer_exponent(bug):
    tangent = lambda x, n, t_x, t_n: n * x ** (n if bug else n - 1) * t_x
    return eqg_jvp(lambda x, n: x**n, tangent), (sample(4, low=0.5), 3)


@fault("forward", "entries are wrong")
def configuration_ignored(bug):
    relu = lambda x, *, leak: jnp.where(x > 0, x, leak * x)
    slope = lambda out, x, *, leak: jnp.where(x > 0, 1.0, 0.01 if bug else leak).astype(x.dtype)
    return eqg.elementwise(relu, slope), (sample(6),), {"leak": 0.3}


# Precision and errors


@fault("forward", "precision was lost")
def through_half_precision(bug):
    def tangent(x, t):
        slope = jnp.cos(x)
        return (slope.astype("float16").astype(x.dtype) if bug else slope) * t

    return jax_jvp(jnp.sin, tangent), (sample(5),)
