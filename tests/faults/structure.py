"""Rules whose numbers may be right, but which are not a derivative of this function: its value,
linearity, adjoint and zeros."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp

from ..rules.arguments import matrix_and_vector, sample, two
from ..rules.formulas import (
    matvec,
    multiply,
)
from ..rules.ways import eqx_jvp, jax_jvp, jax_vjp
from .registry import fault


tangents = eqg.tangents


# primal: the rule's value is the function's


@fault("primal", r"output\[1\]")
def integer_leaf_of_the_value(bug):
    def fwd(x):
        i = jnp.argmax(x)
        return (x[i], i + 1 if bug else i), i

    bwd = lambda i, ct: (jnp.zeros(4, ct[0].dtype).at[i].set(ct[0]),)
    return jax_vjp(lambda x: (jnp.max(x), jnp.argmax(x)), bwd, fwd), (sample(4),)


# linear: in the tangent, and in the cotangent


@fault("linear", "tangent: of zero(?s:.)*affine")
def constant_added_to_the_tangent(bug):
    constant = 0.1 if bug else 0.0
    return jax_jvp(jnp.sin, lambda x, t: jnp.cos(x) * t + constant), (sample(4),)


@fault("linear", "tangent(?s:.)*not linear")
def tangent_squared(bug):
    """Right for every unit vector, so for a Jacobian by columns."""
    return jax_jvp(jnp.sin, lambda x, t: jnp.cos(x) * (t**2 if bug else t)), (sample(4),)


# adjoint: the forward half against the reverse half


@fault("adjoint", "not the same linear map")
def transposed_solve(bug):
    """JAX's own way to give both halves."""

    def solve(a, b):
        matvec = lambda x: a @ x
        forward = lambda _, b: jnp.linalg.solve(a, b)
        backward = lambda _, b: jnp.linalg.solve(a if bug else a.T, b)
        return jax.lax.custom_linear_solve(matvec, b, forward, backward)

    return solve, (sample(3, 3) + 3 * jnp.eye(3), sample(3, seed=1))


# zeros: any part perturbed, any part used


@fault("zeros", r"only `(args\[0\]|x)` perturbed")
def term_dropped_with_the_other(bug):
    """Nothing moves unless both arguments do."""

    def tangent(x, y, t_x, t_y):
        if bug and t_y is None:
            return None
        return tangents.add(tangents.scale(t_x, y), tangents.scale(t_y, x))

    return eqx_jvp(multiply, tangent), two(3)


@fault("zeros", "only `[xy]` perturbed")
def mask_misread(bug):
    """`perturbed` asked for the wrong argument."""
    f = eqg.custom_vjp(multiply)
    f.def_fwd(lambda x, y: (x * y, (x, y)))

    @f.def_bwd
    def bwd(residuals, ct, *, perturbed):
        x, y = residuals
        p_x, p_y = reversed(perturbed) if bug else perturbed
        return y * ct if p_x else None, x * ct if p_y else None

    return f, two(3)


@fault("zeros", "array of zeros")
def work_for_the_dead(bug):
    """A product with a matrix of zeros, where the weight does not move."""

    def tangent(w, x, t_w, t_x):
        if bug:
            t_w = jnp.zeros_like(w) if t_w is None else t_w
            t_x = jnp.zeros_like(x) if t_x is None else t_x
        return tangents.add(
            tangents.linear(lambda t: t @ x, t_w), tangents.linear(lambda t: w @ t, t_x)
        )

    return eqx_jvp(matvec, tangent), matrix_and_vector(8)
