"""Eigenvalues and singular values that are equal, nearly equal or zero."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from .helpers import quick_only


eigh, svd = eqg.safe.eigh, eqg.safe.svd


def _orthogonal(key, n):
    return jnp.linalg.qr(jr.normal(key, (n, n)))[0]


def _with_eigenvalues(seed, w):
    """A matrix with these eigenvalues; diagonal without a seed."""
    v = jnp.eye(len(w)) if seed is None else _orthogonal(jr.key(seed), len(w))
    return (v * jnp.asarray(w, v.dtype)[None]) @ v.T


def _of_eigenvalues(f):
    """`V f(Λ) V†`."""

    def fn(a, **options):
        w, v = eigh(a, **options)
        return (v * f(w)[None]) @ v.T

    return fn


def _symmetric(a):
    return (a + a.T) / 2


# Functions of a matrix with their outside witnesses, which are made of products and of JAX's
# exponential. In `float64`, so that the tolerance is 1.5e-8.
OF_EIGH = [
    (_of_eigenvalues(jnp.exp), lambda a: jax.scipy.linalg.expm(_symmetric(a))),
    (
        _of_eigenvalues(lambda w: 1 / (w + 3)),
        lambda a: jnp.linalg.inv(_symmetric(a) + 3 * jnp.eye(len(a))),
    ),
    (
        lambda a: jnp.sum(eigh(a).eigenvalues ** 3),
        lambda a: jnp.trace(jnp.linalg.matrix_power(_symmetric(a), 3)),
    ),
]
OF_SVD = [
    (lambda a: (lambda u, s, vh: (u * s[None] ** 3) @ vh)(*svd(a)), lambda a: a @ a.T @ a),
    (lambda a: (lambda _, s, vh: (vh.T * s[None] ** 2) @ vh)(*svd(a)), lambda a: a.T @ a),
    (lambda a: jnp.sum(svd(a).S ** 4), lambda a: jnp.sum((a.T @ a) ** 2)),
]
MATRICES = {
    "eigh: diagonal": (OF_EIGH, lambda: _with_eigenvalues(None, [1.0, 1.0, 2.0])),
    "eigh: zero": (OF_EIGH, lambda: jnp.zeros((3, 3))),
    "eigh: pairs": (OF_EIGH, lambda: _with_eigenvalues(1, [-1.0, -1.0, 0.5, 0.5])),
    "eigh: low rank": (OF_EIGH, lambda: _with_eigenvalues(2, [0.0, 0.0, 0.0, 1.0])),
    "eigh: close": (OF_EIGH, lambda: _with_eigenvalues(3, [1.0, 1.0 + 1e-10, 2.0])),
    "eigh: closer": (OF_EIGH, lambda: _with_eigenvalues(4, [1.0, 1.0 + 3e-16, 2.0])),
    "svd: identity": (OF_SVD, lambda: jnp.eye(3)),
    "svd: zero": (OF_SVD, lambda: jnp.zeros((3, 3))),
    "svd: tall": (OF_SVD, lambda: _orthogonal(jr.key(0), 4)[:, :2]),
    "svd: wide of rank one": (OF_SVD, lambda: jnp.outer(jnp.ones(3), jnp.arange(1.0, 5))),
    "svd: singular": (OF_SVD, lambda: jnp.diag(jnp.array([1.0, 1.0, 0.0]))),
}


QUICK = ("eigh: pairs", "eigh: closer", "svd: zero", "svd: tall")


@pytest.mark.parametrize("name", quick_only(MATRICES, QUICK, pytest.mark.thorough))
def test_functions_of_a_matrix_have_the_right_derivative(name):
    functions, make = MATRICES[name]
    with jax.enable_x64():
        a = make()
        t_a = jr.normal(jr.key(4), a.shape)

        def both(fn):
            c = jr.normal(jr.key(5), jax.eval_shape(fn, a).shape)
            gradient = lambda a: jax.grad(lambda a: jnp.sum(fn(a) * c))(a)
            return lambda a: (gradient(a), jax.jvp(fn, (a,), (t_a,))[1])

        run = jax.jit(lambda a: [(both(f)(a), both(g)(a)) for f, g in functions])
        for got, expected in run(a):
            for x, y in zip(got, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=3e-6)


@pytest.mark.slow
def test_second_derivatives_at_equal_eigenvalues():
    """To the tolerance, and to the machine epsilon divided by its square: 2e-6."""
    with jax.enable_x64():
        a = _with_eigenvalues(1, [1.0, 1.0, 2.0])
        c, s, t = (_symmetric(x) for x in jr.normal(jr.key(2), (3, 3, 3)))
        fn = lambda a: jnp.sum(c * _of_eigenvalues(jnp.exp)(a, tolerance=1e-5))
        plain = lambda a: jnp.sum(c * jax.scipy.linalg.expm(_symmetric(a)))
        along = lambda fn: lambda a: jax.jvp(fn, (a,), (s,))[1]
        expected = jax.grad(along(plain))(a)
        np.testing.assert_allclose(jax.grad(along(fn))(a), expected, atol=3e-4)
        forward = jax.jvp(along(fn), (a,), (t,))[1]
        np.testing.assert_allclose(forward, jnp.sum(expected * t), atol=3e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extremes_of_scale(scale):
    """`V Λ V†` is the matrix: its derivative is the identity."""
    a = jnp.float32(scale) * jnp.diag(jnp.array([1.0, 1.0, 2.0], "float32"))
    c = jnp.arange(9, dtype="float32").reshape(3, 3)
    grad = jax.grad(lambda a: jnp.sum(c * _of_eigenvalues(lambda w: w)(a)))(a)
    np.testing.assert_allclose(grad, _symmetric(c), rtol=5e-3)
    of_svd = lambda a: (lambda u, s, vh: (u * s[None]) @ vh)(*svd(a))
    grad = jax.grad(lambda a: jnp.sum(c * of_svd(a)))(a)
    np.testing.assert_allclose(grad, c, rtol=5e-3, atol=1e-2)


def test_values_are_those_of_jax():
    """And remain so under differentiation, if the eigenvalues are separate."""
    a = _symmetric(jr.normal(jr.key(0), (4, 4)))
    ours, theirs = (*eigh(a), *svd(a, full_matrices=True)), jnp.linalg
    jax.tree.map(np.testing.assert_array_equal, ours, (*theirs.eigh(a), *theirs.svd(a)))
    under_jvp = lambda a: jax.jvp(lambda a: eigh(a).eigenvalues, (a,), (a,))[0]
    np.testing.assert_array_equal(under_jvp(a), eigh(a).eigenvalues)
    equal = jnp.eye(3)
    assert (eigh(equal).eigenvalues == 1).all()
    spacing = (jnp.finfo(equal.dtype).eps / 3) ** 0.5
    np.testing.assert_allclose(jnp.diff(under_jvp(equal)), spacing, rtol=1e-2)
    assert (under_jvp(equal) >= 1).all()
    assert eigh(jnp.zeros((2, 0, 0))).eigenvalues.shape == (2, 0)
    assert svd(jnp.zeros((0, 3))).Vh.shape == (0, 3)
    # The tolerance is relative to the eigenvalue: log determinants of graded matrices.
    w = jnp.array([1e-3, 1.1e-3, 1.2e-3, 1.0])
    value, grad = jax.value_and_grad(lambda a: jnp.sum(jnp.log(eigh(a).eigenvalues)))(
        _with_eigenvalues(None, w)
    )
    np.testing.assert_allclose(value, jnp.sum(jnp.log(w)), rtol=1e-6)
    np.testing.assert_allclose(jnp.diag(grad), 1 / w, rtol=1e-5)
