"""Safe mathematics to the third order, in all nestings of both modes, against mpmath: where
terms cancel, where factors overflow, and at NaN."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from eqx_grads import safe

from .cases.safe_elementwise import FORMULAS
from .mpmath_grid import (
    assert_values_right,
    evaluate,
    log_spaced,
    nested_partial,
    pairs,
    partial,
    rounded,
)
from .test_safe_elementwise import _log_ndtr


DIGITS = 400  # of terms that are smaller by exp(-700)


class Case(NamedTuple):
    """A function in mpmath, the points of a dtype, and the ulps of the value and of each order.

    - `scale`: of the value: what cancels in it.
    - `rounding`: whether an argument of `exp` is a rounded difference, of which the error is as
        many units as it is large.
    """

    fn: Callable[..., Any]
    points: Callable[[str], list[tuple[float, ...]]]
    ulps: tuple[int, ...]
    scale: Callable[..., Any] | None = None
    rounding: bool = False


def _each(*parts):
    return [(x,) for x in sorted(set(itertools.chain(*parts))) if x]


def _range(dtype, low, high, n):
    return rounded(dtype, np.linspace(low, high, n))


def _far(dtype):
    """Where a square of the exponential overflows, and where the exponential does."""
    return 88.0 if dtype == "float32" else 708.0


def _lower_tail(dtype):
    high = 1e30 if dtype == "float32" else 1e100
    return _each(
        [-x for x in log_spaced(dtype, 24, low=1.0, high=high)], _range(dtype, -5, 13, 46)
    )


def _to_overflow(dtype):
    far = _far(dtype)
    return _each(_range(dtype, -4, 4, 41), _range(dtype, -far - 20, far + 20, 40))


def _positive(dtype):
    return _each(log_spaced(dtype, 12, low=1e-6, high=1.0), _range(dtype, 1, 80, 20))


def _gaps(dtype):
    gaps = log_spaced(dtype, 8, low=1e-3, high=_far(dtype) - 8)
    points = pairs([0.0, *rounded(dtype, [1e-30, 20.0, -3.0])], gaps)
    return sorted({tuple(rounded(dtype, [x, x - gap])) for x, gap in points})


def _both_ways(dtype):
    return sorted({point for x, y in _gaps(dtype) for point in ((x, y), (y, x))})


def _with_digits(fn):
    def truth(*point):
        with mp.workdps(mp.mp.dps + DIGITS):
            return fn(*point)

    return truth


CASES = {
    "log_ndtr": Case(_log_ndtr, _lower_tail, (20, 20, 8, 48)),
    "expm1_ratio": Case(lambda x: mp.expm1(x) / x, _to_overflow, (8, 8, 16, 96)),
    "sinhc": Case(lambda x: mp.sinh(x) / x, _to_overflow, (8, 8, 16, 96)),
    "log1p_ratio": Case(
        lambda x: mp.log1p(x) / x,
        lambda dtype: _each(_range(dtype, -0.95, 1.5, 50), _range(dtype, 2, 12, 10)),
        (8, 8, 48, 128),
    ),
    "log_cosh": Case(
        lambda x: mp.log1p(2 * mp.sinh(x / 2) ** 2),
        lambda dtype: _each(_range(dtype, -1, 1, 21), _range(dtype, -42, 42, 22)),
        (8, 8, 8, 8),
    ),
    "log_expm1": Case(
        lambda x: mp.log(mp.expm1(x)), _positive, (8, 8, 8, 16), lambda x: abs(x)
    ),
    "log_sub_exp": Case(
        lambda x, y: x + mp.log(-mp.expm1(y - x)),
        _gaps,
        (8, 8, 12, 16),
        lambda x, y: abs(x),
        rounding=True,
    ),
    "logaddexp": Case(
        lambda x, y: max(x, y) + mp.log1p(mp.exp(-abs(x - y))),
        _both_ways,
        (8, 8, 8, 8),
        rounding=True,
    ),
}


def _orders(n_arguments):
    orders = itertools.product(range(4), repeat=n_arguments)
    return [order for order in orders if sum(order) <= 3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_to_the_third_order_in_all_nestings(name, dtype):
    case, fn = CASES[name], getattr(safe, name)
    points, truth = case.points(dtype), _with_digits(case.fn)
    for order in _orders(len(points[0])):
        nestings = ["".join(modes) for modes in itertools.product("fr", repeat=sum(order))]
        allowed = case.ulps[sum(order)]
        ulps = (lambda x, y, n=allowed: n + abs(x - y)) if case.rounding else allowed
        program = lambda *xs, order=order, nestings=nestings: [
            nested_partial(fn, order, modes)(*xs) for modes in nestings
        ]
        true = partial(truth, order, digits=DIGITS) if any(order) else truth
        # Computed once for all nestings.
        values = dict(zip(points, [true(*map(mp.mpf, point)) for point in points], strict=True))
        for got in evaluate(program, points, dtype):
            assert_values_right(
                got,
                lambda *point, values=values: values[tuple(map(float, point))],
                points,
                dtype,
                ulps,
                None if any(order) else case.scale,
            )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", [4, 5])
def test_higher_derivatives_of_log_ndtr_in_the_tail(order, dtype):
    points = _each([-t for t in log_spaced(dtype, 24, low=5.0, high=1e7)])
    true = partial(_log_ndtr, (order,))
    for modes in ("f" * order, "r" * order):
        program = nested_partial(safe.log_ndtr, (order,), modes)
        assert_values_right(evaluate(program, points, dtype), true, points, dtype, 60)


# ---------------------------------------------------------------- what was wrong once


def test_log_sub_exp_of_numbers_far_apart():
    """The value is minus the exponential of the difference, which is below rounding of one."""
    gaps = jnp.array([1.0, 15.0, 20.0, 80.0])
    expected = [float(mp.log1p(-mp.exp(-mp.mpf(g)))) for g in gaps.tolist()]
    np.testing.assert_allclose(safe.log_sub_exp(jnp.zeros(4), -gaps), expected, rtol=1e-6)
    x = jnp.log(2.0) + 1e-3
    expected = float(mp.log(mp.expm1(mp.mpf(float(x)))))
    np.testing.assert_allclose(safe.log_expm1(x), expected, rtol=0, atol=2e-7)
    for x in (-1e-3, -1.0, -20.0, -jnp.inf):
        assert jnp.isnan(safe.log_expm1(x))
    assert safe.log_expm1(0.0) == -jnp.inf
    assert jnp.isnan(safe.log_sub_exp(1.0, jnp.inf))


def test_the_hessian_of_logaddexp_is_symmetric_and_singular():
    """A constant that is added to both has no curvature."""
    for x in (7.0, 20.0, 80.0):
        hessian = jax.hessian(lambda z: safe.logaddexp(z[0], z[1]))(jnp.array([x, 0.0]))
        weight = float(mp.sech(mp.mpf(x) / 2) ** 2 / 4)
        expected = weight * np.array([[1, -1], [-1, 1]])
        np.testing.assert_allclose(hessian, expected, rtol=1e-5)
    prefix = lambda z: safe.cumlogsumexp(z)[1]
    hessian = jax.hessian(prefix)(jnp.array([20.0, 0.0]))
    np.testing.assert_allclose(hessian, 2.0611537e-9 * np.array([[1, -1], [-1, 1]]), rtol=1e-5)


def test_second_derivatives_of_logsumexp_are_right_in_units_of_one():
    """As documented: that of a term which outweighs the others is a difference from one."""
    x = jnp.array([20.0, 0.0, 3.0])
    p = np.asarray(jax.nn.softmax(x), np.float64)
    hessian = jax.hessian(safe.logsumexp)(x)
    expected = np.diag(p) - np.outer(p, p)
    np.testing.assert_allclose(hessian, expected, atol=2e-7, rtol=0)
    off_diagonal = ~np.eye(3, dtype=bool)
    np.testing.assert_allclose(hessian[off_diagonal], expected[off_diagonal], rtol=1e-5)


NESTINGS = ["".join(modes) for modes in itertools.product("fr", repeat=3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinhc", "expm1_ratio"])
def test_past_overflow_every_derivative_is_infinite(name):
    """Compiled, and element by element."""
    fn = getattr(safe, name)
    x = jnp.array([100.0, 300.0, 6e4, 1e20, 3e38], jnp.float32)
    for order, modes in [(2, "rr"), (2, "fr"), *((3, modes) for modes in NESTINGS)]:
        derivative = nested_partial(fn, (order,), modes)
        assert jnp.isposinf(derivative(x)).all(), modes
        assert jnp.isposinf(jax.jit(derivative)(x)).all(), modes
        at_minus = derivative(-x)
        if name == "sinhc":
            assert (at_minus == (-1) ** order * jnp.inf).all()
        else:
            assert jnp.isfinite(at_minus).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_derivatives_of_power_in_its_base(dtype):
    """Of exponents that lose their parity or vanish in a difference from one, and of powers
    that are out of range if the exponent is lowered before the factors are small."""
    large = 1e20 if dtype == "float64" else float(np.float32(1e10))
    small = [tuple(rounded(dtype, p)) for p in [(1e-20, 1e-10), (1e-13, 1e-20), (0.3, 1e-30)]]
    near_one = [(-1.0, large), (-1.0, -large), (1.0, large), (-1.0, 3.0), (-1.0, 7.0)]
    fraction = lambda x, y: mp.power(x, int(y)) if y == int(y) else mp.power(x, y)
    for points, order in itertools.product((small, near_one), range(1, 4)):
        program = lambda x, y, order=order: [
            nested_partial(safe.power, (order, 0), m)(x, y) for m in ("f" * order, "r" * order)
        ]
        true = partial(fraction, (order, 0), digits=60)
        for got in evaluate(program, points, dtype):
            assert_values_right(got, true, points, dtype, 32)


# ---------------------------------------------------------------- NaN


# They are linear in these, and have derivatives of the other argument alone.
LINEAR = {("divide", 0), ("xlogy", 0), ("xlog1py", 0)}


@pytest.mark.slow
def test_nan_has_the_derivative_nan():
    """As in JAX, so that it is not hidden; to the second order too."""
    names = [*FORMULAS, "logaddexp"]
    found = {}

    @jax.jit
    def run():
        for name in names:
            fn, n = getattr(safe, name), 2 if name == "logaddexp" else len(FORMULAS[name][1])
            for i in range(n):
                point = [0.5] * n
                point[i] = jnp.nan
                for j in range(n):
                    if i == j and (name, i) in LINEAR:
                        continue
                    first = jax.grad(fn, j)
                    found[name, i, j] = (
                        first(*point),
                        jax.jacfwd(fn, j)(*point),
                        jax.grad(first, j)(*point),
                    )
        return found

    for key, derivatives in run().items():
        name, _, j = key
        one, two, second = derivatives
        assert jnp.isnan(one), key
        assert jnp.isnan(two), key
        assert jnp.isnan(second) or (name, j) in LINEAR, key
