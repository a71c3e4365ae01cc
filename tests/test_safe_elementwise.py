"""Elementwise safe mathematics: against mpmath to the ends of the range, and what happens where
there is no derivative."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import mpmath as mp
import numpy as np
import pytest
from eqx_grads import RuleError, safe

from .cases.safe_elementwise import FORMULAS
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


class Truth(NamedTuple):
    """A function in mpmath, the points where it is compared, and how close it has to be.

    - `points`: of a dtype, and a number that grows with the density of the grid.
    - `ulps`: of the value, of first and of second derivatives. Of a point, if it depends on it.
    - `scale`: of the value: what cancels in it.
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


def _both(dtype, n):
    return _each(both_signs(log_spaced(dtype, 8 * n)))


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
    assert TRUTHS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("name", TRUTHS)
def test_against_mpmath(name):
    check_against_mpmath(name, "float32", 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", TRUTHS)
def test_against_mpmath_on_a_dense_grid(name, dtype):
    check_against_mpmath(name, dtype, 8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TRUTHS)
def test_half_precision_is_rounded_once(name, dtype):
    check_against_mpmath(name, dtype, 3, highest=1)


# ---------------------------------------------------------------- where there is no derivative

INF = float("inf")
SPECIAL = [-INF, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, INF]
ONE = [name for name, (_, args) in FORMULAS.items() if len(args) == 1]
TWO = [name for name, (_, args) in FORMULAS.items() if len(args) == 2]

# At points where the true derivative is infinite or does not exist, and at minima.
CONVENTIONS = {
    ("sqrt", 0.0): (0.0,),
    ("sqrt", -1.0): (0.0,),
    ("divide", 1.0, 0.0): (0.0, 0.0),
    ("divide", 0.0, 0.0): (0.0, 0.0),
    ("divide", INF, 2.0): (0.5, 0.0),
    ("divide", 2.0, INF): (0.0, 0.0),
    ("power", 0.0, 0.5): (0.0, 0.0),
    ("power", 0.0, -1.0): (0.0, 0.0),
    ("power", 0.0, 0.0): (0.0, 0.0),
    ("power", 0.0, 1.0): (1.0, 0.0),
    ("power", 0.0, 2.0): (0.0, 0.0),
    ("power", -2.0, 3.0): (12.0, 0.0),
    ("power", -2.0, 0.5): (0.0, 0.0),
    ("hypot", 0.0, 0.0): (0.0, 0.0),
    ("hypot", 0.0, -2.0): (0.0, -1.0),
    ("hypot", INF, 2.0): (1.0, 0.0),
    ("arctan2", 0.0, 0.0): (0.0, 0.0),
    ("arctan2", INF, 2.0): (0.0, 0.0),
    ("arccos", 1.0): (0.0,),
    ("arccos", 2.0): (0.0,),
    ("arcsin", -1.0): (0.0,),
    ("log", 0.0): (0.0,),
    ("log", -1.0): (0.0,),
    ("xlogy", 0.0, 0.0): (0.0, 0.0),
    ("xlogy", 1.0, 0.0): (0.0, 0.0),
    ("xlogy", 0.0, 1.0): (0.0, 0.0),
    ("xlog1py", 0.0, -1.0): (0.0, 0.0),
    ("log_cosh", 0.0): (0.0,),
    ("log_cosh", -INF): (-1.0,),
    ("log_expm1", 0.0): (0.0,),
    ("log_expm1", INF): (1.0,),
    ("log_sub_exp", 1.0, 1.0): (0.0, 0.0),
    ("log_sub_exp", 1.0, -INF): (1.0, 0.0),
    ("log_sub_exp", -INF, -INF): (0.0, 0.0),
    ("log_ndtr", -INF): (0.0,),
    ("log_ndtr", INF): (0.0,),
    ("expm1_ratio", 0.0): (0.5,),
    ("expm1_ratio", -INF): (0.0,),
    ("log1p_ratio", 0.0): (-0.5,),
    ("log1p_ratio", -1.0): (0.0,),
    ("sinhc", 0.0): (0.0,),
}


@pytest.mark.slow
def test_conventions():
    names = {key[0] for key in CONVENTIONS}
    points = {name: [key[1:] for key in CONVENTIONS if key[0] == name] for name in names}
    columns = {
        name: tuple(map(jnp.array, zip(*rows, strict=True))) for name, rows in points.items()
    }

    @jax.jit
    def all_of_them(columns):
        def both_modes(name, xs):
            fn, indices = getattr(safe, name), tuple(range(len(xs)))
            backward = jax.vmap(jax.grad(fn, indices))(*xs)
            return backward, jax.vmap(jax.jacfwd(fn, indices))(*xs)

        return {name: both_modes(name, xs) for name, xs in columns.items()}

    for name, (backward, forward) in all_of_them(columns).items():
        for i, point in enumerate(points[name]):
            expected = CONVENTIONS[name, *point]
            assert tuple(float(t[i]) for t in backward) == expected, (name, point)
            assert tuple(float(t[i]) for t in forward) == expected, (name, point)


@pytest.mark.slow
def test_a_mask_on_the_result_is_enough():
    """Derivatives are finite at infinity, at a pole and outside of the domain. Second ones are
    not finite at a pole: see `test_safe_corners.py`."""
    rows = pairs(SPECIAL)
    poles = {"arccos": (-1, 1), "arcsin": (-1, 1), "log1p_ratio": (-1,)}

    @jax.jit
    def derivatives(xs, ys, zs):
        one = {name: getattr(safe, name) for name in ONE}
        two = {name: getattr(safe, name) for name in TWO}
        return (
            {name: jax.vmap(jax.grad(fn))(xs) for name, fn in one.items()},
            {name: jax.vmap(jax.grad(jax.grad(fn)))(xs) for name, fn in one.items()},
            {name: jax.vmap(jax.grad(fn, (0, 1)))(ys, zs) for name, fn in two.items()},
        )

    ys, zs = (jnp.array(column) for column in zip(*rows, strict=True))
    first, second, of_two = derivatives(jnp.array(SPECIAL), ys, zs)
    for found in (first, of_two):
        for name, derivative in found.items():
            for t in jax.tree.leaves(derivative):
                assert jnp.all(jnp.isfinite(t)), (name, t)
    smooth = ("log_cosh", "log_ndtr", "expm1_ratio", "sinhc")
    for name, t in second.items():
        poles_of = () if name in smooth else poles.get(name, (0,))
        assert jnp.isnan(t).tolist() == [x in poles_of for x in SPECIAL], (name, t)


def test_a_zero_cotangent_stays_zero_where_the_derivative_overflows():
    x = jnp.array([1e-30, -1e-30, 2.0])
    for fn in (lambda x: safe.divide(1.0, x), lambda x: safe.divide(x, x**2)):
        masked = lambda x, fn=fn: jnp.sum(jnp.where(jnp.abs(x) > 1, fn(x), 0.0))
        assert jnp.array_equal(jax.grad(masked)(x), jnp.array([0.0, 0.0, -0.25])), fn


@pytest.mark.thorough
def test_explain_nan_finds_nothing():
    x = jnp.array([0.0, 1.0, 2.0])
    for name in ("sqrt", "log", "arccos", "log_expm1", "log1p_ratio"):
        fn = getattr(safe, name)
        loss = lambda x, fn=fn: jnp.sum(jnp.where((x > 0) & (x < 1.5), fn(x), 0.0))
        report = eqg.explain_nan(loss, x)
        assert not report, str(report)


# ---------------------------------------------------------------- values, types and shapes

IN_JAX = {
    "sqrt": jnp.sqrt,
    "divide": jnp.divide,
    "power": jnp.power,
    "hypot": jnp.hypot,
    "arctan2": jnp.arctan2,
    "arccos": jnp.arccos,
    "arcsin": jnp.arcsin,
    "log": jnp.log,
    "xlogy": jsp.xlogy,
    "xlog1py": jsp.xlog1py,
}


@pytest.mark.parametrize("name", IN_JAX)
def test_values_are_those_of_jax_to_the_bit(name):
    points = pairs(SPECIAL) if name in TWO else [(x,) for x in SPECIAL]
    columns = [jnp.array(column) for column in zip(*points, strict=True)]
    got, expected = getattr(safe, name)(*columns), IN_JAX[name](*columns)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.thorough
def test_numbers_and_dtypes():
    assert safe.sqrt(4).dtype == safe.sqrt(4.0).dtype == jnp.zeros(()).dtype
    assert jax.grad(safe.sqrt)(4.0) == 0.25
    assert safe.divide(1, jnp.array([2.0, 4.0], "float16")).dtype == "float16"
    assert safe.power(jnp.array(3.0, "bfloat16"), 2).dtype == "bfloat16"
    assert safe.hypot(jnp.array(3, "int32"), jnp.array(4.0, "float16")).dtype == "float16"
    assert safe.divide(jnp.array(1.0, "float32"), jnp.array(1.0, "float16")).dtype == "float32"
    assert safe.log(np.float32(1.0)) == 0.0
    half = jnp.array([300.0, 400.0], "float16")
    assert safe.hypot(half[0], half[1]) == 500.0
    slope = jax.grad(lambda x: safe.hypot(x[0], x[1]))(half)
    assert slope.dtype == "float16"
    np.testing.assert_array_equal(slope, jnp.array([0.6, 0.8], "float16"))
    mixed = jax.grad(lambda x, y: safe.divide(x, y).sum(), (0, 1))
    slopes = mixed(jnp.ones((2, 1), "float16"), jnp.full(3, 2.0, "float32"))
    assert [(t.shape, t.dtype) for t in slopes] == [((2, 1), "float16"), ((3,), "float32")]
    assert jnp.array_equal(slopes[0], jnp.full((2, 1), 1.5, "float16"))
    assert safe.hypot(jnp.zeros((0, 2)), jnp.zeros(2)).shape == (0, 2)
    assert jax.grad(lambda x: safe.log_ndtr(x).sum())(jnp.zeros(0)).shape == (0,)


def test_errors():
    with pytest.raises(
        RuleError, match=r"`safe.sqrt` was given complex numbers, and is a"
    ) as e:
        safe.sqrt(1j)
    assert "`x` is complex (1j)" in str(e.value)
    with pytest.raises(RuleError, match=r"`safe.log` was given something that is not an array"):
        safe.log(jnp.array([True]))
    with pytest.raises(RuleError, match=r"of `safe.arctan2` do not broadcast together") as e:
        safe.arctan2(jnp.zeros(2), jnp.zeros(3))
    assert "`y` is float32[2], `x` is float32[3]" in str(e.value).replace("64", "32")


# ---------------------------------------------------------------- in programs


@pytest.mark.slow
def test_under_every_transformation():
    """A ball with drag, whose gradient by plain JAX is NaN from the step at which it stops."""

    def height(speed, power):
        @jax.checkpoint
        def step(v, _):
            drag = jnp.where(v > 0, 0.3 * power(v), 0.0)
            v = jnp.maximum(v - drag - 0.05, 0.0)
            return v, v

        return jnp.sum(jax.lax.scan(step, speed, None, length=12)[1])

    root = lambda v: jnp.where(v > 0, jnp.sqrt(jnp.where(v > 0, v, 1.0)), 0.0)
    speeds = jnp.array([0.5, 1.0, 2.0])
    masked = lambda v: safe.where(v > 0, safe.sqrt, v, 0.0)  # a second derivative needs it
    for derivative, ours in (
        (jax.grad, safe.sqrt),
        (jax.jacfwd, safe.sqrt),
        (jax.hessian, masked),
    ):
        over = lambda power, d=derivative: jax.jit(jax.vmap(d(lambda v: height(v, power))))(
            speeds
        )
        np.testing.assert_allclose(over(ours), over(root), rtol=1e-5)
    assert jnp.isnan(jax.grad(height)(0.5, jnp.sqrt))


@pytest.mark.slow
def test_a_third_derivative():
    third = jax.jacfwd(jax.grad(jax.grad(safe.log_ndtr)))
    expected = mp.diff(lambda x: mp.log(mp.ncdf(x)), -1.5, 3)
    assert abs(third(-1.5) / float(expected) - 1) < 1e-4
    third = jax.jacfwd(jax.grad(jax.grad(safe.expm1_ratio)))
    for x in (0.0, 0.3, 4.0):
        expected = mp.quad(lambda s, x=x: s**3 * mp.exp(x * s), [0, 1])
        assert abs(third(x) / float(expected) - 1) < 1e-4


# ---------------------------------------------------------------- where


@pytest.mark.thorough
def test_where_masks_the_argument_and_the_result():
    x, scale = jnp.array([-1.0, 0.0, 2.0, INF]), jnp.array(3.0)
    cond = jnp.array([False, False, True, False])
    other = jnp.array([5.0, 6.0, 7.0, 8.0])

    def f(x, scale, other):
        return safe.where(cond, lambda x: jnp.log(scale * x), x, other)

    np.testing.assert_allclose(f(x, scale, other), [5.0, 6.0, np.log(6.0), 8.0], rtol=1e-6)
    for jacobian in (jax.jacrev, jax.jacfwd):
        d_x, d_scale, d_other = jacobian(f, (0, 1, 2))(x, scale, other)
        np.testing.assert_allclose(d_x, np.diag([0, 0, 0.5, 0]))
        np.testing.assert_allclose(d_scale, [0, 0, 1 / 3, 0], rtol=1e-6)
        np.testing.assert_allclose(d_other, np.diag([1, 1, 0, 1]))
    second = jax.grad(jax.grad(lambda x: f(x * jnp.ones(4), scale, other).sum()))
    np.testing.assert_allclose(second(2.0), -0.25)


def test_where_of_several_arguments_and_under_vmap():
    f = lambda x, y: safe.where(y != 0, lambda xs: xs["x"] / xs["y"], {"x": x, "y": y}, 0.0)
    xs, ys = jnp.array([1.0, 1.0]), jnp.array([0.0, 2.0])
    d_x, d_y = jax.jit(jax.vmap(jax.grad(f, (0, 1))))(xs, ys)
    assert d_x.tolist() == [0.0, 0.5]
    assert d_y.tolist() == [0.0, -0.25]
    # An integer leaf is left unchanged, and half precision keeps its dtype.
    g = lambda x: safe.where(x > 0, lambda xn: jnp.sqrt(xn[0]) * xn[1], (x, 2), 0)
    assert g(jnp.array([4.0, -1.0], "float16")).dtype == "float16"
    h = lambda x: safe.where(x > 1, jnp.arccosh, x, 0.0, substitute=2.0)
    assert jax.grad(h)(1.0) == 0.0
    with jax.debug_nans(True):
        assert jax.grad(h)(0.5) == 0.0


def test_errors_of_where():
    x = jnp.ones((2, 3))
    with pytest.raises(
        RuleError, match=r"The condition of `safe.where` does not hold booleans"
    ):
        safe.where(jnp.ones(3), jnp.log, x, 0.0)
    rows = jnp.ones(2, bool)
    with pytest.raises(
        RuleError, match=r"The `cond` of `safe.where` does not broadcast to x"
    ) as e:
        safe.where(rows, jnp.log, x, 0.0)
    assert "axes of size one: `cond[..., None]`" in str(e.value)
    assert jnp.all(safe.where(rows[..., None], jnp.log, x, 1.0) == 0)  # as it says
    with pytest.raises(RuleError, match="Broadcast x to the shape of `cond`"):
        safe.where(x > 0, jnp.log, jnp.ones(3), 0.0)
    with pytest.raises(RuleError, match="does not broadcast to the result of `<lambda>`") as e:
        safe.where(jnp.ones((2, 1), bool), lambda x: jnp.linalg.norm(x, axis=1), x, 0.0)
    assert "use `jax.vmap` around `safe.where`" in str(e.value)
    with pytest.raises(
        RuleError, match=r"`otherwise` of `safe.where` does not broadcast to the"
    ):
        safe.where(x > 0, jnp.log, x, jnp.ones(2))
    with pytest.raises(
        RuleError, match=r"The function of `safe.where` did not return one array"
    ):
        safe.where(x > 0, lambda x: (x, x), x, 0.0)


def test_sinhc_out_of_range():
    x = jnp.array([105.0, 174.0, 176.5, 177.0, 200.0, 1e20, jnp.inf], jnp.float32)
    assert jnp.isposinf(safe.sinhc(x)).all()
    assert jnp.isposinf(safe.sinhc(-x)).all()
    assert jnp.isposinf(safe.sinhc(jnp.float16(300)))


@pytest.mark.thorough
def test_third_derivative_of_log_ndtr_at_minus_infinity():
    assert jax.grad(jax.grad(jax.grad(safe.log_ndtr)))(-jnp.inf) == 0
