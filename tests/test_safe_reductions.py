"""Norms, sums of exponentials and softmaxes at all magnitudes; and second derivatives at kinks,
poles and coincident points: right, or NaN."""

import importlib.util
import itertools
import pathlib
import re
from typing import Any

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from . import mpmath_grid as grid
from .helpers import quick_only


pytestmark = pytest.mark.x64


safe = eqg.safe
INF = jnp.inf
MODES = list(itertools.product((jax.jacfwd, jax.jacrev), repeat=2))


def _check(reduction, truth, points, dtype, ulps, scale):
    """A reduction of rows, as an elementwise function of the entries of a row."""
    of_entries = lambda *entries: reduction(jnp.stack(entries, axis=-1))
    got = grid.evaluate(of_entries, points, dtype)
    grid.assert_right(got, truth, points, dtype, ulps, scale)


def _check_partial(reduction, truth, order, points, dtype, scale, unit=None):
    of_entries = lambda *entries: reduction(jnp.stack(entries, axis=-1))
    true = grid.partial(truth, order, unit)
    for mode in ("forward", "reverse"):
        got = grid.evaluate(grid.in_mode(mode, of_entries, order), points, dtype)
        grid.assert_right(got, true, points, dtype, 8, scale)


# ---------------------------------------------------------------- against mpmath
# Derivatives are compared in units of the last place of the norm of the row, which is one for
# the gradient of a norm, and for weights that sum to one.


def _points(dtype):
    """All pairs of both signs from the smallest to the largest magnitudes; no overflow."""
    high = grid.rounded(dtype, [float(jnp.finfo(dtype).max) / 4])[0]
    return grid.pairs(grid.both_signs(grid.log_spaced(dtype, 6, high=high)))


def _logits(dtype):
    tiny = float(jnp.finfo(dtype).tiny)
    large = grid.rounded(dtype, [float(jnp.finfo(dtype).max) / 8])[0]
    return grid.pairs(grid.rounded(dtype, [-large, -100, -3.3, -tiny, 0.0, 0.7, 88.0, large]))


def _one(*point):
    return 1


def _norm_truth(x, y):
    return mp.sqrt(x * x + y * y)


def _inverse_norm(x, y):
    return 1 / _norm_truth(mp.mpf(x), mp.mpf(y))


def _logsumexp_truth(*xs):
    top = max(xs)
    return top + mp.log(mp.fsum(mp.exp(x - top) for x in xs))


def _largest(x, y):
    return max(abs(x), abs(y), 1)


# The function of a row, the truth, the points, the scale of the value, and for each order of
# derivatives its scale and, where the function changes on another scale than each coordinate,
# the step of differences.
CASES: dict[str, Any] = {
    "norm": (
        lambda row: safe.norm(row, axis=-1),
        *(_norm_truth, _points, None),
        {(1, 0): (_one, None), (2, 0): (_inverse_norm, None), (1, 1): (_inverse_norm, None)},
    ),
    "logsumexp": (
        lambda row: safe.logsumexp(row, -1),
        *(_logsumexp_truth, _logits, _largest),
        {(1, 0): (_one, _one), (0, 1): (_one, _one), (1, 1): (_one, _one)},
    ),
    "softmax": (
        lambda row: safe.softmax(row)[..., 0],
        *(lambda x, y: 1 / (1 + mp.exp(y - x)), _logits, _one),
        {(1, 0): (_one, _one), (0, 1): (_one, _one)},
    ),
    "entropy": (
        lambda row: safe.entropy(row),
        lambda p, q: -p * mp.log(p) - q * mp.log(q),
        *(lambda dtype: grid.pairs(grid.log_spaced(dtype, 7, high=1.0)), _one),
        {(1, 0): (lambda p, q: max(abs(mp.log(p)), 1), None), (2, 0): (None, None)},
    ),
}
DTYPES = quick_only(("float32", "bfloat16"), ("float32",), pytest.mark.thorough)
DTYPES += quick_only(("float64",), (), pytest.mark.slow)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_right_at_all_magnitudes(name, dtype):
    fn, truth, points, scale, orders = CASES[name]
    _check(fn, truth, points(dtype), dtype, 4, scale)
    for order, (scale, unit) in orders.items():
        if dtype != "bfloat16" or sum(order) == 1:
            _check_partial(fn, truth, order, points(dtype), dtype, scale, unit)


def _std_truth(x, y, z):
    mean = (x + y + z) / 3
    return mp.sqrt(((x - mean) ** 2 + (y - mean) ** 2 + (z - mean) ** 2) / 3)


def test_std_is_right_at_all_magnitudes():
    info = jnp.finfo("float32")
    scales = grid.log_spaced("float32", 8, low=4 * float(info.tiny), high=float(info.max) / 4)
    rows = (1.0, -1.0, 0.5), (0.0, 0.5, 1.0), (-1.0, -0.25, 1.0)
    points = [[s * e for e in row] for s in scales for row in rows]
    points = [tuple(grid.rounded("float32", point)) for point in points]
    std, largest = lambda row: safe.std(row, -1), lambda *row: max(abs(mp.mpf(x)) for x in row)
    _check(std, _std_truth, points, "float32", 4, None)
    _check_partial(std, _std_truth, (1, 0, 0), points, "float32", _one, largest)


ORDERS = [-INF, -3, -0.5, 0, 0.3, 1, 1.5, 3, INF]


@pytest.mark.parametrize("ord", quick_only(ORDERS, (-INF, 0, 0.3, 3), pytest.mark.thorough))
def test_norms_of_any_order(ord):
    """The values of NumPy, also at zero and at infinity; the derivatives of the formula."""
    rng = np.random.default_rng(0)
    special = np.array([[0, 2, -3], [0, 0, 0], [INF, -1, 2], [INF, -INF, 2.0]])
    complex_rows = rng.normal(size=(2, 3)) + 1j * rng.normal(size=(2, 3))

    def plain(x):
        if ord in (0, INF, -INF):
            return jnp.linalg.norm(x, ord)
        return jnp.sum(jnp.abs(x) ** ord) ** (1 / ord)

    fn = lambda x: safe.norm(x, ord)

    @jax.jit
    def run(rows, x):
        slopes = *(jax.grad(fn)(scale * x) for scale in (1e-200, 1e200)), jax.jacfwd(fn)(x)
        values = [safe.norm(row, ord, axis=1) for row in rows]
        return values, slopes, jax.hessian(fn)(x), jax.grad(plain)(x), jax.hessian(plain)(x)

    with jax.enable_x64(), np.errstate(divide="ignore"):
        rows = special, complex_rows, 1e200 * complex_rows, 1e-200 * complex_rows
        values, slopes, curvature, first, second = run(rows, rng.normal(size=3))
        for x, value in zip(rows, values, strict=True):
            size = np.max(np.abs(x)) if np.isfinite(x).all() else 1
            truth = np.linalg.norm(x / size, ord, axis=1) * (size if ord else 1)
            np.testing.assert_allclose(value, truth, rtol=1e-12)
        for slope in slopes:
            np.testing.assert_allclose(slope, first, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(curvature, second, rtol=1e-8, atol=1e-10)
        # By convention; where there is no second derivative, it is NaN.
        of_special = lambda derivative: jax.jit(jax.vmap(derivative(fn)))(special)
        gradients, (beside, at_zero, *_) = of_special(jax.grad), of_special(jax.hessian)
        assert jnp.isfinite(gradients).all()
        assert (gradients[1] == 0).all()
        assert gradients[0, 0] == 0
        if ord:
            assert jnp.isnan(at_zero).all()
            assert beside[0, 0] == 0 if 2 < ord < INF else jnp.isnan(beside[0, 0])


# ---------------------------------------------------------------- corners


def test_no_smooth_function_of_a_norm_has_a_wrong_hessian():
    """It is NaN: the norm does not know what is computed from it."""
    zero = jnp.zeros(2)
    for smooth in (lambda z: safe.norm(z) ** 2, lambda z: safe.norm(z**2)):
        assert (jax.grad(smooth)(zero) == 0).all()
        for outer, inner in MODES:
            hessian = outer(inner(smooth))
            for at_zero in (hessian(zero), jax.vmap(hessian)(zero[None])):
                assert np.isnan(at_zero).any(-2).all()


def test_an_infinite_argument_does_not_move():
    for x in ([-INF, -INF], [-INF, 1.0], [INF, 1.0]):
        hessian = jax.hessian(lambda x: safe.logsumexp(x) + safe.log_softmax(x)[0])
        assert (hessian(jnp.array(x)) == 0).all()
    of_factors = jax.hessian(lambda x, b: safe.logsumexp(x, b=b), (0, 1))
    for block in jax.tree.leaves(of_factors(jnp.full(2, -INF), jnp.ones(2))):
        assert (block == 0).all()


def test_what_is_equal_up_to_rounding():
    """XLA may round an element otherwise where it is compared; so may a mean of equal ones."""
    x = jnp.array([1.0, -1 - jnp.finfo(float).eps])
    for ord in (INF, -INF):
        slopes = jax.grad(lambda x, ord=ord: safe.norm(x, ord))(x)
        assert jnp.array_equal(slopes, jnp.array([0.5, -0.5]))
    assert safe.std(jnp.full(9, 0.1)) == 0
    # The cotangent of a masked element is NaN.
    of_one = lambda x: jnp.log(safe.softmax(x, where=x > 0))[1]
    assert (jax.grad(of_one)(jnp.array([0.0, 2.0])) == 0).all()
    slopes = lambda size: jax.grad(lambda x: safe.norm(x, 3))(size * np.float32([2, 1]))
    np.testing.assert_allclose(slopes(1e38), slopes(1.0), rtol=1e-6)


def test_what_is_constant_makes_no_nan():
    """A norm that is not differentiated, and a mask on its argument."""
    y = jnp.zeros(2)
    for f, x, expected in (
        (
            lambda x: jnp.sum(x**3) * (1 + safe.norm(y) + safe.std(y) + safe.sqrt(y[0])),
            *([1.0, 2.0], [6.0, 12.0]),
        ),
        (lambda x: safe.where(x > 0, safe.sqrt, x, 0.0).sum(), [0.0, 4.0], [0.0, -1 / 32]),
        # Of masked events, an entropy is a constant.
        (lambda p: safe.entropy(p, where=p > 0), [0.0, 0.5], [0.0, -2.0]),
    ):
        for outer, inner in MODES:
            np.testing.assert_allclose(outer(inner(f))(jnp.array(x)), np.diag(expected))


def test_second_derivatives_at_points_of_their_own():
    """Also of what does not count: a zero factor, a mean of one number, a masked term."""
    table = {
        lambda x: safe.logaddexp(x + 1, 1.0): 0.25,
        lambda y: safe.xlogy(0.0, y): 0.0,
        lambda x: safe.std(x[None]): 0.0,
        lambda x: safe.logsumexp(jnp.stack([800.0, x]), b=jnp.array([0, 1])): 0.0,
    }
    second = jax.jit(lambda x: [jax.grad(jax.jacfwd(f))(x) for f in table])
    np.testing.assert_allclose(second(0.0), [*table.values()])


DOCS = pathlib.Path(__file__).parents[1] / "docs"
# The kernels of a distance, by the factor `c` of `1 - c r**2 + ...`, if it is smooth.
KERNELS = {"Matern 1/2": None, "Matern 3/2": 3 / 2, "Matern 5/2": 5 / 6, "RBF": 1 / 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_where_points_coincide(name):
    """The kernels of the page, by both points: `d2k/dx dx` is minus `d2k/dx dx'`."""
    page = (DOCS / "guides" / "my-gradient-is" / "nan.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"eqg": eqg, "jax": jax, "jnp": jnp}
    exec(next(block for block in blocks if "matern52" in block), names)
    kernel, factor = names["kernels"][name], KERNELS[name]
    with jax.enable_x64():
        f, z = lambda z: kernel(z[:2], z[2:]), jnp.array([0.3, -1.0, 0.3, -1.0])
        assert (jax.grad(f)(z) == 0).all()
        for outer, inner in MODES:
            got = jax.jit(outer(inner(f)))(z)
            if factor is None:
                assert np.isnan(got).all()
            else:
                expected = -2 * factor * np.kron([[1, -1], [-1, 1]], np.eye(2))
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
        third = jax.jacfwd(jax.hessian(f))(z)
        is_smooth = name in ("Matern 5/2", "RBF")
        assert np.allclose(third, 0, atol=1e-12) if is_smooth else jnp.isnan(third).any()


@pytest.fixture
def script():
    """The script that writes the table of `docs/api/safe.md`."""
    spec = importlib.util.spec_from_file_location("safe_table", DOCS / "safe_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_jax(text):
    """The results of plain JAX differ between its versions."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row[:4] + row[5:]] for row in rows]


@pytest.mark.slow
def test_the_table_is_up_to_date_and_the_truth_wherever_there_is_one(script):
    page = script.PAGE.read_text()
    written = _without_jax(page.split(script.START)[1].split(script.END)[0])
    assert written == _without_jax(script.table()), "python docs/safe_table.py"
    for *what, ours, truth, _ in written[2:]:
        assert ours == ("0" if "∞" in truth or truth == "none" else truth), what


# ---------------------------------------------------------------- arguments


@pytest.mark.thorough
def test_empty_arrays():
    empty = jnp.zeros((0, 3))
    assert (safe.logsumexp(empty, 0) == -INF).all()
    assert safe.softmax(empty).shape == safe.log_softmax(empty).shape == (0, 3)
    assert safe.normalize(empty, axis=0).shape == safe.cumlogsumexp(empty).shape == (0, 3)
    assert safe.pairwise_distance(empty, jnp.ones((2, 3))).shape == (0, 2)
    assert jnp.isnan(safe.std(empty))


def test_errors():
    """Of arrays that are widened on the way: they name the dtype of the user's."""
    half, n = jnp.ones((2, 3), "bfloat16"), jnp.arange(3, dtype="int8")
    for call, match in (
        (lambda: safe.norm(n, axis=1), r"does not have.\n  `axis` is 1, `x` is float.*\[3\]"),
        (lambda: safe.std(n, where=half), r"the array is float.*\[3\], `where` is bfloat16"),
        (lambda: safe.eigh(jnp.eye(2), tolerance=jnp.nan), "a finite number, at least zero"),
        (lambda: safe.svd(half, full_matrices=True), "arbitrary, and have no derivative"),
        (lambda: safe.cumlogsumexp(jnp.ones((2, 2)), (0, 1)), "is not one axis"),
        (lambda: safe.sqrt(1j), r"real numbers(?s:.)*`x` is complex \(1j\)"),
    ):
        with pytest.raises(eqg.RuleError, match=match):
            call()
    with pytest.raises(TypeError, match=r"`safe.divide` missing a required argument: 'y'"):
        safe.divide(1.0)
