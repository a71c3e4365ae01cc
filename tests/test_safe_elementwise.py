"""Elementwise safe mathematics: against mpmath to the ends of the range, and what happens where
the derivative does not exist. The guard's registry has the formulas."""

import functools as ft
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from eqx_grads import safe

from .guard.registry.safe_elementwise import FORMULAS
from .helpers import quick_only
from .mpmath_grid import (
    assert_right,
    both_signs,
    evaluate,
    in_mode,
    log_spaced,
    pairs,
    partial,
    rounded,
)


pytestmark = pytest.mark.x64


def _each(xs):
    return [(x,) for x in sorted(set(xs))]


def _positive(dtype):
    return _each(log_spaced(dtype, 16))


def _quadrant(dtype):
    return pairs(log_spaced(dtype, 6))


def _half_plane(dtype):
    return pairs(log_spaced(dtype, 6), both_signs(log_spaced(dtype, 4)))


def _inside(dtype):
    eps = float(jnp.finfo(dtype).eps)
    gaps = np.exp(np.linspace(np.log(eps), np.log(0.1), 8))
    return _each(
        both_signs(rounded(dtype, 1 - gaps)) + both_signs(log_spaced(dtype, 8, high=0.5))
    )


def _line(low, high):
    """Evenly spaced, with small numbers of both signs that are in the domain."""

    def points(dtype):
        small = [x for x in both_signs(log_spaced(dtype, 8, high=0.25)) if x > low]
        even = rounded(dtype, np.linspace(low, high, 32))
        return _each([x for x in small + even if x and x > low])

    return points


def _powers(dtype):
    ys = rounded(dtype, [-3.0, -1.5, -0.3, 0.1, 0.5, 1.0, 1.7, 2.0])
    points = pairs(log_spaced(dtype, 12), ys)
    # Not where one factor of a derivative is out of range and the other brings it back.
    limit = np.log(float(jnp.finfo(dtype).max)) - 10
    return [(x, y) for x, y in points if max(abs(y), abs(y - 2)) * abs(np.log(x)) < limit]


def _differences(dtype):
    gaps = [*log_spaced(dtype, 8, low=float(jnp.finfo(dtype).eps), high=1.0), 5.0, 30.0]
    points = [tuple(rounded(dtype, [x, x - g])) for x in (-20.0, 0.0, 0.5, 40.0) for g in gaps]
    return sorted({(x, y) for x, y in points if x > y})


def _normals(dtype):
    tail = [-x for x in log_spaced(dtype, 8, low=10.0, high=1e4)]
    high = 12.0 if dtype == "float32" else 37.0
    return _each(tail + rounded(dtype, np.linspace(-12, high, 24)))


def _is_in_range(*point):
    """The square of the reciprocal is a normal number, in single precision."""
    return 1e-18 < abs(point[-1]) < 1e18


ULPS = (8, 8, 32)  # of the value, the first and the second derivatives
# `pow` itself has such an error in single precision, and `y - 1` is rounded.
OF_POWER = (
    lambda x, y: 8 + abs(y * np.log(x)),
    lambda x, y: 8 + abs(y * np.log(x)),
    lambda x, y: 32 + (2 + abs(y)) * abs(np.log(x)),
)
# The difference of the arguments is rounded.
OF_DIFFERENCE = (8, lambda x, y: 8 + abs(x - y), lambda x, y: 32 + abs(x - y))
# The points; how close it has to be; the size of the terms that cancel in the value; and where
# a second derivative is compared.
TABLE: dict[str, Any] = {
    "sqrt": (_positive,),
    "divide": (_half_plane, ULPS, None, _is_in_range),
    "power": (_powers, OF_POWER),
    "hypot": (_half_plane,),
    "arctan2": (_half_plane, ULPS, None, lambda y, x: _is_in_range(max(abs(x), abs(y)))),
    "arccos": (_inside,),
    "arcsin": (_inside,),
    "log": (_positive,),
    "xlogy": (_quadrant, ULPS, None, _is_in_range),
    "xlog1py": (_quadrant,),
    "log_cosh": (_line(-85.0, 85.0),),
    "log_expm1": (_line(0.0, 85.0), ULPS, lambda x: x),
    "log_sub_exp": (_differences, OF_DIFFERENCE, lambda x, y: x),
    "log_ndtr": (_normals, (20, 20, 8)),  # the error of `erfc`
    "expm1_ratio": (_line(-92.0, 92.0),),
    "log1p_ratio": (_line(-0.98, 10.0), (8, 8, 64)),
    "sinhc": (_line(-92.0, 92.0),),
}


def _log_ndtr(x):
    """Right where the distribution function is nearly one."""
    if x < 0:
        return mp.log(mp.erfc(-x / mp.sqrt(2)) / 2)
    return mp.log1p(-mp.erfc(x / mp.sqrt(2)) / 2)


# The registry of the guard has all of them at some points.
DTYPES = ("float32", "float64")
QUICK = ("power", "arctan2", "arccos", "xlogy", "log_ndtr", "log1p_ratio")


@pytest.mark.parametrize("dtype", quick_only(DTYPES, ("float32",), pytest.mark.slow))
@pytest.mark.parametrize("name", quick_only(TABLE, QUICK, pytest.mark.thorough))
def test_against_mpmath(name, dtype):
    """The value and all derivatives up to the second order, in one program."""
    defaults: tuple[Any, ...] = (None, ULPS, None, None)
    row = TABLE[name]
    points_of, ulps, scale, is_compared = (*row, *defaults[len(row) :])
    points, truth = points_of(dtype), ft.partial(FORMULAS[name][0], mp.mp)
    truth = _log_ndtr if name == "log_ndtr" else truth
    orders = itertools.product(range(3), repeat=len(points[0]))
    orders = sorted((order for order in orders if sum(order) <= 2), key=sum)
    fn = getattr(safe, name)
    program = lambda *xs: [in_mode("reverse", fn, order)(*xs) for order in orders]
    for order, got in zip(orders, evaluate(program, points, dtype), strict=True):
        n = sum(order)
        kept = [n < 2 or is_compared is None or is_compared(*point) for point in points]
        true = partial(truth, order) if n else truth
        some = list(itertools.compress(points, kept))
        assert_right(got[kept], true, some, dtype, ulps[n], None if n else scale)


# ---------------------------------------------------------------- where there is no derivative


def test_a_zero_cotangent_stays_zero_where_the_derivative_overflows():
    x = jnp.array([1e-30, -1e-30, 2.0])
    for fn in (lambda x: safe.divide(1.0, x), lambda x: safe.divide(x, x**2)):
        masked = lambda x, fn=fn: jnp.sum(jnp.where(jnp.abs(x) > 1, fn(x), 0.0))
        assert jnp.array_equal(jax.grad(masked)(x), jnp.array([0.0, 0.0, -0.25])), fn


def test_third_derivatives():
    """Each order has a formula of its own."""
    x, y = jnp.array([1.3, 0.6]), jnp.array([2.7, -1.4])
    third = lambda fn: jax.jacfwd(jax.hessian(lambda z: jnp.sum(fn(x * z[0], y * z[1]))))
    ours, plain = jax.jit(lambda z: [third(fn)(z) for fn in (safe.power, jnp.power)])(
        jnp.ones(2)
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-4)


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


# ---------------------------------------------------------------- cost


def test_an_elementwise_function_stays_elementwise():
    """No arrays are stacked, and no exponential is computed twice: XLA fuses the rest."""
    ones = jnp.ones(3)
    grad = lambda fn: jax.grad(lambda *xs: jnp.sum(fn(*xs)))
    program = lambda fn, *xs: jax.jit(grad(fn)).lower(*xs).as_text()
    for fn in (safe.hypot, safe.arctan2):
        assert "concatenate" not in program(fn, ones, ones), fn
    for fn in (safe.sinhc, safe.expm1_ratio):
        assert program(fn, ones).count("exponential_minus_one") == 1, fn
