"""Rules whose numbers may be right, but which are not a derivative of this function: its value,
linearity, adjoint, zeros and higher orders."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..rules.arguments import sample
from ..rules.formulas import (
    matvec,
    max_and_index,
    multiply,
    multiply_cotangents,
    multiply_tangent,
    shift,
    shift_cotangents,
    sin_and_cos,
    square,
)
from ..rules.ways import eqg_jvp, eqg_vjp, eqx_jvp, eqx_vjp, jax_jvp, jax_vjp
from .registry import fault


tangents = eqg.tangents


# primal: the rule's value is the function's


@fault("primal", "another value than the function")
def value_of_a_forward_rule(bug):
    value = (lambda x: jnp.sin(x) + 0.01) if bug else jnp.sin
    return jax_jvp(jnp.sin, lambda x, t: jnp.cos(x) * t, value), (sample(5),)


@fault("primal", "another value than the function")
def value_of_a_backward_rule(bug):
    """A quick approximation where the residuals are saved."""

    def fwd(x):
        tanh = jnp.tanh(x)
        return (x * (27 + x**2) / (27 + 9 * x**2) if bug else tanh), tanh

    return jax_vjp(jnp.tanh, lambda tanh, ct: ((1 - tanh**2) * ct,), fwd), (sample(1000),)


@fault("primal", "float16")
def dtype_of_the_value(bug):
    def fwd(x):
        return square(x).astype("float16") if bug else square(x), x

    bwd = lambda x, ct: (2 * x * ct.astype(x.dtype),)
    return jax_vjp(square, bwd, fwd), (jnp.array([0.5, 1.0, -2.0]),)


@fault("primal", r"shape \(1,\)")
def shape_of_the_value(bug):
    def fwd(x):
        return jnp.sum(x**2, keepdims=bug), x

    return jax_vjp(lambda x: jnp.sum(x**2), lambda x, ct: (2 * x * ct,), fwd), (sample(3),)


@fault("primal", "structure")
def structure_of_the_value(bug):
    def fwd(x):
        return [square(x), x] if bug else (square(x), x), x

    bwd = lambda x, ct: (2 * x * ct[0] + ct[1],)
    return jax_vjp(lambda x: (square(x), x), bwd, fwd), (sample(3),)


@fault("primal", "'fast'")
def static_leaf_of_the_value(bug):
    method = lambda name: lambda x: (square(x), name)
    rule = eqx_vjp(
        method("slow"), lambda x, ct: 2 * x * ct[0], method("fast" if bug else "slow")
    )
    return rule, (sample(3),)


@fault("primal", r"output\[1\]")
def integer_leaf_of_the_value(bug):
    def fwd(x):
        i = jnp.argmax(x)
        return (x[i], i + 1 if bug else i), i

    bwd = lambda i, ct: (jnp.zeros(4, ct[0].dtype).at[i].set(ct[0]),)
    return jax_vjp(max_and_index, bwd, fwd), (sample(4),)


@fault("primal", "returned another output")
def shape_of_the_value_seen_by_eqx_grads(bug):
    fwd = lambda x: (jnp.sum(x**2, keepdims=bug), x)
    bwd = lambda x, ct: (2 * x * ct,)
    return eqg_vjp(lambda x: jnp.sum(x**2), bwd, fwd), (sample(3),)


# linear: in the tangent, and in the cotangent


@fault("linear", "tangent: of zero(?s:.)*affine")
def constant_added_to_the_tangent(bug):
    constant = 0.1 if bug else 0.0
    return jax_jvp(jnp.sin, lambda x, t: jnp.cos(x) * t + constant), (sample(4),)


@fault("linear", "tangent(?s:.)*not linear")
def tangent_squared(bug):
    """Right for every unit vector, so for a Jacobian by columns."""
    return jax_jvp(jnp.sin, lambda x, t: jnp.cos(x) * (t**2 if bug else t)), (sample(4),)


@fault("linear", "tangent(?s:.)*not linear")
def absolute_tangent(bug):
    """Right for every unit vector, and homogeneous for positive numbers."""
    modulus = jnp.abs if bug else (lambda t: t)
    return eqx_jvp(jnp.sin, lambda x, t: jnp.cos(x) * modulus(t)), (sample(4),)


@fault("linear", "RuleError: .*not linear in its tangents")
def product_of_tangents(bug):
    """`eqx_grads` sees this by itself."""

    with_product = lambda x, y, t_x, t_y: multiply_tangent(x, y, t_x, t_y) + t_x * t_y
    return eqg_jvp(multiply, with_product if bug else multiply_tangent), (
        sample(3),
        sample(3, seed=1),
    )


@fault("linear", "cotangent: of zero(?s:.)*affine")
def constant_added_to_the_cotangent(bug):
    constant = 0.1 if bug else 0.0
    return jax_vjp(jnp.sin, lambda x, ct: (jnp.cos(x) * ct + constant,)), (sample(4),)


@fault("linear", "cotangent(?s:.)*not linear")
def clipping_not_declared(bug):
    clip = (lambda ct: jnp.clip(ct, -0.5, 0.5)) if bug else (lambda ct: ct)
    rule = eqg_vjp(lambda x: x, lambda _, ct: (clip(ct),), lambda x: (x, None))
    return rule, (sample(5),)


@fault("linear", "cotangent")
def cotangent_normalized(bug):
    def cotangent(x, ct):
        return jnp.cos(x) * ct / (jnp.sqrt(jnp.sum(ct**2)) if bug else 1)

    return eqx_vjp(jnp.sin, cotangent), (sample(4),)


@fault("linear", "cotangent(?s:.)*not linear")
def relu_of_the_cotangent(bug):
    """Guided backpropagation, not declared."""

    def cotangents(x, ct):
        return (jnp.where(x > 0, jax.nn.relu(ct) if bug else ct, 0),)

    return jax_vjp(jax.nn.relu, cotangents), (sample(6),)


# adjoint: the forward half against the reverse half


@fault("adjoint", "not the same linear map")
def halves_of_a_shift(bug):
    bwd = (lambda _, ct: (jnp.roll(ct, 1),)) if bug else shift_cotangents
    rule = eqg_vjp(shift, bwd, lambda x: (shift(x), None))
    rule.def_jvp(lambda primals, tangents: (shift(*primals), shift(*tangents)))
    return rule, (sample(5),)


@fault("adjoint", "not the same linear map")
def halves_of_a_product(bug):
    """Forward mode lacks what reverse mode has."""
    rule = eqg_vjp(multiply, multiply_cotangents)

    @rule.def_jvp
    def jvp(primals, tans):
        (x, y), (t_x, t_y) = primals, tans
        return x * y, t_x * y if bug else multiply_tangent(x, y, t_x, t_y)

    return rule, (sample(3), sample(3, seed=1))


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


@fault("zeros", r"only `(args\[0\]|x)` is perturbed")
def term_dropped_with_the_other(bug):
    """Nothing moves unless both arguments do."""

    def tangent(x, y, t_x, t_y):
        if bug and t_y is None:
            return None
        return tangents.add(tangents.scale(t_x, y), tangents.scale(t_y, x))

    return eqx_jvp(multiply, tangent), (sample(3), sample(3, seed=1))


@fault("zeros", r"only `(args\[[01]\]|[xy])` is perturbed")
def none_taken_for_one(bug):
    def tangent(x, y, t_x, t_y):
        if bug:
            t_x, t_y = (jnp.ones_like(x) if t is None else t for t in (t_x, t_y))
        return tangents.add(tangents.scale(t_x, y), tangents.scale(t_y, x))

    return eqx_jvp(multiply, tangent), (sample(3), sample(3, seed=1))


@fault("zeros", "only `x` is perturbed")
def factor_forgotten_alone(bug):
    """Right together, but the short cut for `x` alone is not."""
    f = jax.custom_jvp(multiply)

    def rule(primals, tans):
        (x, y), (t_x, t_y) = primals, tans
        if isinstance(t_y, SymbolicZero):
            t = t_x if bug else t_x * y
        elif isinstance(t_x, SymbolicZero):
            t = x * t_y
        else:
            t = t_x * y + x * t_y
        return x * y, t

    f.defjvp(rule, symbolic_zeros=True)
    return f, (sample(3), sample(3, seed=1))


@fault("zeros", "only `[xy]` is perturbed")
def mask_misread(bug):
    """`perturbed` asked for the wrong argument."""
    f = eqg.custom_vjp(multiply)
    f.def_fwd(lambda x, y: (x * y, (x, y)))

    @f.def_bwd
    def bwd(residuals, ct, *, perturbed):
        x, y = residuals
        p_x, p_y = reversed(perturbed) if bug else perturbed
        return y * ct if p_x else None, x * ct if p_y else None

    return f, (sample(3), sample(3, seed=1))


@fault("zeros", r"only `\w+\[[01]\]` is perturbed")
def mask_of_a_pair_misread(bug):
    """Nothing is returned unless all of the pair is perturbed."""
    f = eqx.filter_custom_vjp(lambda pair: multiply(*pair))
    f.def_fwd(lambda perturbed, pair: (multiply(*pair), None))

    @f.def_bwd
    def bwd(residuals, ct, perturbed, pair):
        x, y = pair
        if bug and not all(perturbed):
            return None, None
        return y * ct, x * ct

    return f, ((sample(3), sample(3, seed=1)),)


@fault("zeros", r"only output\[[01]\] is used")
def only_one_output_used(bug):
    rule = eqg.custom_vjp(sin_and_cos)
    rule.def_fwd(lambda x: (sin_and_cos(x), x))

    @rule.def_bwd(symbolic_zeros=True)
    def bwd(x, cts):
        ct_sin, ct_cos = cts
        if bug and ct_cos is None:
            return (None,)
        from_sin = tangents.scale(ct_sin, jnp.cos(x))
        return (tangents.add(from_sin, tangents.scale(ct_cos, -jnp.sin(x))),)

    return rule, (sample(4),)


@fault("zeros", r"only output\[[01]\] is used")
def unused_output_taken_for_one(bug):
    f = jax.custom_vjp(sin_and_cos)

    def fwd(x):
        return sin_and_cos(x.value), x.value

    def bwd(x, cts):
        missing = jnp.ones_like if bug else jnp.zeros_like
        ct_sin, ct_cos = (missing(x) if isinstance(c, SymbolicZero) else c for c in cts)
        return (jnp.cos(x) * ct_sin - jnp.sin(x) * ct_cos,)

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f, (sample(4),)


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

    return eqx_jvp(matvec, tangent), (sample(8, 8), sample(8, seed=1))


# order: the derivative of the derivative


@fault("order", "order 2(?s:.)*right to first order")
def slope_held_constant(bug):
    hold = jax.lax.stop_gradient if bug else (lambda x: x)
    return jax_jvp(jnp.sin, lambda x, t: hold(jnp.cos(x)) * t), (sample(4),)


@fault("order", "order 2(?s:.)*right to first order")
def residual_held_constant(bug):
    hold = jax.lax.stop_gradient if bug else (lambda x: x)
    fwd = lambda x: (jnp.sin(x), hold(jnp.cos(x)))
    return jax_vjp(jnp.sin, lambda cos, ct: (cos * ct,), fwd), (sample(4),)


@fault("order", "order 2(?s:.)*right to first order")
def output_held_constant(bug):
    hold = jax.lax.stop_gradient if bug else (lambda x: x)
    return eqg.elementwise(jnp.exp, lambda out, x: hold(out)), (sample(4),)


@fault("order", "order 2(?s:.)*right to first order")
def mixed_second_derivative(bug):
    hold = jax.lax.stop_gradient if bug else (lambda x: x)
    cotangents = lambda x, y, ct: (hold(y) * ct, x * ct)
    return eqg_vjp(multiply, cotangents), (sample(3), sample(3, seed=1))


@fault("order", "order 2(?s:.)*right to first order")
def slope_with_a_wrong_rule(bug):
    """The first derivative is right, as the wrong rule belongs to the slope."""
    factor = 1 if bug else -1
    cos = jax_jvp(jnp.cos, lambda x, t: factor * jnp.sin(x) * t)
    return eqx_jvp(jnp.sin, lambda x, t: cos(x) * t), (sample(4),)


@fault("order", "order 3")
def third_order(bug):
    hold = jax.lax.stop_gradient if bug else (lambda x: x)
    cos = jax_jvp(jnp.cos, lambda x, t: -hold(jnp.sin(x)) * t)
    return jax_jvp(jnp.sin, lambda x, t: cos(x) * t), (sample(3),), {"order": 3}


@fault("order", "order 2(?s:.)*right to first order")
def cotangent_held_constant(bug):
    """The backward rule of the backward rule drops the cotangent's own derivative."""
    hold = jax.lax.stop_gradient if bug else (lambda x: x)
    return jax_vjp(square, lambda x, ct: (2 * x * hold(ct),)), (sample(4),)
