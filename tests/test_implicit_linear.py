"""The linear system of an implicit derivative: which solver, and when it fails."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


lx = pytest.importorskip("lineax")

FAILS = (eqx.EquinoxRuntimeError, jax.errors.JaxRuntimeError, RuntimeError)


def _solve(x, matrix):
    return jnp.linalg.solve(matrix, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["QR", "SVD", "LSMR"])
def test_more_equations_than_unknowns(name, getkey):
    a = jr.normal(getkey(), (5, 2))
    options = {"rtol": 1e-6, "atol": 1e-6} if name == "LSMR" else {}

    @eqg.implicit(lambda y, x: [a @ (y - x)], solver=getattr(lx, name)(**options))
    def consistent(x):
        return x

    x = jnp.array([1.0, 2.0])
    for jacobian in (jax.jacfwd, jax.jacrev):
        assert_close(jax.jit(jacobian(consistent))(x), jnp.eye(2), tolerance=1e-4)


@pytest.mark.slow
def test_singular_matrix():
    """A translation of the solution is free: `SVD` takes the smallest, LU raises."""
    laplacian = jnp.array([[1.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 1.0]])
    residual = lambda y, x: laplacian @ y - (x - jnp.mean(x))
    smallest = lambda x: jnp.linalg.pinv(laplacian) @ x
    x = jnp.array([1.0, 2.0, 4.0])
    by_svd = eqg.implicit(residual, solver=lx.SVD())(smallest)
    expected = np.linalg.pinv(laplacian)
    assert_close(jax.jit(jax.jacrev(by_svd))(x), expected, tolerance=1e-5)


@pytest.mark.parametrize("residual", ["scalar", "elementwise", "dense"])
def test_singular_is_an_error(residual):
    fns = {
        "scalar": (lambda y, a: y**2 - a, jnp.array(0.0)),
        "elementwise": (lambda y, a: y**2 - a, jnp.zeros(3)),
        "dense": (lambda y, a: jnp.sum(y) * jnp.ones(3) - a, jnp.zeros(3)),
    }
    fn, a = fns[residual]
    root = eqg.implicit(fn)(lambda a: jnp.zeros_like(a))
    with pytest.raises(FAILS, match="The Jacobian of the residual `<lambda>`"):
        eqx.filter_jit(jax.grad(lambda a: jnp.sum(root(a))))(a)


@pytest.mark.thorough
@pytest.mark.parametrize("transform", ["eager", "jit", "vmap", "forward", "second order"])
def test_the_error_of_a_singular_matrix_names_residual_and_solver(transform):
    matrix = jnp.array([[1.0, 2.0], [2.0, 4.0]])

    def equations(y, b):
        return matrix @ y - b

    @eqg.implicit(equations)
    def lowest(b):
        return jnp.linalg.pinv(matrix) @ b

    b = jnp.array([1.0, 2.0])
    run = {
        "eager": jax.jacrev(lowest),
        "jit": jax.jit(jax.jacrev(lowest)),
        "vmap": lambda b: jax.vmap(jax.jacrev(lowest))(jnp.stack([b, b])),
        "forward": jax.jacfwd(lowest),
        "second order": jax.hessian(lambda b: jnp.sum(lowest(b) ** 2)),
    }[transform]
    with pytest.raises(FAILS, match="derivative of `lowest` failed") as caught:
        jax.block_until_ready(run(b))
    message = str(caught.value)
    assert f'residual `equations` (in `equations`, file "{__file__}"' in message
    assert "is singular at the solution" in message
    assert "`lineax.SVD()`" in message


@pytest.mark.parametrize("solver", [None, lx.LU()], ids=["default", "LU"])
@pytest.mark.parametrize("transform", ["reverse", "forward", "vmap"])
def test_a_pivot_that_is_a_rounding_error_is_not_a_number_to_divide_by(transform, solver):
    """The rows are in arithmetic progression. In floating point no pivot of LU is zero."""
    matrix = jnp.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    residual = lambda y, b: matrix @ y - b
    solve = eqg.implicit(residual, solver=solver)(lambda b: jnp.linalg.pinv(matrix) @ b)
    run = {
        "reverse": jax.jit(jax.jacrev(solve)),
        "forward": jax.jit(jax.jacfwd(solve)),
        "vmap": lambda b: jax.vmap(jax.jacrev(solve))(jnp.stack([b, b])),
    }[transform]
    with pytest.raises(FAILS, match="singular at the solution to within rounding"):
        jax.block_until_ready(run(jnp.array([0.1, 0.2, 0.3])))


@pytest.mark.parametrize("scaled", ["rows", "columns", "both"])
@pytest.mark.parametrize("condition", [1e1, 1e5])
def test_equations_and_unknowns_of_other_sizes_are_not_called_singular(condition, scaled):
    """The error is as for `jnp.linalg.inv`, which is large where the sizes of rows differ."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(6, 6)))[0] for _ in range(2))
    matrix = left * np.logspace(0, -np.log10(condition), 6) @ right
    sizes = np.logspace(-6, 6, 6)
    if scaled in ("rows", "both"):
        matrix = sizes[:, None] * matrix
    if scaled in ("columns", "both"):
        matrix = matrix * rng.permutation(sizes)
    held, b = jnp.asarray(matrix, jnp.float32), jnp.asarray(matrix @ np.ones(6), jnp.float32)
    solve = eqg.implicit(lambda y, b: held @ y - b)(lambda b: jnp.linalg.solve(held, b))
    expected = np.linalg.inv(np.asarray(held, np.float64))

    def error(got):
        return np.linalg.norm(np.asarray(got) - expected, axis=0) / np.linalg.norm(
            expected, axis=0
        )

    peer = np.max(error(jnp.linalg.inv(held)))
    assert np.max(error(jax.jit(jax.jacfwd(solve))(b))) < 10 * peer


@pytest.mark.slow
def test_a_right_hand_side_that_is_not_finite_is_not_called_singular():
    """A NaN stays NaN, as in functions of JAX."""
    solve = eqg.implicit(lambda y, x: jnp.array([[2.0, 1.0], [1.0, 3.0]]) @ y - x)(
        lambda x: jnp.linalg.solve(jnp.array([[2.0, 1.0], [1.0, 3.0]]), x)
    )
    (ct,) = jax.vjp(solve, jnp.ones(2))[1](jnp.array([jnp.nan, 1.0]))
    assert jnp.all(jnp.isnan(ct))


@pytest.mark.slow
def test_matrix_free(getkey):
    """Many unknowns: GMRES, or conjugate gradients; even for a tiny cotangent."""
    n = 300
    a = jr.normal(getkey(), (n, n)) / n**0.5
    definite = a @ a.T + jnp.eye(n)
    x, ct = jr.normal(getkey(), (n,)), -1e-25 * jr.uniform(getkey(), (n,))
    for matrix, tags in (
        (2 * jnp.eye(n) + a, ()),
        (definite, lx.positive_semidefinite_tag),
    ):
        residual = lambda y, x, matrix: matrix @ y - x
        solve = ft.partial(eqg.implicit(residual, tags=tags)(_solve), matrix=matrix)
        got = jax.jit(lambda x, solve=solve: jax.vjp(solve, x)[1](ct)[0])
        assert_close(got(x) * 1e25, np.linalg.solve(matrix.T, ct * 1e25), tolerance=1e-3)


@pytest.mark.thorough
def test_matrix_free_failure_is_an_error(getkey):
    n = 300
    a = jr.normal(getkey(), (n, n))
    solve = eqg.implicit(lambda y, x: a @ y - x)(lambda x: jnp.linalg.solve(a, x))
    with pytest.raises(FAILS, match="did not reach its tolerance"):
        eqx.filter_jit(jax.grad(lambda x: jnp.sum(solve(x))))(jnp.ones(n))


def test_elementwise():
    """A residual that acts on each element by itself needs a division only."""
    solve = eqg.implicit(lambda y, a: jnp.where(y > 0, y**3, jax.jit(jnp.sinh)(y)) - a)(
        lambda a: jnp.where(a > 0, jnp.cbrt(a), jnp.arcsinh(a))
    )
    a = jnp.linspace(-2, 2, 1000)
    gradient = jax.grad(lambda a: jnp.sum(solve(a)))
    program = str(jax.make_jaxpr(gradient)(a))
    assert "lu" not in program.split()
    assert "while" not in program
    expected = jnp.where(a > 0, jnp.abs(a) ** (-2 / 3) / 3, 1 / jnp.sqrt(1 + a**2))
    assert_close(jax.jit(gradient)(a) / expected, jnp.ones(1000), eps=100)


def test_tags_of_complex_unknowns():
    root = eqg.implicit(lambda z, c: z**2 - c, tags=lx.diagonal_tag)(jnp.sqrt)
    with pytest.raises(RuleError, match="where the entries of a matrix are, of complex"):
        jax.jvp(root, (1j,), (1.0 + 0j,))
