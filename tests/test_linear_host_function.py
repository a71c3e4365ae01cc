"""Linear maps on the host, against the same matrices in JAX."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from eqx_grads import RuleError

from .helpers import assert_close


pytestmark = pytest.mark.x64


MATRIX = np.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4]])


def like_out(x, *args):
    return jnp.zeros(2, x.dtype)


def matvec(x, scale=1.0):
    return scale * (MATRIX @ x)


def rmatvec(y, scale=1.0):
    return scale * (MATRIX.T @ y)


linear = eqg.linear_host_function(matvec, rmatvec, out=like_out)


def in_jax(x, scale=1.0):
    return scale * (jnp.asarray(MATRIX, x.dtype) @ x)


def point():
    return jnp.array([1.0, -0.5, 2.0])


@pytest.mark.slow
def test_a_rule_applies_it_to_its_tangents():
    """jax#30401: a `pure_callback` there fails, here or in the Hessian."""

    def make(f):
        @jax.custom_jvp
        def squared(x):
            return f(x) ** 2

        @squared.defjvp
        def squared_jvp(primals, tangents):
            (x,), (t_x,) = primals, tangents
            return squared(x), 2 * f(x) * f(t_x)

        return lambda x: jnp.sum(jnp.cos(squared(x)))

    got, expected = make(linear), make(in_jax)
    for derivative in (jax.grad, jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        assert_close(jax.jit(derivative(got))(point()), derivative(expected)(point()), eps=500)
    xs = jnp.stack([point(), -point()])
    scanned = lambda f: (
        lambda x: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0 * x[0, 0], x)[0]
    )
    assert_close(jax.grad(scanned(got))(xs), jax.grad(scanned(expected))(xs), eps=500)


def test_complex_maps_are_given_by_their_adjoint():
    """As SciPy's, whose methods are passed as they are."""
    with jax.enable_x64(True):
        matrix = jnp.asarray(MATRIX + 1j * MATRIX[::-1, ::-1])
        operator = scipy.sparse.linalg.aslinearoperator(np.asarray(matrix))
        f = eqg.linear_host_function(
            operator.matvec, operator.rmatvec, out=jnp.zeros(2, jnp.complex128)
        )
        z, ct = jnp.array([1.0 + 2.0j, 0.3, -1.0j]), jnp.array([1.0 + 1.0j, 2.0 - 1.0j])
        witness = lambda z: matrix @ z
        assert_close(jax.vjp(f, z)[1](ct), jax.vjp(witness, z)[1](ct))
        norm = lambda f: lambda z: jnp.sum(jnp.abs(f(z)) ** 2)
        assert_close(jax.grad(norm(f))(z), jax.grad(norm(witness))(z))


def test_errors():
    x = point()
    with pytest.raises(RuleError, match="was differentiated with respect to a parameter"):
        jax.grad(lambda scale: jnp.sum(linear(x, scale)))(2.0)
    with pytest.raises(RuleError, match="the others have no derivative"):
        jax.jvp(lambda scale: linear(x, scale), (2.0,), (1.0,))
    with pytest.raises(
        RuleError, match=r"linear in its first argument.*\n *at `x`: int32\[3\]"
    ):
        linear(jnp.arange(3, dtype=jnp.int32))
    with pytest.raises(RuleError, match=r"`matvec` returned a different shape.*\n.*promised "):
        eqg.linear_host_function(matvec, rmatvec)(x)  # the output is not like `x`
    wrong = eqg.linear_host_function(matvec, lambda y: y, out=like_out)
    with pytest.raises(RuleError, match="`<lambda>` returned a different shape"):
        jax.grad(lambda x: jnp.sum(wrong(x)))(x)
    with pytest.raises(RuleError, match="`rmatvec` of `linear_host_function`"):
        eqg.linear_host_function(matvec, None)
    with pytest.raises(RuleError, match=r"`vmap_method` of (?s:.)*'all'"):
        eqg.linear_host_function(matvec, rmatvec, vmap_method="all")
    with pytest.raises(RuleError, match="closes over a traced value"):
        jax.jit(lambda a: eqg.linear_host_function(lambda x: a * x, lambda y: a * y)(a))(1.0)
