"""Functions of floats against mpmath at many digits, on grids to the ends of a dtype's range.

`truth` is always a function of `mpmath` numbers. Its derivatives are differences at so many
digits that they are exact to 50, so that no formula is differentiated by hand.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np


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


def pairs(xs: Sequence[float], ys: Sequence[float] | None = None) -> list[Point]:
    """All points with the one coordinate in `xs`, the other in `ys`."""
    return list(itertools.product(xs, xs if ys is None else ys))


def rounded(dtype: str, xs: Sequence[float]) -> list[float]:
    """The nearest numbers of a dtype."""
    return [float(x) for x in np.asarray(xs, np.float64).astype(jnp.dtype(dtype))]


# ---------------------------------------------------------------- what is true


def partial(
    truth: Truth, order: Sequence[int], unit: Callable[..., Any] | None = None
) -> Truth:
    """The derivative of `truth`, so many times along each argument. It changes on the scale of
    each coordinate, or on the scale that `unit` returns for a point."""

    def derivative(*point):
        # A second difference at 1e-300 is smaller than the value by 1e-600, and by the steps.
        magnitudes = [abs(mp.log10(abs(x))) for x in point if x]
        n = sum(order)
        with mp.workdps(90 + 30 * n + (1 + n) * int(sum(magnitudes))):
            point = tuple(mp.mpf(x) for x in point)
            scales = [unit(*point) if unit else abs(x) or 1 for x in point]
            return +_difference(truth, point, tuple(order), [_STEP * s for s in scales])

    return derivative


def _difference(truth, point, order, steps):
    i = next((i for i, times in enumerate(order) if times), None)
    if i is None:
        return truth(*point)
    n, h = order[i], steps[i]
    rest = (*order[:i], 0, *order[i + 1 :])
    shifted = lambda s: (*point[:i], point[i] + s * h, *point[i + 1 :])
    # Central, of steps `h` around a point: half steps for an odd order.
    terms = [
        (-1) ** k
        * math.comb(n, k)
        * _difference(truth, shifted(mp.mpf(n) / 2 - k), rest, steps)
        for k in range(n + 1)
    ]
    difference = mp.fsum(terms)
    # Exactly zero, if nothing but rounding is left.
    is_rounding = abs(difference) <= abs(max(terms, key=abs)) * mp.mpf(10) ** (10 - mp.mp.dps)
    return mp.mpf(0) if is_rounding else difference / h**n


# ---------------------------------------------------------------- what a program computes


def evaluate(fn: Callable[..., Any], points: Sequence[Point], dtype: str) -> Any:
    """An elementwise function, compiled, at all points; as float64. It may have several
    results."""
    with jax.enable_x64(dtype == "float64"):
        columns = [jnp.array(column, dtype) for column in zip(*points, strict=True)]
        out = jax.jit(fn)(*columns)
        assert all(x.dtype == dtype for x in jax.tree.leaves(out)), f"not all are {dtype}"
        return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), out)


def in_mode(mode: str, fn: Callable[..., Any], order: Sequence[int]) -> Callable[..., Any]:
    """The derivative of an elementwise function, so many times along each argument. The last is
    by `mode`, forward or reverse, and all others by forward mode."""
    arguments = [i for i, times in enumerate(order) for _ in range(times)]
    for k, i in enumerate(arguments, 1):
        fn = _along(fn, i, mode if k == len(arguments) else "forward")
    return fn


def _along(fn, i, mode):
    def derivative(*xs):
        of_one = lambda x: fn(*xs[:i], x, *xs[i + 1 :])
        if mode == "forward":
            return jax.jvp(of_one, (xs[i],), (jnp.ones_like(xs[i]),))[1]
        out, pull_back = jax.vjp(of_one, xs[i])
        return pull_back(jnp.ones_like(out))[0]

    return derivative


# ---------------------------------------------------------------- how far they are apart


def assert_right(
    got: np.ndarray,
    truth: Truth,
    points: Sequence[Point],
    dtype: str,
    ulps: float | Callable[..., float],
    scale: Callable[..., Any] | None = None,
) -> None:
    """The values are within so many units in the last place of the truth. A number above the
    largest float has to be infinite, and a term below the smallest normal float may be zero.

    - `scale`: a function of a point: a magnitude whose spacing is the unit if it is greater
        than the magnitude of the value. For a difference that cancels, the number that is
        subtracted.
    """
    info = jnp.finfo(dtype)
    largest, tiny, eps = float(info.max), float(info.tiny), mp.mpf(float(info.eps))
    for point, value in zip(points, np.asarray(got, float).ravel(), strict=True):
        with mp.workdps(700 if dtype == "float64" else 120):
            true = +truth(*(mp.mpf(x) for x in point))
        unit = max(abs(true), tiny, 0 if scale is None else abs(mp.mpf(scale(*point))))
        ulp = eps * mp.mpf(2) ** mp.floor(mp.log(unit, 2))
        if abs(true) >= mp.mpf(largest) * (1 - 16 * eps) and np.isinf(value):
            assert np.sign(value) == mp.sign(true), (dtype, point)
            continue
        off = abs(mp.mpf(float(value)) - true) if np.isfinite(value) else mp.inf
        allowed = float(ulps(*point)) if callable(ulps) else ulps
        assert off <= max(2 * tiny, allowed * ulp), (dtype, point, value, float(true))
