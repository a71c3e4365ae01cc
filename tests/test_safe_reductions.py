"""Norms, sums of exponentials and softmaxes, with finite and right derivatives."""

import itertools
from typing import Any

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from . import mpmath_grid as grid


pytestmark = pytest.mark.x64


safe = eqg.safe
INF = jnp.inf


def _rows(reduction, n=2):
    """A reduction of rows as an elementwise function of the entries of a row."""
    return lambda *entries: reduction(jnp.stack(entries, axis=-1))


def _points(dtype, n=6):
    """All pairs of both signs from the smallest to the largest magnitudes; no overflow."""
    high = float(jnp.finfo(dtype).max) / 4
    positive = grid.log_spaced(dtype, n, high=grid.rounded(dtype, [high])[0])
    return grid.pairs(grid.both_signs(positive))


def _one(*point):
    return 1


def _check(programs, truth, points, dtype, ulps, scale=None):
    """Every program is within so many units of the truth, which is computed once."""
    true = grid.true_values(truth, points)
    for program in programs:
        got = grid.evaluate(program, points, dtype)
        error = max(grid.errors(got, true, points, dtype, scale), key=lambda e: e.ulps)
        assert error.ulps <= ulps, f"{dtype}: {error}"


def _check_partials(fns, truth, orders, points, dtype, ulps, scale, unit=None):
    """Both modes. `unit` of a point is the magnitude on which `truth` changes, if not each
    coordinate."""
    for order in orders:
        programs = [mode(fn, order) for fn in fns for mode in MODES]
        true = _differences(truth, order, unit) if unit else grid.partial(truth, order)
        _check(programs, true, points, dtype, ulps, scale)


MODES = (grid.forward_partial, grid.reverse_partial)


def _differences(truth, order, unit):
    """As `grid.partial`, with steps that do not depend on the one coordinate alone."""
    axes = [i for i, times in enumerate(order) for _ in range(times)]

    def derivative(*point):
        with mp.workdps(450):
            step = mp.mpf(10) ** -30 * unit(*point)
            return +difference([mp.mpf(x) for x in point], axes, step)

    def difference(point, axes, step):
        if not axes:
            return truth(*point)
        i, *others = axes
        at = lambda h: difference([*point[:i], point[i] + h, *point[i + 1 :]], others, step)
        return (at(step) - at(-step)) / (2 * step)

    return derivative


# ---------------------------------------------------------------- against mpmath
# Derivatives are compared in units of the last place of the norm of the row, which is one for
# the gradient of a norm, and for weights that sum to one.


def _norm_truth(x, y):
    return mp.sqrt(x * x + y * y)


def _inverse_norm(x, y):
    return 1 / _norm_truth(mp.mpf(x), mp.mpf(y))


def _logsumexp_truth(*xs):
    top = max(xs)
    return top + mp.log(mp.fsum(mp.exp(x - top) for x in xs))


def _logits(dtype):
    tiny = float(jnp.finfo(dtype).tiny)
    large = grid.rounded(dtype, [float(jnp.finfo(dtype).max) / 8])[0]
    return grid.pairs(grid.rounded(dtype, [-large, -100, -3.3, -tiny, 0.0, 0.7, 88.0, large]))


def _probabilities(dtype):
    return grid.pairs(grid.log_spaced(dtype, 7, high=1.0))


def _largest(x, y):
    return max(abs(x), abs(y), 1)


OTHER = [0.8, -0.6]
# The function of a row, the truth, the points, the scale of the value, and for each order of
# derivatives its scale and, where the function changes on another scale than each coordinate,
# the step of differences.
CASES: dict[str, Any] = {
    "norm": (
        lambda row: safe.norm(row, axis=-1),
        *(_norm_truth, _points, None),
        {(1, 0): (_one, None), (2, 0): (_inverse_norm, None), (1, 1): (_inverse_norm, None)},
    ),
    "normalize": (
        lambda row: safe.normalize(row)[..., 0],
        *(lambda x, y: x / _norm_truth(x, y), _points, None),
        {(1, 0): (_inverse_norm, None), (0, 1): (_inverse_norm, None)},
    ),
    "cosine_similarity": (
        lambda row: safe.cosine_similarity(row, jnp.array(OTHER, row.dtype)),
        lambda x, y: (x * OTHER[0] + y * OTHER[1]) / _norm_truth(x, y) / _norm_truth(*OTHER),
        *(_points, _one, {(1, 0): (_inverse_norm, None)}),
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
    "log_softmax": (
        lambda row: safe.log_softmax(row)[..., 0],
        *(lambda x, y: x - _logsumexp_truth(x, y), _logits, _largest),
        {(1, 0): (_one, _one), (0, 1): (_one, _one)},
    ),
    "entropy": (
        lambda row: safe.entropy(row),
        *(lambda p, q: -p * mp.log(p) - q * mp.log(q), _probabilities, _one),
        {(1, 0): (lambda p, q: max(abs(mp.log(p)), 1), None), (2, 0): (None, None)},
    ),
}
SLOW_HALF = pytest.param("float16", marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", SLOW_HALF])
@pytest.mark.parametrize("name", CASES)
def test_right_at_all_magnitudes(name, dtype):
    fn, truth, points, scale, orders = CASES[name]
    fn, points, is_half = _rows(fn), points(dtype), dtype in ("float16", "bfloat16")
    _check([fn], truth, points, dtype, 4, scale)
    for order, (scale, unit) in orders.items():
        if not (is_half and sum(order) > 1):
            _check_partials([fn], truth, [order], points, dtype, 8, scale, unit)


def _std_truth(x, y, z):
    mean = (x + y + z) / 3
    return mp.sqrt(((x - mean) ** 2 + (y - mean) ** 2 + (z - mean) ** 2) / 3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", SLOW_HALF])
def test_std_is_right_at_all_magnitudes(dtype):
    fn = _rows(lambda row: safe.std(row, -1))
    high = grid.rounded(dtype, [float(jnp.finfo(dtype).max) / 4])[0]
    low = grid.rounded(dtype, [4 * float(jnp.finfo(dtype).tiny)])[0]
    scales = grid.log_spaced(dtype, 8, low=low, high=high)
    shapes = [(1.0, -1.0, 0.5), (0.0, 0.5, 1.0), (-1.0, -0.25, 1.0)]
    points = [tuple(s * e for e in shape) for s in scales for shape in shapes]
    points = [tuple(grid.rounded(dtype, p)) for p in points]
    _check([fn], _std_truth, points, dtype, 4)
    largest = lambda *row: max(abs(mp.mpf(x)) for x in row)
    _check_partials([fn], _std_truth, [(1, 0, 0)], points, dtype, 4, _one, largest)


# ---------------------------------------------------------------- norms of any order

ORDERS = (-INF, -3, -0.5, 0, 0.3, 1, 1.5, 2.5, 3, 7, INF)


@pytest.mark.parametrize("ord", ORDERS)
def test_norms_of_any_order(ord):
    """The values of NumPy, also at zero and at infinity; the derivatives of the formula."""
    rng = np.random.default_rng(0)
    special = np.array([[0, 2, -3], [0, 0, 0], [INF, -1, 2], [INF, -INF, 2.0]])
    complex_rows = rng.normal(size=(2, 3)) + 1j * rng.normal(size=(2, 3))

    def plain(x):
        if ord in (0, INF, -INF):
            return jnp.linalg.norm(x, ord)
        return jnp.sum(jnp.abs(x) ** ord) ** (1 / ord)

    with jax.enable_x64(), np.errstate(divide="ignore"):
        for x in (special, complex_rows, 1e200 * complex_rows, 1e-200 * complex_rows):
            size = np.max(np.abs(x)) if np.isfinite(x).all() else 1
            truth = np.linalg.norm(x / size, ord, axis=1) * (size if ord else 1)
            np.testing.assert_allclose(safe.norm(x, ord, axis=1), truth, rtol=1e-12)
        x, fn = jnp.asarray(rng.normal(size=3)), lambda x: safe.norm(x, ord)
        first, second = jax.grad(plain)(x), jax.hessian(plain)(x)
        for scale in (1e-200, 1.0, 1e200):
            np.testing.assert_allclose(jax.grad(fn)(scale * x), first, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(jax.jacfwd(fn)(x), first, rtol=1e-10, atol=1e-12)
        for outer, inner in itertools.product((jax.jacfwd, jax.jacrev), repeat=2):
            np.testing.assert_allclose(outer(inner(fn))(x), second, rtol=1e-8, atol=1e-10)
        # By convention; where there is no second derivative, it is NaN.
        gradients = jax.vmap(jax.grad(fn))(jnp.asarray(special))
        assert jnp.isfinite(gradients).all()
        assert (gradients[1] == 0).all()
        assert gradients[0, 0] == 0
        if ord:
            assert jnp.isnan(jax.hessian(fn)(jnp.zeros(3))).all()
            at_zero = jax.hessian(fn)(jnp.asarray(special[0]))[0, 0]
            assert at_zero == 0 if 2 < ord < INF else jnp.isnan(at_zero)


@pytest.mark.slow
def test_nan_is_not_hidden():
    x = jnp.array([jnp.nan, 1.0])
    assert jnp.isnan(safe.std(jnp.array([INF, 1.0])))  # infinity minus itself
    for fn in (safe.norm, safe.normalize, safe.std, safe.logsumexp, safe.softmax, safe.entropy):
        assert jnp.isnan(jnp.sum(fn(x)))
        assert jnp.isnan(jax.grad(lambda x, fn=fn: jnp.sum(fn(x)))(x)).any()


# ---------------------------------------------------------------- arguments


@pytest.mark.thorough
def test_empty_arrays():
    empty = jnp.zeros((0, 3))
    assert safe.norm(empty) == safe.norm(empty.ravel(), INF) == safe.norm(empty.ravel(), 1) == 0
    assert safe.logsumexp(empty) == -INF
    assert safe.softmax(empty).shape == safe.log_softmax(empty).shape == (0, 3)
    assert safe.softmax(empty, 0).shape == safe.normalize(empty, axis=0).shape == (0, 3)
    assert safe.cumlogsumexp(empty).shape == (0, 3)
    assert (safe.logsumexp(empty, 0) == -INF).all()
    assert safe.norm(empty, axis=1).shape == (0,)
    assert safe.pairwise_distance(empty, jnp.ones((2, 3))).shape == (0, 2)
    assert jnp.isnan(safe.std(empty))
    assert safe.entropy(empty).shape == (0,)
    assert jax.grad(safe.norm)(empty).shape == (0, 3)


def test_errors():
    """Of arrays that are widened on the way: they name the dtype of the user's."""
    half, n = jnp.ones((2, 3), "bfloat16"), jnp.arange(3, dtype="int8")
    for call, match in (
        (lambda: safe.eigh(half), r"square matrices.\n  `a` is bfloat16\[2,3\]"),
        (lambda: safe.svd(half[0]), r"not given matrices.\n  `a` is bfloat16\[3\]"),
        (lambda: safe.norm(half, 2), r"matrix in NumPy.\n  `x` is bfloat16\[2,3\]"),
        (lambda: safe.pairwise_distance(half[0]), r"one dimension.\n  `x` is bfloat16\[3\]"),
        (lambda: safe.norm(n, axis=1), r"does not have.\n  `axis` is 1, `x` is int8\[3\]"),
        (lambda: safe.std(n, where=half), r"the array is int8\[3\], `where` is bfloat16"),
        (lambda: safe.eigh(jnp.eye(2), tolerance=jnp.nan), "a finite number from zero"),
        (lambda: safe.std(jnp.ones(2), (0, -1)), "an axis that `x` has but once"),
        (lambda: safe.norm(jnp.ones(1), axis=0.5), "an axis that is not an integer"),
        (lambda: safe.cumlogsumexp(jnp.ones((2, 2)), (0, 1)), "was not given one axis"),
        (lambda: safe.sqrt(1j), r"complex numbers(?s:.)*`x` is complex \(1j\)"),
    ):
        with pytest.raises(eqg.RuleError, match=match):
            call()
    with pytest.raises(TypeError, match=r"`safe.divide` missing a required argument: 'y'"):
        safe.divide(1.0)
