"""Functions of floats against mpmath at 50 digits, on grids to the ends of a dtype's range.

`truth` is always a function of `mpmath` numbers. Its derivatives are differences at so many
digits that they are exact to 50, so that no formula is differentiated by hand.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np


DIGITS = 50
_STEP = mp.mpf(10) ** -30  # of the differences, relative to the argument

Point = tuple[float, ...]
Truth = Callable[..., mp.mpf]


def log_spaced(
    dtype: str, n: int, *, low: float | None = None, high: float | None = None
) -> list[float]:
    """`n` positive numbers of a dtype, from the smallest that is not subnormal to the largest,
    or from `low` to `high`. Both ends are there."""
    low = float(jnp.finfo(dtype).tiny) if low is None else low
    high = float(jnp.finfo(dtype).max) if high is None else high
    between = np.exp(np.linspace(np.log(low), np.log(high), n)[1:-1])
    return sorted({*rounded(dtype, [low, *between, high])})


def both_signs(positive: Sequence[float]) -> list[float]:
    return [sign * x for x in positive for sign in (-1.0, 1.0)]


def around(dtype: str, point: float, n: int = 8) -> list[float]:
    """Numbers on both sides of `point`, closer and closer to the nearest ones of the dtype:
    where a difference from `point` cancels."""
    eps = float(jnp.finfo(dtype).eps)
    steps = np.exp(np.linspace(np.log(eps), np.log(0.1), n)) * max(1.0, abs(point))
    return sorted({*rounded(dtype, [point + sign * h for h in steps for sign in (-1, 1)])})


def pairs(xs: Sequence[float], ys: Sequence[float] | None = None) -> list[Point]:
    """All points with the one coordinate in `xs`, the other in `ys`."""
    return list(itertools.product(xs, xs if ys is None else ys))


def rounded(dtype: str, xs: Sequence[float]) -> list[float]:
    """The nearest numbers of a dtype."""
    return [float(x) for x in np.asarray(xs, np.float64).astype(jnp.dtype(dtype))]


# ---------------------------------------------------------------- what is true


def partial(truth: Truth, order: Sequence[int], *, digits: int = 0) -> Truth:
    """The derivative of `truth`, so many times along each argument. It has more digits if one
    of its terms is smaller than the others by that many."""

    def derivative(*point):
        # A second difference at 1e-300 is smaller than the value by 1e-600, and by the steps.
        magnitudes = [abs(mp.log10(abs(x))) for x in point if x]
        n = sum(order)
        with mp.workdps(90 + 30 * n + (1 + n) * int(sum(magnitudes)) + digits):
            return +_difference(truth, tuple(mp.mpf(x) for x in point), tuple(order))

    return derivative


def _difference(truth, point, order):
    i = next((i for i, times in enumerate(order) if times), None)
    if i is None:
        return truth(*point)
    n, h = order[i], _STEP * (abs(point[i]) or 1)
    rest = (*order[:i], 0, *order[i + 1 :])
    shifted = lambda s: (*point[:i], point[i] + s * h, *point[i + 1 :])
    # Central, of steps `h` around a point: half steps for an odd order.
    terms = [
        (-1) ** k * math.comb(n, k) * _difference(truth, shifted(mp.mpf(n) / 2 - k), rest)
        for k in range(n + 1)
    ]
    return _without_rounding(mp.fsum(terms), max(terms, key=abs)) / h**n


def _without_rounding(difference, value):
    """Exactly zero, if nothing but rounding is left."""
    is_rounding = abs(difference) <= abs(value) * mp.mpf(10) ** (10 - mp.mp.dps)
    return mp.mpf(0) if is_rounding else difference


def true_values(truth: Truth, points: Sequence[Point]) -> list[mp.mpf]:
    with mp.workdps(DIGITS):
        return [+truth(*(mp.mpf(x) for x in point)) for point in points]


# ---------------------------------------------------------------- what a program computes


def evaluate(fn: Callable[..., Any], points: Sequence[Point], dtype: str) -> Any:
    """An elementwise function, compiled, at all points; as float64. It may have several
    results."""
    with jax.enable_x64(dtype == "float64"):
        columns = [jnp.array(column, dtype) for column in zip(*points, strict=True)]
        exact = [column.tolist() for column in columns]
        assert list(zip(*exact, strict=True)) == list(points), f"not all are {dtype}"
        out = jax.jit(fn)(*columns)
        assert all(x.dtype == dtype for x in jax.tree.leaves(out)), f"not all are {dtype}"
        return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), out)


def forward_partial(fn: Callable[..., Any], order: Sequence[int]) -> Callable[..., Any]:
    """The derivative of an elementwise function, by forward mode, so many times along each
    argument."""
    return nested_partial(fn, order, "f" * sum(order))


def reverse_partial(fn: Callable[..., Any], order: Sequence[int]) -> Callable[..., Any]:
    """As `forward_partial`, the last derivative by reverse mode. The function itself, of no
    order."""
    if not any(order):
        return fn
    return nested_partial(fn, order, "f" * (sum(order) - 1) + "r")


def nested_partial(
    fn: Callable[..., Any], order: Sequence[int], modes: str
) -> Callable[..., Any]:
    """The derivative of an elementwise function, each by the next of `modes`, the innermost
    first: `f` for forward mode, `r` for reverse mode."""
    arguments = [i for i, times in enumerate(order) for _ in range(times)]
    for i, mode in zip(arguments, modes, strict=True):
        fn = _along(fn, i) if mode == "f" else _back_along(fn, i)
    return fn


def _along(fn, i):
    def derivative(*xs):
        of_one = lambda x: fn(*xs[:i], x, *xs[i + 1 :])
        return jax.jvp(of_one, (xs[i],), (jnp.ones_like(xs[i]),))[1]

    return derivative


def _back_along(fn, i):
    def derivative(*xs):
        of_one = lambda x: fn(*xs[:i], x, *xs[i + 1 :])
        out, pull_back = jax.vjp(of_one, xs[i])
        return pull_back(jnp.ones_like(out))[0]

    return derivative


# ---------------------------------------------------------------- how far they are apart


class Error(NamedTuple):
    """An error in units of the spacing of floats at the true value, and where it is."""

    ulps: float
    point: Point
    got: float
    expected: float


def errors(
    got: np.ndarray,
    expected: Sequence[mp.mpf],
    points: Sequence[Point],
    dtype: str,
    scale: Callable[..., Any] | None = None,
) -> Iterator[Error]:
    """The error at each point. A number above the largest float has to be infinite, and a term
    below the smallest normal float may be zero.

    - `scale`: a function of a point: a magnitude whose spacing is the unit if it is greater
        than the magnitude of the value. For a difference that cancels, the number that is
        subtracted.
    """
    info = jnp.finfo(dtype)
    largest, tiny, eps = float(info.max), float(info.tiny), mp.mpf(float(info.eps))
    for point, value, true in zip(
        points, np.asarray(got, float).ravel(), expected, strict=True
    ):
        unit = max(abs(true), tiny)
        if scale is not None:
            unit = max(unit, abs(mp.mpf(scale(*point))))
        ulp = eps * mp.mpf(2) ** mp.floor(mp.log(unit, 2))
        is_close_to_overflow = abs(true) >= mp.mpf(largest) * (1 - 16 * eps)
        if is_close_to_overflow and np.isinf(value):
            ulps = 0.0 if np.sign(value) == mp.sign(true) else np.inf
        elif not np.isfinite(value):
            ulps = np.inf
        else:
            off = abs(mp.mpf(float(value)) - true)
            ulps = 0.0 if off <= 2 * tiny else float(off / ulp)
        yield Error(ulps, point, float(value), float(true))


def assert_values_right(
    got: np.ndarray,
    truth: Truth,
    points: Sequence[Point],
    dtype: str,
    ulps: float | Callable[..., float],
    scale: Callable[..., Any] | None = None,
) -> None:
    """Values are within so many ulps of the truth, which may depend on a point."""
    for error in errors(got, true_values(truth, points), points, dtype, scale):
        allowed = ulps(*error.point) if callable(ulps) else ulps
        assert error.ulps <= allowed, f"{dtype}, {allowed:.3g} ulps admitted: {error}"
