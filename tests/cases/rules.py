"""What rules are written with."""

import eqx_grads as eqg
import jax.numpy as jnp

from .. import ops
from .registry import case, vectors


@case("custom_jvp")
def _():
    return ops.sin_times_jvp, vectors()


@case("custom_jvp: symbolic zeros")
def _():
    return ops.sin_times_none, vectors()


@case("custom_vjp")
def _():
    return ops.sin_times_vjp, vectors()


@case("custom_vjp: with a forward rule too")
def _():
    return ops.sin_times_three, vectors()


@case("elementwise", at=[(jnp.zeros(3), jnp.zeros(3))])
def _():
    return ops.sin_times_elementwise, vectors()


def _twice(x):
    return 2 * x


@case("replace_gradient", reference=_twice, skip=("zeros",))
def _():
    return lambda x: eqg.replace_gradient(jnp.round(x), 2 * x), (vectors()[0],)


@case("with_gradient_of", reference=_twice)
def _():
    return eqg.with_gradient_of(jnp.round, _twice), (vectors()[0],)


@case("custom_gradient")
def _():
    @eqg.custom_gradient
    def square(x):
        return x**2, lambda ct: (2 * x * ct,)

    return square, (vectors()[0],)


def _weighted_differences(w, x):
    return w * (x[1:] - x[:-1])


@case("linear_function", reference=_weighted_differences)
def _():
    def adjoint(w, y):
        zero = jnp.zeros(1)
        return jnp.concatenate([zero, w * y]) - jnp.concatenate([w * y, zero])

    return eqg.linear_function(_weighted_differences, adjoint, argnum=1), (
        jnp.array([1.5, -0.4]),
        vectors()[0],
    )


@case("jax_custom_jvp")
def _():
    @eqg.jax_custom_jvp
    def sin_times(x, y):
        return jnp.sin(x) * y

    sin_times.defjvps(
        lambda t, out, x, y: jnp.cos(x) * y * t, lambda t, out, x, y: jnp.sin(x) * t
    )
    return sin_times, vectors()


@case("jax_custom_vjp")
def _():
    @eqg.jax_custom_vjp
    def sin_times(x, y):
        return jnp.sin(x) * y

    fwd = lambda x, y: (sin_times(x, y), (x, y))
    sin_times.defvjp(fwd, lambda res, ct: (jnp.cos(res[0]) * res[1] * ct, jnp.sin(res[0]) * ct))
    return sin_times, vectors()


@case("filter_custom_jvp")
def _():
    return ops.sin_times_filter_jvp, vectors()


@case("filter_custom_vjp")
def _():
    return ops.sin_times_filter_vjp, vectors()


@case("nondifferentiable", nondifferentiable=("y",))
def _():
    return lambda x, y: x * eqg.nondifferentiable(y), vectors()
