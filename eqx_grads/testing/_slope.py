"""The slope of a function of one number at zero, from its values, with an error estimate.

A long step has a large truncation error, a short step a large rounding error. So steps of many
lengths are tried, each extrapolated with its half (Richardson). The slope is where three such
estimates in a row agree best, and their disagreement is its error.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np


# Rounding errors of the function itself, in units of the last place.
_ULPS = 8.0
_EPS = float(np.finfo(np.float64).eps)


@dataclasses.dataclass(frozen=True)
class Slope:
    """- `value`, `error`: the slope, and an estimate of its absolute error.
    - `left`, `right`: the one-sided slopes, if they were asked for.
    - `one_sided_error`: an estimate of their errors.
    """

    value: float
    error: float
    left: float = math.nan
    right: float = math.nan
    one_sided_error: float = math.inf

    @property
    def relative_error(self) -> float:
        if not math.isfinite(self.error):
            return math.inf
        return self.error / abs(self.value) if self.value else math.inf

    @property
    def is_kink(self) -> bool:
        """Whether the one-sided slopes differ by more than their errors."""
        gap = abs(self.right - self.left)
        size = max(abs(self.right), abs(self.left))
        return gap > 10 * self.one_sided_error and gap > 1e-4 * size

    def admits(self, value: float) -> bool:
        """Whether a value is between the slopes on both sides of a kink."""
        low, high = sorted((self.left, self.right))
        margin = 10 * self.one_sided_error + 1e-6 * (high - low)
        return low - margin <= value <= high + margin


class Samples:
    """The values of a function at steps from zero, each computed once."""

    def __init__(self, fn: Callable[[float], float]):
        self._fn = fn
        self._known: dict[float, float] = {}
        self.biggest = 0.0

    def __call__(self, h: float) -> float:
        if h not in self._known:
            self._known[h] = float(self._fn(h))
            if math.isfinite(self._known[h]):
                self.biggest = max(self.biggest, abs(self._known[h]))
        return self._known[h]

    @property
    def count(self) -> int:
        return len(self._known)

    def central(self, h: float) -> float:
        return (self(h) - self(-h)) / (2 * h)

    def richardson(self, h: float) -> float:
        return (4 * self.central(h / 2) - self.central(h)) / 3

    def rounding(self, h: float) -> float:
        """The error of a slope with this step that rounding explains."""
        return _ULPS * _EPS * max(abs(self(0.0)), abs(self(h))) / h


def central_slope(samples: Samples, size: float, accuracy: float = 1e-7) -> Slope:
    """The slope of a function that may be differentiated at zero.

    - `size`: what the error is relative to. With a relative `accuracy`, no more steps are
        tried.
    """
    best = Slope(math.nan, math.inf)
    for exponents in (range(9, 12), range(5, 8), _ALL):
        best = _best([best, *_estimates(samples, [2.0**-k for k in exponents])])
        if best.error <= accuracy * size:
            break
    return best


def confirmed_slope(samples: Samples, slope: Slope) -> Slope:
    """The same slope, unless shorter steps show another one: a function that oscillates, or
    turns close to zero, has the slope of an average in long steps."""
    found = _estimates(samples, [2.0**-k for k in _ALL])
    for shorter in reversed(found):
        if shorter.relative_error <= _PLATEAU:
            gap = abs(shorter.value - slope.value)
            is_same = gap <= 10 * (shorter.error + slope.error)
            return slope if is_same else shorter
    return slope


_ALL = range(3, 44)
# Estimates with a smaller relative error are of something.
_PLATEAU = 1e-2


def _estimates(samples: Samples, steps: list[float]) -> list[Slope]:
    """A slope for each step but the first and the last, if the values there are finite."""
    with np.errstate(all="ignore"):
        found = [samples.richardson(h) for h in steps]
        slopes = []
        for i in range(1, len(steps) - 1):
            triple = found[i - 1 : i + 2]
            error = max(triple) - min(triple) + samples.rounding(steps[i])
            if math.isfinite(error):
                slopes.append(Slope(found[i], error))
    return slopes


def _best(slopes: list[Slope]) -> Slope:
    # Where a function oscillates, the absolute error of a long step is small: so is its slope.
    good = [slope for slope in slopes if slope.relative_error <= _PLATEAU]
    if good:
        return min(good, key=lambda slope: slope.relative_error)
    return min(slopes, key=lambda slope: slope.error)


def with_sides(samples: Samples, slope: Slope) -> Slope:
    """The same with one-sided slopes: of short steps, extrapolated to zero."""
    best = slope
    for k in range(8, 34):
        h = 2.0**-k
        with np.errstate(all="ignore"):
            left, left_error = _side(samples, -h)
            right, right_error = _side(samples, h)
        error = left_error + right_error + 4 * samples.rounding(h)
        if math.isfinite(error) and error < best.one_sided_error:
            best = Slope(slope.value, slope.error, left, right, error)
    return best


def _side(samples: Samples, h: float) -> tuple[float, float]:
    one, half, quarter = ((samples(step) - samples(0.0)) / step for step in (h, h / 2, h / 4))
    coarse, fine = 2 * half - one, 2 * quarter - half
    return fine, abs(fine - coarse)
