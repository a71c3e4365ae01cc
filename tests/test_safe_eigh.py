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


def _inner(x, y):
    return jnp.sum(jnp.real(jnp.conj(x) * y))


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
@pytest.mark.parametrize(
    "dtype",
    ["float32", "complex64", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)],
)
def test_single_precision(dtype, getkey):
    """To a few times the tolerance, which is 3.5e-4 in single precision."""
    real = "float32" if dtype == "complex64" else dtype
    v = _orthogonal(getkey(), 4, "float32").astype(dtype)
    a = (v * jnp.array([1, 1, 2, 2], dtype)[None]) @ _adjoint(v)
    c = jr.normal(getkey(), (4, 4)).astype(dtype)
    c = jax.lax.complex(c.real, c.real.T) if dtype == "complex64" else c
    fn = _of_eigenvalues(jnp.exp)
    grad = jax.grad(lambda a: _inner(c, fn(a)).astype(real))(a)
    plain = jax.grad(lambda a: _inner(c, jax.scipy.linalg.expm(_symmetric(a))))
    wide = "complex64" if dtype == "complex64" else "float32"
    c = c.astype(wide)
    expected = plain(a.astype(wide))
    assert grad.dtype == dtype
    error = jnp.linalg.norm(grad.astype(wide) - expected) / jnp.linalg.norm(expected)
    assert error < {"float32": 1e-3, "complex64": 1e-3, "float16": 0.1, "bfloat16": 0.2}[dtype]


@pytest.mark.slow
def test_all_distances_of_two_eigenvalues():
    """From equal to far apart, the error does not exceed a few tolerances. JAX's does."""
    with jax.enable_x64():
        key_v, key_c = jr.split(jr.key(0))
        v, c = _orthogonal(key_v, 3), jr.normal(key_c, (3, 3))
        gaps = jnp.concatenate([jnp.zeros(1), 10.0 ** jnp.arange(-17.0, 0.0)])

        def error(gap, eigh):
            a = _symmetric((v * jnp.stack([1.0, 1.0 + gap, jnp.array(2.0)])[None]) @ v.T)

            def exponential(a):
                w, v = eigh(a)
                return (v * jnp.exp(w)[None]) @ v.T

            grads = [
                jax.grad(lambda a, f=f: jnp.sum(c * f(_symmetric(a))))(a)
                for f in (exponential, jax.scipy.linalg.expm)
            ]
            return jnp.max(jnp.abs(grads[0] - grads[1]))

        errors = jax.jit(jax.vmap(lambda gap: jnp.stack([error(gap, f) for f in METHODS])))(
            gaps
        )
        assert (errors[:, 0] < 3e-7).all()
        assert not (errors[:, 1] < 1e-3).all()


METHODS = (eigh, jnp.linalg.eigh)


def test_many_equal_eigenvalues_in_single_precision(getkey):
    """A hundred of them move by 0.0034 at most."""
    a, c = jnp.eye(100), _symmetric(jr.normal(getkey(), (100, 100)))
    grad = jax.jit(jax.grad(lambda a: jnp.sum(c * _of_eigenvalues(jnp.exp)(a))))(a)
    error = jnp.linalg.norm(grad - jnp.e * c) / jnp.linalg.norm(jnp.e * c)
    assert error < 3e-3


@pytest.mark.slow
def test_projectors_and_occupations(getkey):
    """A density matrix: the projector on the lowest eigenvectors, a pair of equal ones among
    them, against its contour integral, the resolvent summed around the occupied eigenvalues."""
    with jax.enable_x64():
        a = _with_eigenvalues(getkey(), [-1.0, -1.0, 0.5, 2.0])
        c = jr.normal(getkey(), (4, 4))

        def projector(a):
            v = eigh(a).eigenvectors[:, :2]
            return v @ v.T

        def by_contour(a):
            a = _symmetric(a).astype(complex)
            angle = 2 * jnp.pi * (jnp.arange(64.0) + 0.5) / 64
            z = jax.lax.complex(jnp.cos(angle), jnp.sin(angle))[:, None, None]
            inverse = jnp.linalg.inv((z - 1) * jnp.eye(4, dtype=complex)[None] - a[None])
            return jnp.real(jnp.mean(z * inverse, 0))

        loss = lambda fn: lambda a: jnp.sum(c * fn(a))
        np.testing.assert_allclose(projector(a), by_contour(a), atol=1e-9)
        grads = [jax.jit(jax.grad(loss(fn)))(a) for fn in (projector, by_contour)]
        np.testing.assert_allclose(*grads, atol=1e-6)


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


@pytest.mark.slow
def test_second_derivatives_of_separate_eigenvalues_are_exact():
    with jax.enable_x64():
        a = _with_eigenvalues(jr.key(1), [-1.0, 0.5, 2.0])
        c = jr.normal(jr.key(2), (3, 3))
        ours = lambda a: jnp.sum(c * _of_eigenvalues(jnp.exp)(a))
        plain = lambda a: jnp.sum(c * jax.scipy.linalg.expm(_symmetric(a)))
        got, expected = jax.jit(lambda a: (jax.hessian(ours)(a), jax.hessian(plain)(a)))(a)
        np.testing.assert_allclose(got, expected, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extremes_of_scale(scale):
    """`V Λ V†` is the matrix: the derivative is that of the identity."""
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


def _left(a):
    u, s, _ = svd(a)
    return (u * jnp.exp(s**2)[..., None, :].astype(u.dtype)) @ _adjoint(u)


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


@pytest.mark.slow
def test_even_functions_on_the_left():
    with jax.enable_x64():
        a = 0.5 * _orthogonal(jr.key(0), 3)
        c = jr.normal(jr.key(5), (3, 3))
        plain = lambda a: jax.scipy.linalg.expm(a @ a.T)
        grads = [jax.grad(lambda a, f=f: jnp.sum(c * f(a)))(a) for f in (_left, plain)]
        np.testing.assert_allclose(*grads, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(3, 3), (4, 2), pytest.param((2, 4), marks=pytest.mark.slow)]
)
def test_complex_matrices(shape):
    """The phases of singular vectors are arbitrary."""
    with jax.enable_x64():
        re, im = jr.normal(jr.key(0), (2, *shape))
        t_re, t_im = jr.normal(jr.key(1), (2, *shape))
        t_a = jax.lax.complex(t_re, t_im)
        equal = jax.lax.complex(jnp.eye(*shape), jnp.eye(*shape))
        for a in (jax.lax.complex(re, im), equal):
            for ours, plain in (OF_SVD["odd"], OF_SVD["even"]):
                got, expected = (jax.jvp(f, (a,), (t_a,))[1] for f in (ours, plain))
                np.testing.assert_allclose(got, expected, atol=3e-6)
                c = jax.lax.stop_gradient(expected)
                got, expected = (
                    jax.grad(lambda a, f=f, c=c: _inner(c, f(a)))(a) for f in (ours, plain)
                )
                np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.slow
def test_complex_hermitian_matrices():
    with jax.enable_x64():
        re, im = jr.normal(jr.key(0), (2, 3, 3))
        t = jax.lax.complex(re, im)
        ordinary = _symmetric(t)
        v = jnp.linalg.eigh(ordinary)[1]
        equal = (v * jnp.array([1.0, 1.0, 2.0], v.dtype)[None]) @ _adjoint(v)
        for a in (ordinary, equal):
            ours, plain = FUNCTIONS["exp"]
            loss = lambda f, a=a: lambda a: _inner(t, f(_symmetric(a)))
            grads = [jax.grad(loss(f))(a) for f in (ours, plain)]
            np.testing.assert_allclose(*grads, atol=1e-6)


# ---------------------------------------------------------------- transformations and edges


@pytest.mark.slow
def test_transformations(getkey):
    """`vmap`, batch dimensions, `scan` and `checkpoint`, against a loop over the matrices."""
    a = jnp.stack([jnp.eye(3), jnp.diag(jnp.array([1.0, 2.0, 2.0]))])
    c = jr.normal(getkey(), (3, 3))
    for fn in (_of_eigenvalues(jnp.exp), _cube):
        loss = lambda a, fn=fn: jnp.sum(c * fn(a))

        @jax.jit
        def run(a, loss=loss, fn=fn):
            body = lambda total, a: (total + loss(a), None)
            return [
                jnp.stack([jax.grad(loss)(x) for x in a]),
                jax.vmap(jax.grad(loss))(a),
                jax.grad(lambda a: jnp.sum(c[None] * fn(a)))(a),
                jax.grad(lambda a: jax.lax.scan(jax.checkpoint(body), 0.0, a)[0])(a),
            ]

        expected, *got = run(a)
        for grads in got:
            np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-4)


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


@pytest.mark.slow
def test_what_depends_on_the_choice_is_finite():
    a = jnp.diag(jnp.array([1.0, 1.0, 2.0]))
    assert jnp.isfinite(jax.jacobian(lambda a: eigh(a).eigenvectors)(a)).all()
    assert jnp.isfinite(jax.jacobian(lambda a: tuple(svd(a)))(jnp.zeros((3, 2)))[0]).all()


def test_which_entries_are_read(getkey):
    a = jr.normal(getkey(), (3, 3))
    loss = lambda a, **options: jnp.sum(jnp.exp(eigh(a, **options).eigenvalues))
    grad = jax.grad(loss)(a)
    np.testing.assert_allclose(grad, grad.T, rtol=1e-6)
    np.testing.assert_allclose(loss(a), loss(_symmetric(a)), rtol=1e-6)
    lower = jax.grad(lambda a: loss(a, symmetrize_input=False))(a)
    assert (lower == jnp.tril(lower)).all()
    full = jnp.tril(a) + jnp.tril(a, -1).T
    expected = jax.grad(loss)(full)
    expected = jnp.tril(expected) + jnp.tril(expected, -1)
    np.testing.assert_allclose(lower, expected, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("decomposition", [safe.eigh, safe.svd])
@pytest.mark.parametrize("tolerance", [-1.0, jnp.nan, jnp.inf])
def test_tolerance_out_of_range(decomposition, tolerance):
    with pytest.raises(eqg.RuleError, match="a finite number from zero"):
        decomposition(jnp.eye(2), tolerance=tolerance)
