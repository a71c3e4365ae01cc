"""Functions that run on the host. The reference is the same function in JAX."""

import eqx_grads as eqg
import jax.numpy as jnp
import numpy as np

from .registry import case, vector, vectors


MATRIX = np.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4]])


def _in_numpy(x, y):
    return np.sin(x) * y + np.sum(x * y)


def _in_jax(x, y):
    return jnp.sin(x) * y + jnp.sum(x * y)


def _like_x(x, y):
    return x


def _with_bwd(function, **options):
    @function.def_fwd(**options)
    def _fwd(x, y):
        return _in_numpy(x, y), (np.sin(x), np.cos(x), x, y)

    @function.def_bwd
    def _bwd(residuals, ct):
        sin, cos, x, y = residuals
        total = np.sum(ct)
        return ct * cos * y + total * y, ct * sin + total * x

    return function


def _host(**options):
    return eqg.host_function(_in_numpy, out=_like_x, **options)


# Differences of float64 are known to 1e-10, of float32 to 1e-5, and second ones to much less.
DIFFERENCES = {"reference": _in_jax, "skip": ("order",), "tolerance": 1e-3}


@case("host_function", reference=_in_jax, skip=("order",))
def _():
    return _with_bwd(_host()), vectors()


@case("host_function: residuals passed through", reference=_in_jax, skip=("order",))
def _():
    residuals = lambda x, y: (x, x, x, y)
    return _with_bwd(_host(), residuals=residuals), vectors()


@case("host_function: forward rule", reference=_in_jax, skip=("order",))
def _():
    function = _host()

    @function.def_jvp
    def _jvp(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        t_out = np.cos(x) * t_x * y + np.sin(x) * t_y + np.sum(t_x * y + x * t_y)
        return _in_numpy(x, y), t_out

    return function, vectors()


@case("host_function: central differences", **DIFFERENCES)
def _():
    return _host(finite_difference="central"), vectors()


@case("host_function: complex steps", reference=_in_jax, skip=("order",))
def _():
    return _host(finite_difference="complex"), vectors()


@case("linear_host_function", reference=lambda x: jnp.asarray(MATRIX, x.dtype) @ x)
def _():
    linear = eqg.linear_host_function(
        lambda x: MATRIX @ x,
        lambda y: MATRIX.T @ y,
        out=lambda x: jnp.zeros(2, x.dtype),
    )
    return linear, (vector(),)
