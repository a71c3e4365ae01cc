"""`linear_function`, against autodiff of the same maps as matrices."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl  # noqa: TID251  a kernel

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]


MATRIX = np.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4]])


def product(matrix, x):
    """`matrix @ x`, in a loop that JAX can't transpose."""
    matrix = jnp.asarray(matrix, x.dtype)
    add_column = lambda s: (s[0] + 1, s[1] + matrix[:, s[0]] * x[s[0]])
    start = (0, 0 * matrix[:, 0] * x[0])
    return jax.lax.while_loop(lambda s: s[0] < matrix.shape[1], add_column, start)[1]


@eqg.linear_function
def linear(x, scale=1.0):
    return scale * (jnp.asarray(MATRIX, x.dtype) @ x)


@linear.def_rmatvec
def linear_rmatvec(y, scale=1.0):
    return scale * (jnp.asarray(MATRIX.T, y.dtype) @ y)


def witness(x, scale=1.0):
    return scale * (jnp.asarray(MATRIX, x.dtype) @ x)


X = jnp.array([1.0, -0.5, 2.0])


ORDERS = {
    "grad": jax.grad,
    "forward": jax.jacfwd,
    "hessian": jax.hessian,
    "reverse over reverse": lambda f, n: jax.jacrev(jax.grad(f, n), n),
    "reverse over forward": lambda f, n: jax.jacrev(jax.jacfwd(f, n), n),
    "third": lambda f, n: jax.jacrev(jax.hessian(f, n), n),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_a_map_that_jax_cannot_transpose(order):
    f = eqg.linear_function(ft.partial(product, MATRIX), ft.partial(product, MATRIX.T))
    of = lambda f: lambda x: jnp.sum(jnp.sin(f(x)) * x[0])
    got = jax.jit(ORDERS[order](of(f), 0))(X)
    assert_close(got, ORDERS[order](of(witness), 0)(X), eps=200)


SCANS = {
    "scan": jax.lax.scan,
    "replay": ft.partial(eqg.filter_scan, checkpoint="replay"),
    "sqrt": ft.partial(eqg.filter_scan, checkpoint="sqrt"),
}


@pytest.mark.parametrize("scan", SCANS)
def test_inside_a_scan(scan):
    def of(f, scan):
        def run(x, scale):
            step = lambda c, t: (jnp.tanh(c + t * jax.checkpoint(f)(x * c[0], scale)), None)
            return jnp.sum(scan(step, jnp.ones(2), jnp.array([0.3, 0.5, 0.4]))[0])

        return run

    for derivative in (jax.grad, jax.hessian):
        got = jax.jit(derivative(of(linear, SCANS[scan]), (0, 1)))(X, 0.7)
        expected = derivative(of(witness, jax.lax.scan), (0, 1))(X, 0.7)
        assert_close(got, expected, eps=100)


def test_inside_a_rule():
    """Also in an argument in which it happens to be linear as well."""

    def squared(f):
        g = eqg.custom_jvp(lambda x, s: f(x, s) ** 2)

        @g.def_jvp
        def rule(primals, tangents):
            (x, s), (t_x, t_s) = primals, tangents
            return g(x, s), 2 * f(x, s) * (f(t_x, s) + f(x, t_s))

        return lambda x, s: jnp.sum(jnp.cos(g(x, s)))

    for derivative in (jax.grad, jax.hessian, ORDERS["reverse over reverse"]):
        got = jax.jit(derivative(squared(linear), (0, 1)))(X, 0.7)
        assert_close(got, derivative(squared(witness), (0, 1))(X, 0.7), eps=500)


def test_what_it_closes_over_is_differentiated():
    def of(make):
        return lambda theta, x: jnp.sum(jnp.sin(make(theta)(x)))

    def make(theta):
        return eqg.linear_function(
            lambda x: theta[0] ** 2 * linear(x), lambda y: theta[0] ** 2 * linear_rmatvec(y)
        )

    plain = lambda theta: lambda x: theta[0] ** 2 * witness(x)
    theta = jnp.array([0.7, 1.0])
    for derivative in (jax.grad, jax.hessian, ORDERS["reverse over reverse"]):
        expected = derivative(of(plain), (0, 1))(theta, X)
        assert_close(derivative(of(make), (0, 1))(theta, X), expected, eps=100)
        assert_close(jax.jit(derivative(of(make), (0, 1)))(theta, X), expected, eps=100)
    thetas = jnp.stack([theta, 2 * theta])
    batched = lambda make: jax.vmap(jax.grad(of(make)), (0, None))(thetas, X)
    assert_close(batched(make), batched(plain), eps=100)


def test_a_kernel():
    """jax#26121. The interpreter of Pallas has no transpose."""

    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...] + x_ref[...][::-1]

    def call(x):
        return pl.pallas_call(kernel, jax.typeof(x), interpret=True)(x)

    f = eqg.linear_function(call, call)  # symmetric
    plain = lambda x: 2 * x + x[::-1]
    of = lambda f: lambda x: jnp.sum(jnp.sin(f(x)))
    for derivative in (jax.grad, jax.hessian):
        assert_close(jax.jit(derivative(of(f)))(X), derivative(of(plain))(X))


def test_a_complex_value_of_a_real_argument():
    """A discrete Fourier transform: only the real part of the adjoint is a cotangent."""
    f = eqg.linear_function(jnp.fft.fft, lambda y: y.size * jnp.fft.ifft(y))
    power = lambda f: lambda x: jnp.sum(jnp.abs(f(x)) ** 4)
    for derivative in (jax.grad, jax.hessian):
        got = derivative(power(f))(X)
        assert got.dtype == X.dtype
        assert_close(got, derivative(power(jnp.fft.fft))(X), eps=2000)


def test_a_method_that_is_linear_in_self():
    """Which was not meant."""

    class Forgotten(eqx.Module):
        matrix: jax.Array

        @eqg.linear_function
        def __call__(self, x):
            return self.matrix @ x

        @__call__.def_rmatvec
        def adjoint(self, y):
            return self.matrix.T @ y

    with pytest.raises(AttributeError, match="matrix") as caught:
        jax.jit(lambda x: Forgotten(jnp.asarray(MATRIX, X.dtype))(x))(X)
    assert "or another by `argnum`" in caught.value.__notes__[0]


def test_a_parameter_without_a_derivative():
    def on_host(x, scale):
        call = lambda x, scale: np.asarray(scale) * np.asarray(x)
        return jax.pure_callback(call, x, x, scale, vmap_method="sequential")

    f = eqg.linear_function(on_host, on_host)
    assert_close(jax.grad(lambda x: jnp.sum(f(x, 2.0)))(X), 2 * jnp.ones(3))
    with pytest.raises(ValueError, match="do not support JVP") as caught:
        jax.grad(lambda scale: jnp.sum(f(X, scale)))(2.0)
    assert "is linear in `x`. With respect to all else" in caught.value.__notes__[0]
