"""`sin(x) * y` with a right rule of each kind. Plain autodiff is the reference."""

import eqx_grads as eqg
import jax.numpy as jnp

from .rules.formulas import sin_times, sin_times_cotangents, sin_times_tangent


sin_times_jvp = eqg.custom_jvp(sin_times)


@sin_times_jvp.def_jvp
def _sin_times_jvp(primals, tans):
    return sin_times_jvp(*primals), sin_times_tangent(*primals, *tans)


sin_times_elementwise = eqg.elementwise(
    sin_times, lambda out, x, y: (jnp.cos(x) * y, jnp.sin(x))
)
sin_times_vjp = eqg.custom_vjp(sin_times)


@sin_times_vjp.def_fwd
def _sin_times_fwd(x, y):
    return sin_times_vjp(x, y), (x, y)


@sin_times_vjp.def_bwd
def _sin_times_bwd(residuals, ct):
    return sin_times_cotangents(*residuals, ct)
