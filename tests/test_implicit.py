"""`eqg.implicit`: the derivative of a solver, from the equation that it solves, and its linear
system."""

import functools as ft
import re
import sys

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


lx = pytest.importorskip("lineax")

FAILS = (eqx.EquinoxRuntimeError, jax.errors.JaxRuntimeError, RuntimeError)


def newton(fn, y, steps=20):
    """The root of a function of one number, without a reverse mode."""
    step = lambda s: (s[0] + 1, s[1] - fn(s[1]) / jax.grad(fn)(s[1]))
    return jax.lax.while_loop(lambda s: s[0] < steps, step, (0, y))[1]


def noted(error, text):
    """The one note that has this text."""
    (note,) = [note for note in error.value.__notes__ if text in note]
    return note


# ---------------------------------------------------------------- arguments and outputs


def test_closures_in_scan_and_vmap():
    def loss(a):
        def step(y, x):
            residual = lambda y: jnp.sinh(y) - a * x  # closes over both

            # The last solution is the first guess, with no `stop_gradient`.
            return eqg.implicit(residual)(lambda *, guess: newton(residual, guess))(guess=y), y

        return jax.lax.scan(step, a, jnp.array([0.5, 1.0, 1.5]))[0]

    points = jnp.array([0.4, 0.8])
    slopes = jax.jit(jax.vmap(jax.grad(loss)))(points)
    assert_close(slopes, jax.vmap(jax.grad(lambda a: jnp.arcsinh(1.5 * a)))(points), eps=100)


@pytest.mark.slow
def test_keyword_only():
    """An argument that the residual does not take has a zero derivative; the rest is
    configuration."""

    @eqg.implicit(lambda y, a, *, power: y**power - a)
    def root(a, *, power=2, guess=None):
        return a ** (1 / jnp.asarray(power, a.dtype)) + (0 if guess is None else 0 * guess)

    assert jax.grad(lambda g: root(0.7, guess=g))(1.0) == 0
    assert_close(jax.grad(root)(4.0), 0.25)
    assert_close(jax.grad(lambda a: root(a, power=3))(8.0), 1 / 12)
    match = r"The keyword-only argument `power` of `root` was diff"
    with pytest.raises(RuleError, match=match):
        jax.grad(lambda p: root(4.0, power=p))(2.0)


def test_aux():
    @eqg.implicit(lambda y, a: y**2 - a, has_aux=True)
    def root(a):
        return jnp.sqrt(a), {"steps": 3, "value": 2 * a, "name": "sqrt"}

    y, aux = root(4.0)
    assert (y, aux["steps"], aux["value"], aux["name"]) == (2.0, 3, 8.0, "sqrt")
    value, slope = jax.value_and_grad(lambda a: root(a)[0] + root(a)[1]["value"])(4.0)
    assert (value, slope) == (10.0, 0.25)


def test_empty():
    identity = eqg.implicit(lambda y, a: y - a)(lambda a: a)
    assert jax.grad(lambda a: jnp.sum(identity(a)))(jnp.zeros((0, 2))).shape == (0, 2)
    nothing = eqg.implicit(lambda y, a: ())(lambda a: ())
    assert jax.grad(lambda a: a + float(nothing(a) == ()))(1.0) == 1.0


@pytest.mark.slow
def test_solvers_of_others():
    """SciPy, which sees numbers in eager mode and a callback else."""
    optimize = pytest.importorskip("scipy.optimize")
    residual = lambda y, a: y**3 + y - a
    brentq = lambda a: np.asarray(
        optimize.brentq(residual, -10.0, 10.0, args=(float(a),)), a.dtype
    )
    eager = eqg.implicit(residual)(lambda a: jnp.asarray(brentq(a)))
    assert_close(jax.grad(eager)(2.0), 0.25)
    assert_close(jax.hessian(eager)(2.0), -6 / 64, eps=50)
    by_callback = eqg.implicit(residual)(
        lambda a: jax.pure_callback(brentq, a, a, vmap_method="sequential")
    )
    slopes = jax.jit(jax.vmap(jax.grad(by_callback)))(jnp.array([2.0, 10.0]))
    assert_close(slopes, jnp.array([1 / 4, 1 / 13]))


@pytest.mark.slow
def test_the_tracers_that_lineax_keeps_are_no_fault_of_a_rule():
    """From JAX 0.11 on with each trace, before Python 3.13 in a run-time check."""
    solve = lambda a: np.stack([np.sqrt(a), 1 - np.sqrt(a)])
    on_host = eqg.host_function(solve, out=lambda a: jax.ShapeDtypeStruct((2,), a.dtype))
    equations = lambda z, a: jnp.stack([z[0] ** 2 - a, z[1] + z[0] - 1.0])
    root = eqg.implicit(equations)(on_host)
    assert eqgt.check_rule(root, jnp.array(2.0), checks=("leaks",), order=1).passed


# ---------------------------------------------------------------- is it a solution?


def test_the_line_of_the_residual_is_named():
    """Even when the program that fails was compiled for an earlier call, whose stack the error
    has."""

    def close_to_root(y, a):
        return y**2 - a

    solve = eqg.implicit(close_to_root)(lambda a: jnp.full_like(a, 2.0))
    gradient = eqx.filter_jit(jax.grad(solve))
    assert gradient(4.0) == 0.25
    code = close_to_root.__code__
    place = f'in `close_to_root`, file "{code.co_filename}", line {code.co_firstlineno}'
    for again in (gradient, jax.jit(gradient), jax.grad(solve)):
        with pytest.raises(FAILS, match=re.escape(place)):
            again(9.0)


def test_tolerance():
    rough = lambda **options: jax.grad(
        eqg.implicit(lambda y, a: y**2 - a, **options)(lambda a: jnp.sqrt(a) * 1.001)
    )
    assert_close(rough(tolerance=None)(4.0), 0.25 / 1.001)
    assert_close(rough(tolerance=1.0)(4.0), 0.25 / 1.001)
    with pytest.raises(FAILS, match="tolerance=1e-06"):
        rough(tolerance=1e-6)(4.0)


@pytest.mark.parametrize("a", [0.0, 1e-12, 1e12])
def test_small_at_all_scales(a):
    """A root at zero, and tiny and huge ones, of a solver with an absolute error."""
    residual = lambda y, a: y**3 + y - a
    near = lambda a: newton(lambda y: residual(y, a), 1 + a, steps=120) + 1e-6
    assert jnp.isfinite(jax.jit(jax.grad(eqg.implicit(residual)(near)))(a))


# ---------------------------------------------------------------- residuals with a mistake


def test_a_residual_with_its_arguments_in_another_order():
    class Root(eqx.Module):
        a: jax.Array

        @eqg.implicit(lambda self, y, b: self.a * y**2 - b)
        def __call__(self, b):
            return jnp.sqrt(b / self.a)

    with pytest.raises(AttributeError, match=r"no attribute '?a") as error:
        jax.grad(Root(jnp.array(2.0)))(3.0)
    note = noted(error, "residual")
    assert "is called with the solution of `" in note
    assert "begin with `self`" in note

    def swapped(a, y):
        return y[5] - a[0], a[1]

    solve = eqg.implicit(swapped)(lambda a: (1.0 * a, 2.0 * a))
    with pytest.raises((TypeError, IndexError)) as error:
        jax.jvp(solve, (1.0,), (1.0,))
    assert "is called with the solution of" in noted(error, "swapped")


def test_numpy_in_a_residual():
    root = eqg.implicit(lambda y, a: np.asarray(y) ** 2 - a)(lambda a: jnp.sqrt(a))
    with pytest.raises(jax.errors.TracerArrayConversionError, match="traced") as error:
        jax.grad(root)(2.0)
    assert re.search("residual `<lambda>` \\(in.*test_implicit", noted(error, "`jnp`"))


# ---------------------------------------------------------------- the linear system


def test_without_lineax(monkeypatch):
    """Only large systems need it, and systems with tags or a solver."""
    monkeypatch.setitem(sys.modules, "lineax", None)
    first = eqg.implicit(lambda y, a: jnp.cumsum(y) - a)(lambda a, *, n: a * jnp.eye(n)[0])
    assert_close(jax.jacfwd(ft.partial(first, n=2))(0.7), jnp.array([1.0, 0.0]))
    with pytest.raises(ModuleNotFoundError, match=r"Run `pip install eqx-grads\[solvers\]`"):
        jax.jacfwd(ft.partial(first, n=300))(0.7)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["QR", "SVD", "LSMR"])
def test_more_equations_than_unknowns(name, getkey):
    a = jr.normal(getkey(), (5, 2))
    options = {"rtol": 1e-6, "atol": 1e-6} if name == "LSMR" else {}
    residual = lambda y, x: [a @ (y - x)]
    consistent = eqg.implicit(residual, solver=getattr(lx, name)(**options))(lambda x: x)
    for jacobian in (jax.jacfwd, jax.jacrev):
        got = jax.jit(jacobian(consistent))(jnp.array([1.0, 2.0]))
        assert_close(got, jnp.eye(2), tolerance=1e-4)


@pytest.mark.slow
def test_singular_matrix():
    """A translation of the solution is free: `SVD` takes the smallest, LU raises."""
    laplacian = jnp.array([[1.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 1.0]])
    residual = lambda y, x: laplacian @ y - (x - jnp.mean(x))
    smallest = lambda x: jnp.linalg.pinv(laplacian) @ x
    by_svd = eqg.implicit(residual, solver=lx.SVD())(smallest)
    got = jax.jit(jax.jacrev(by_svd))(jnp.array([1.0, 2.0, 4.0]))
    assert_close(got, np.linalg.pinv(laplacian), tolerance=1e-5)


@pytest.mark.parametrize(
    ("condition", "scaled"),
    [(1e1, "rows columns"), (1e5, "rows"), (1e5, "columns"), (1e5, "rows columns")],
)
def test_equations_and_unknowns_of_other_sizes_are_not_called_singular(condition, scaled):
    """The error is as for `jnp.linalg.inv`, which is large where the sizes of rows differ."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(6, 6)))[0] for _ in range(2))
    matrix = left * np.logspace(0, -np.log10(condition), 6) @ right
    sizes = np.logspace(-6, 6, 6)
    matrix = matrix * (sizes[:, None] if "rows" in scaled else 1)
    matrix = matrix * (rng.permutation(sizes) if "columns" in scaled else 1)
    held, b = jnp.asarray(matrix, jnp.float32), jnp.asarray(matrix @ np.ones(6), jnp.float32)
    solve = eqg.implicit(lambda y, b: held @ y - b)(lambda b: jnp.linalg.solve(held, b))
    expected = np.linalg.inv(np.asarray(held, np.float64))
    norm = ft.partial(np.linalg.norm, axis=0)
    error = lambda got: np.max(norm(np.asarray(got) - expected) / norm(expected))
    assert error(jax.jit(jax.jacfwd(solve))(b)) < 10 * error(jnp.linalg.inv(held))


@pytest.mark.slow
def test_a_right_hand_side_that_is_not_finite_is_not_called_singular():
    """A NaN stays NaN, as in functions of JAX."""
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    solve = eqg.implicit(lambda y, x: matrix @ y - x)(lambda x: jnp.linalg.solve(matrix, x))
    (ct,) = jax.vjp(solve, jnp.ones(2))[1](jnp.array([jnp.nan, 1.0]))
    assert jnp.all(jnp.isnan(ct))


@pytest.mark.slow
def test_matrix_free(getkey):
    """Many unknowns: GMRES, or conjugate gradients; even for a tiny cotangent."""
    n = 300
    a = jr.normal(getkey(), (n, n)) / n**0.5
    x, ct = jr.normal(getkey(), (n,)), -1e-25 * jr.uniform(getkey(), (n,))
    for matrix, tags in (
        (2 * jnp.eye(n) + a, ()),
        (a @ a.T + jnp.eye(n), lx.positive_semidefinite_tag),
    ):
        residual = lambda y, x, m=matrix: m @ y - x
        solve = eqg.implicit(residual, tags=tags)(ft.partial(jnp.linalg.solve, matrix))
        got = jax.jit(lambda x, solve=solve: jax.vjp(solve, x)[1](ct)[0])
        assert_close(got(x) * 1e25, np.linalg.solve(matrix.T, ct * 1e25), tolerance=1e-3)


@pytest.mark.thorough
def test_matrix_free_failure_is_an_error(getkey):
    n = 300
    a = jr.normal(getkey(), (n, n))
    solve = eqg.implicit(lambda y, x: a @ y - x)(lambda x: jnp.linalg.solve(a, x))
    with pytest.raises(FAILS, match="did not reach its tolerance"):
        eqx.filter_jit(jax.grad(lambda x: jnp.sum(solve(x))))(jnp.ones(n))


def test_tags_of_complex_unknowns():
    """The matrix of the real and imaginary parts has other entries."""
    residual = lambda y, c: (y[0] ** 2 - c, y[1] - c.real)  # the second is real
    root = eqg.implicit(residual, tags=lx.diagonal_tag)(lambda c: (jnp.sqrt(c), c.real))
    c = jnp.array([1j, 2.0 - 1j])
    forward = jax.jit(lambda c: jax.jvp(root, (c,), (c,))[1])
    assert_close(forward(c), (c / (2 * jnp.sqrt(c)), c.real))
