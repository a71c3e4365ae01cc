"""Eigenvalues and singular values that are equal, nearly equal or zero."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest


safe = eqg.safe
eigh, svd = safe.eigh, safe.svd


def _orthogonal(key, n, dtype=None):
    return jnp.linalg.qr(jr.normal(key, (n, n), dtype or jnp.result_type(float)))[0]


def _adjoint(x):
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _with_eigenvalues(key, w, dtype=None):
    """A matrix with these eigenvalues; diagonal without a key."""
    v = jnp.eye(len(w)) if key is None else _orthogonal(key, len(w), dtype)
    return (v * jnp.asarray(w, v.dtype)[None]) @ _adjoint(v)


def _of_eigenvalues(f):
    """`V f(Λ) V†`."""

    def fn(a, **options):
        w, v = eigh(a, **options)
        return (v * f(w)[..., None, :].astype(v.dtype)) @ _adjoint(v)

    return fn


def _symmetric(a):
    return (a + _adjoint(a)) / 2


SPECTRA = {
    "diagonal": (None, [1.0, 1.0, 2.0]),
    "one": (None, [1.0, 1.0, 1.0]),
    "zero": (None, [0.0, 0.0, 0.0]),
    "pairs": (1, [-1.0, -1.0, 0.5, 0.5]),
    "low rank": (2, [0.0, 0.0, 0.0, 1.0]),
    "close": (3, [1.0, 1.0 + 1e-10, 2.0]),
    "closer": (4, [1.0, 1.0 + 3e-16, 2.0]),
    "ordinary": (5, [-1.0, 0.5, 2.0]),
}
# Functions of a matrix with their outside witnesses, which are made of products and of JAX's
# exponential. In `float64`, so that the tolerance is 1.5e-8.
FUNCTIONS = {
    "exp": (_of_eigenvalues(jnp.exp), jax.scipy.linalg.expm),
    "square": (_of_eigenvalues(jnp.square), lambda a: a @ a),
    "inverse": (
        _of_eigenvalues(lambda w: 1 / (w + 3)),
        lambda a: jnp.linalg.inv(a + 3 * jnp.eye(a.shape[-1])),
    ),
    "trace": (
        lambda a: jnp.sum(eigh(a).eigenvalues ** 3),
        lambda a: jnp.trace(a @ a @ a),
    ),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_functions_of_a_matrix_have_the_right_derivative(spectrum):
    key, w = SPECTRA[spectrum]
    with jax.enable_x64():
        a = _with_eigenvalues(None if key is None else jr.key(key), w)
        c, t_a = jr.normal(jr.key(7), (2, *a.shape))

        @jax.jit
        def run(a):
            def both(fn):
                loss = lambda a: jnp.sum(fn(a) * (c if fn(a).ndim else 1))
                return jax.grad(loss)(a), jax.jvp(fn, (a,), (t_a,))[1]

            for_sym = lambda fn: lambda a: fn(_symmetric(a))
            return {k: (both(f), both(for_sym(g))) for k, (f, g) in FUNCTIONS.items()}

        for name, (got, expected) in run(a).items():
            for x, y in zip(got, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_second_derivatives_at_equal_eigenvalues():
    """To the tolerance, and to the machine epsilon divided by its square: 2e-6."""
    with jax.enable_x64():
        a = _with_eigenvalues(jr.key(1), [1.0, 1.0, 2.0])
        c, s, t = (_symmetric(x) for x in jr.normal(jr.key(2), (3, 3, 3)))
        fn = lambda a: jnp.sum(c * _of_eigenvalues(jnp.exp)(a, tolerance=1e-5))
        plain = lambda a: jnp.sum(c * jax.scipy.linalg.expm(_symmetric(a)))

        @jax.jit
        def second(a):
            along = lambda fn: lambda a: jax.jvp(fn, (a,), (s,))[1]
            ours, theirs = along(fn), along(plain)
            return jax.grad(ours)(a), jax.grad(theirs)(a), jax.jvp(ours, (a,), (t,))[1]

        reverse, expected, forward = second(a)
        np.testing.assert_allclose(reverse, expected, atol=3e-4)
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


# ---------------------------------------------------------------- singular values

MATRICES = {
    "identity": lambda: jnp.eye(3),
    "zero": lambda: jnp.zeros((3, 3)),
    "orthogonal": lambda: 2 * _orthogonal(jr.key(0), 3),
    "tall": lambda: _orthogonal(jr.key(0), 4)[:, :2],
    "wide": lambda: _orthogonal(jr.key(0), 4)[:2],
    "tall of rank one": lambda: jnp.outer(jnp.arange(1.0, 5), jnp.ones(3)),
    "wide of rank one": lambda: jnp.outer(jnp.ones(3), jnp.arange(1.0, 5)),
    "singular": lambda: jnp.diag(jnp.array([1.0, 1.0, 0.0])),
    "ordinary": lambda: jr.normal(jr.key(3), (3, 4)),
}


def _cube(a):
    u, s, vh = svd(a)
    return (u * (s**3)[..., None, :].astype(u.dtype)) @ vh


def _right(a):
    _, s, vh = svd(a)
    return (_adjoint(vh) * (s**2)[..., None, :].astype(vh.dtype)) @ vh


OF_SVD = {
    "odd": (_cube, lambda a: a @ _adjoint(a) @ a),
    "even": (_right, lambda a: _adjoint(a) @ a),
    "norms": (
        lambda a: jnp.sum(svd(a).S ** 4),
        lambda a: jnp.sum((_adjoint(a) @ a) ** 2),
    ),
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_functions_of_singular_values(matrix):
    with jax.enable_x64():
        a = MATRICES[matrix]()
        t_a = jr.normal(jr.key(4), a.shape)

        @jax.jit
        def run(a):
            def both(fn):
                out = jax.eval_shape(fn, a)
                loss = lambda a: jnp.sum(fn(a) * jr.normal(jr.key(5), out.shape))
                return jax.grad(loss)(a), jax.jvp(fn, (a,), (t_a,))[1]

            return {k: (both(f), both(g)) for k, (f, g) in OF_SVD.items()}

        for name, (got, expected) in run(a).items():
            for x, y in zip(got, expected, strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=3e-6, err_msg=name)


# ---------------------------------------------------------------- transformations and edges


def test_values_are_those_of_jax(getkey):
    """And remain so under differentiation, if the eigenvalues are separate."""
    a = _symmetric(jr.normal(getkey(), (2, 4, 4)))
    np.testing.assert_array_equal(eigh(a).eigenvalues, jnp.linalg.eigh(a).eigenvalues)
    np.testing.assert_array_equal(eigh(a).eigenvectors, jnp.linalg.eigh(a).eigenvectors)
    under_jvp, _ = jax.jvp(lambda a: eigh(a).eigenvalues, (a,), (a,))
    np.testing.assert_array_equal(under_jvp, eigh(a).eigenvalues)
    for x, y in zip(svd(a), jnp.linalg.svd(a, full_matrices=False), strict=True):
        np.testing.assert_array_equal(x, y)
    equal = jnp.eye(3)
    assert (eigh(equal).eigenvalues == 1).all()
    moved, _ = jax.jvp(lambda a: eigh(a).eigenvalues, (equal,), (equal,))
    spacing = (jnp.finfo(equal.dtype).eps / 3) ** 0.5
    np.testing.assert_allclose(jnp.diff(moved), spacing, rtol=1e-2)
    assert (moved >= 1).all()


def test_small_eigenvalues_that_are_known_are_not_moved():
    """The tolerance is relative to the eigenvalue: log determinants of graded matrices."""
    w = jnp.array([1e-3, 1.1e-3, 1.2e-3, 1.0])
    a = _with_eigenvalues(None, w)
    value, grad = jax.value_and_grad(lambda a: jnp.sum(jnp.log(eigh(a).eigenvalues)))(a)
    np.testing.assert_allclose(value, jnp.sum(jnp.log(w)), rtol=1e-6)
    np.testing.assert_allclose(jnp.diag(grad), 1 / w, rtol=1e-5)


def test_edges():
    assert eigh(jnp.zeros((2, 0, 0))).eigenvalues.shape == (2, 0)
    assert svd(jnp.zeros((0, 3))).Vh.shape == (0, 3)
    np.testing.assert_allclose(eigh(np.diag([2, 1])).eigenvalues, [1, 2])
    assert jax.grad(lambda a: eigh(a).eigenvalues.sum())(jnp.full((1, 1), 3.0)) == 1
    assert eigh(jnp.eye(2, dtype="bfloat16")).eigenvectors.dtype == jnp.bfloat16
    with pytest.raises(eqg.RuleError, match=r"`safe\.eigh` was not given square matrices"):
        eigh(jnp.ones((2, 3)))
    with pytest.raises(eqg.RuleError, match=r"`safe\.svd` was not given matrices"):
        svd(jnp.ones(2))
