"""Elementwise safe mathematics: against mpmath to the ends of the range, and what happens where
the derivative does not exist."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import mpmath as mp
import numpy as np
import pytest
from eqx_grads import safe

from .guard.registry.safe_elementwise import FORMULAS
from .mpmath_grid import (
    around,
    assert_values_right,
    both_signs,
    evaluate,
    log_spaced,
    pairs,
    partial,
    reverse_partial,
    rounded,
)


pytestmark = pytest.mark.x64


class Truth(NamedTuple):
    """A function in mpmath, the points where it is compared, and how close it has to be.

    - `points`: a function of a dtype and of a number that grows with the density of the grid.
    - `ulps`: for the value, the first and the second derivatives. A function of a point, if it
        depends on the point.
    - `scale`: the size of the terms that cancel in the value.
    - `second`: whether a second derivative is compared at a point.
    """

    fn: Callable[..., Any]
    points: Callable[[str, int], list[tuple[float, ...]]]
    ulps: tuple[Any, Any, Any] = (8, 8, 32)
    scale: Callable[..., Any] | None = None
    second: Callable[..., bool] = lambda *_: True


def _each(xs):
    return [(x,) for x in sorted(set(xs))]


def _positive(dtype, n):
    return _each(log_spaced(dtype, 8 * n))


def _quadrant(dtype, n):
    return pairs(log_spaced(dtype, 3 * n))


def _half_plane(dtype, n):
    return pairs(log_spaced(dtype, 3 * n), both_signs(log_spaced(dtype, 2 * n)))


def _inside(dtype, n):
    near = [x for end in (-1.0, 1.0) for x in around(dtype, end, 4 * n) if abs(x) < 1]
    return _each(near + both_signs(log_spaced(dtype, 4 * n, high=0.5)))


def _line(low, high):
    """Evenly spaced, with small numbers of both signs that are in the domain."""

    def points(dtype, n):
        small = [x for x in both_signs(log_spaced(dtype, 4 * n, high=0.25)) if x > low]
        even = rounded(dtype, np.linspace(low, high, 16 * n))
        return _each([x for x in small + even if x and x > low])

    return points


def _powers(dtype, n):
    ys = rounded(dtype, [-3.0, -1.5, -0.3, 0.1, 0.5, 1.0, 1.7, 2.0])
    points = pairs(log_spaced(dtype, 6 * n), ys)
    # Not where one factor of a derivative is out of range and the other brings it back.
    limit = np.log(float(jnp.finfo(dtype).max)) - 10
    return [(x, y) for x, y in points if max(abs(y), abs(y - 2)) * abs(np.log(x)) < limit]


def _differences(dtype, n):
    gaps = [*log_spaced(dtype, 4 * n, low=float(jnp.finfo(dtype).eps), high=1.0), 5.0, 30.0]
    xs = (-20.0, 0.0, 0.5, 40.0)
    points = [tuple(rounded(dtype, [x, x - gap])) for x in xs for gap in gaps]
    return sorted({(x, y) for x, y in points if x > y})


def _normals(dtype, n):
    tail = [-x for x in log_spaced(dtype, 4 * n, low=10.0, high=1e4)]
    high = 12.0 if dtype == "float32" else 37.0
    return _each(tail + rounded(dtype, np.linspace(-12, high, 12 * n)))


def _is_in_range(*point):
    """The square of the reciprocal is a normal number, in single precision."""
    return 1e-18 < abs(point[-1]) < 1e18


def _log_ndtr(x):
    if x >= 0:
        return mp.log1p(-mp.erfc(x / mp.sqrt(2)) / 2)
    if x > -30:
        return mp.log(mp.erfc(-x / mp.sqrt(2)) / 2)
    fraction = -x  # the erfc of mpmath is slow there
    for k in range(400, 0, -1):
        fraction = -x + k / fraction
    return -x * x / 2 - mp.log(2 * mp.pi) / 2 - mp.log(fraction)


TRUTHS = {
    "sqrt": Truth(mp.sqrt, _positive),
    "divide": Truth(lambda x, y: x / y, _half_plane, second=_is_in_range),
    # `pow` itself has such an error in single precision, and `y - 1` is rounded.
    "power": Truth(
        mp.power,
        _powers,
        ulps=(
            lambda x, y: 8 + abs(y * np.log(x)),
            lambda x, y: 8 + abs(y * np.log(x)),
            lambda x, y: 32 + (2 + abs(y)) * abs(np.log(x)),
        ),
    ),
    "hypot": Truth(lambda x, y: mp.sqrt(x * x + y * y), _half_plane),
    "arctan2": Truth(
        mp.atan2, _half_plane, second=lambda y, x: _is_in_range(max(abs(x), abs(y)))
    ),
    "arccos": Truth(mp.acos, _inside),
    "arcsin": Truth(mp.asin, _inside),
    "log": Truth(mp.log, _positive),
    "xlogy": Truth(lambda x, y: x * mp.log(y), _quadrant, second=_is_in_range),
    "xlog1py": Truth(lambda x, y: x * mp.log1p(y), _quadrant),
    "log_cosh": Truth(
        lambda x: mp.log1p(2 * mp.sinh(x / 2) ** 2) if abs(x) < 500 else abs(x) - mp.log(2),
        _line(-85.0, 85.0),
    ),
    "log_expm1": Truth(lambda x: mp.log(mp.expm1(x)), _line(0.0, 85.0), scale=lambda x: x),
    "log_sub_exp": Truth(
        lambda x, y: mp.log(mp.exp(x) - mp.exp(y)),
        _differences,
        # That of the difference of the arguments, which is rounded.
        ulps=(8, lambda x, y: 8 + abs(x - y), lambda x, y: 32 + abs(x - y)),
        scale=lambda x, y: x,
    ),
    "log_ndtr": Truth(_log_ndtr, _normals, ulps=(20, 20, 8)),  # the error of `erfc`
    "expm1_ratio": Truth(lambda x: mp.expm1(x) / x, _line(-92.0, 92.0)),
    "log1p_ratio": Truth(lambda x: mp.log1p(x) / x, _line(-0.98, 10.0), ulps=(8, 8, 64)),
    "sinhc": Truth(lambda x: mp.sinh(x) / x, _line(-92.0, 92.0)),
}


def _orders(n_arguments):
    orders = itertools.product(range(3), repeat=n_arguments)
    return sorted((order for order in orders if sum(order) <= 2), key=sum)


def check_against_mpmath(name, dtype, n, highest=2):
    """The value and all derivatives up to an order, in one program."""
    truth = TRUTHS[name]
    points = truth.points(dtype, n)
    orders = [order for order in _orders(len(points[0])) if sum(order) <= highest]
    fn = getattr(safe, name)
    program = lambda *xs: [reverse_partial(fn, order)(*xs) for order in orders]
    for order, got in zip(orders, evaluate(program, points, dtype), strict=True):
        ulps = truth.ulps[sum(order)]
        is_compared = [sum(order) < 2 or truth.second(*point) for point in points]
        assert_values_right(
            got[is_compared],
            partial(truth.fn, order) if any(order) else truth.fn,
            list(itertools.compress(points, is_compared)),
            dtype,
            ulps if dtype in ("float32", "float64") else 1,
            None if any(order) else truth.scale,
        )


def test_every_function_is_compared():
    assert TRUTHS.keys() | {"logaddexp"} == FORMULAS.keys()


@pytest.mark.parametrize("name", TRUTHS)
def test_against_mpmath(name):
    check_against_mpmath(name, "float32", 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", TRUTHS)
def test_against_mpmath_on_a_dense_grid(name, dtype):
    """Half precision is rounded once."""
    n, highest = (8, 2) if dtype in ("float32", "float64") else (3, 1)
    check_against_mpmath(name, dtype, n, highest)


# ---------------------------------------------------------------- where there is no derivative


def test_values_are_those_of_jax_to_the_bit():
    special = [-jnp.inf, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, jnp.inf]
    for name in ("sqrt", "divide", "power", "hypot", "arctan2", "arccos", "log", "xlogy"):
        theirs = jsp.xlogy if name == "xlogy" else getattr(jnp, name)
        is_of_one = len(FORMULAS[name][1]) == 1
        points = [(x,) for x in special] if is_of_one else pairs(special)
        columns = [jnp.array(column) for column in zip(*points, strict=True)]
        np.testing.assert_array_equal(getattr(safe, name)(*columns), theirs(*columns))


def test_a_zero_cotangent_stays_zero_where_the_derivative_overflows():
    x = jnp.array([1e-30, -1e-30, 2.0])
    for fn in (lambda x: safe.divide(1.0, x), lambda x: safe.divide(x, x**2)):
        masked = lambda x, fn=fn: jnp.sum(jnp.where(jnp.abs(x) > 1, fn(x), 0.0))
        assert jnp.array_equal(jax.grad(masked)(x), jnp.array([0.0, 0.0, -0.25])), fn


# ---------------------------------------------------------------- what was wrong once


def test_log_sub_exp_of_numbers_far_apart():
    """The value is minus the exponential of the difference, which is below rounding of one."""
    gaps = jnp.array([1.0, 15.0, 20.0, 80.0])
    expected = [float(mp.log1p(-mp.exp(-mp.mpf(g)))) for g in gaps.tolist()]
    np.testing.assert_allclose(safe.log_sub_exp(jnp.zeros(4), -gaps), expected, rtol=1e-6)
    for x in (-1e-3, -1.0, -20.0, -jnp.inf):
        assert jnp.isnan(safe.log_expm1(x))
    assert jnp.isnan(safe.log_sub_exp(1.0, jnp.inf))


def test_the_hessian_of_logaddexp_is_symmetric_and_singular():
    """A constant that is added to both has no curvature."""
    for x in (7.0, 20.0, 80.0):
        hessian = jax.hessian(lambda z: safe.logaddexp(z[0], z[1]))(jnp.array([x, 0.0]))
        weight = float(mp.sech(mp.mpf(x) / 2) ** 2 / 4)
        expected = weight * np.array([[1, -1], [-1, 1]])
        np.testing.assert_allclose(hessian, expected, rtol=1e-5)


# They are linear in these, and have derivatives of the other argument alone.
LINEAR = {("divide", 0), ("xlogy", 0), ("xlog1py", 0)}


@pytest.mark.thorough
def test_nan_has_the_derivative_nan():
    """As in JAX, so that it is not hidden."""
    for name, (_, args, *_) in FORMULAS.items():
        fn, n = getattr(safe, name), len(args)
        for i, j in itertools.product(range(n), repeat=2):
            if i != j or (name, i) not in LINEAR:
                point = [jnp.nan if k == i else 0.5 for k in range(n)]
                assert jnp.isnan(jax.grad(fn, j)(*point)), (name, i, j)
