"""The slope of a function of one number at zero, from its values, with an error estimate.

A long step has a large truncation error, a short step a large rounding error. So steps of many
lengths are tried, each extrapolated with its half (Richardson). The slope is where three such
estimates in a row agree best, and their disagreement is its error. Where steps of other lengths
disagree with it, it is not the slope of a smooth function. The values are numbers or arrays.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ._compare import size_of


# Rounding errors of the function itself, in units of the last place.
_ULPS = 8.0
_EPS = float(np.finfo(np.float64).eps)
_LONGEST = 3
_ALL = range(_LONGEST, 44)
# Estimates with a smaller relative error are of something.
_PLATEAU = 1e-2
# How many times its error an estimate may be off.
_AGREE = 10
# Not longer: there may be a kink.
_OTHER_STEPS = (0.9, 0.8, 0.7, 0.6)


@dataclasses.dataclass(frozen=True)
class Slope:
    """- `value`, `error`: the slope, and an estimate of its absolute error.
    - `step`: the step that they are from.
    """

    value: Any
    error: float
    step: float = math.nan

    @property
    def relative_error(self) -> float:
        size = size_of(self.value)
        return self.error / size if size and math.isfinite(self.error) else math.inf


class Sides(NamedTuple):
    """The slopes on the two sides of zero, and an estimate of their errors."""

    left: float
    right: float
    error: float
    step: float = math.nan

    @property
    def gap(self) -> float:
        return abs(self.right - self.left)

    @property
    def is_kink(self) -> bool:
        """Whether the slopes differ by more than their errors."""
        size = max(abs(self.right), abs(self.left))
        return self.gap > 10 * self.error and self.gap > 1e-6 * size

    def admits(self, value: float) -> bool:
        """Whether a value is between the slopes."""
        margin = 10 * self.error + 1e-6 * self.gap
        low, high = sorted((self.left, self.right))
        return low - margin <= value <= high + margin


class Samples:
    """The values of a function at steps from zero, each computed once.

    - `fn`: the value at a step; NaN without a value.
    - `eps`: the relative rounding error of a value.
    """

    def __init__(self, fn: Callable[[float], Any], eps: float = _EPS):
        self._known: dict[float, Any] = {}
        self._fn, self.eps = fn, eps

    def __call__(self, h: float) -> Any:
        if h not in self._known:
            self._known[h] = self._fn(h)
        return self._known[h]

    def central(self, h: float) -> Any:
        return (self(h) - self(-h)) / (2 * h)

    def richardson(self, h: float) -> Any:
        return (4 * self.central(h / 2) - self.central(h)) / 3

    def rounding(self, h: float) -> float:
        """The error of a slope with this step that rounding explains."""
        return _ULPS * self.eps * max(size_of(self(0.0)), size_of(self(h))) / abs(h)


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
    """The same slope, unless shorter steps show another one: a function that oscillates, turns
    close to zero, or has many small kinks, has the slope of an average in long steps."""

    def error(shorter):  # relative to both: beyond a kink, the slope may be zero
        return shorter.error / max(size_of(shorter.value), size_of(slope.value))

    others = [
        shorter
        for shorter in _estimates(samples, [2.0**-k for k in _ALL])
        if not shorter.step >= slope.step
        and size_of(shorter.value - slope.value) > _AGREE * (shorter.error + slope.error)
        # In the shortest steps, rounded values are equal.
        and (error(shorter) if shorter.step >= 2.0**-20 else shorter.relative_error) <= _PLATEAU
    ]
    # Between two kinks, there may be others in still shorter steps.
    return confirmed_slope(samples, min(others, key=error)) if others else slope


def is_settled(samples: Samples, slope: Slope) -> bool:
    """Whether a slope is evidence against another one.

    Steps of other lengths have the same slope. In a function with noise, or one that turns
    within the shortest step, a few steps agree by chance and not again.
    """
    if slope.relative_error > _PLATEAU and slope.error > 4 * samples.rounding(slope.step):
        return False  # zero, but for changes that are no rounding errors
    with np.errstate(all="ignore"):
        found = [samples.richardson(factor * slope.step) for factor in _OTHER_STEPS]
    # NaN is not agreement.
    return all(abs(x - slope.value) <= _AGREE * slope.error for x in found)


def _estimates(samples: Samples, steps: list[float]) -> list[Slope]:
    """A slope for each step but the first and the last, if the values there are finite."""
    slopes = []
    with np.errstate(all="ignore"):
        found = [samples.richardson(h) for h in steps]
        for i in range(1, len(steps) - 1):
            triple = found[i - 1 : i + 2]
            gaps = (size_of(a - b) for a, b in itertools.combinations(triple, 2))
            error = max(gaps, key=lambda x: (math.isnan(x), x)) + samples.rounding(steps[i])
            if math.isfinite(error):
                slopes.append(Slope(found[i], error, steps[i]))
    return slopes


def _best(slopes: list[Slope]) -> Slope:
    # Where a function oscillates, the absolute error of a long step is small: so is its slope.
    good = [slope for slope in slopes if slope.relative_error <= _PLATEAU]
    if good:
        return min(good, key=lambda slope: slope.relative_error)
    return min(slopes, key=lambda slope: slope.error)


def sides_of(samples: Samples) -> Sides:
    """The slopes on both sides: of short steps, extrapolated to zero.

    A kink that is one of many is seen in still shorter steps only. They are taken then.
    """
    found = [Sides(math.nan, math.nan, math.inf)]
    for h in (2.0**-k for k in range(8, 34)):
        left, right = _side(samples, -h), _side(samples, h)
        if math.isfinite(error := left.error + right.error):
            found.append(Sides(left.value, right.value, error, h))
    best = min(found, key=lambda s: s.error)
    kinks = [s for s in found if s.step < best.step and s.gap > best.gap + 100 * s.error]
    return min(kinks, key=lambda s: s.error, default=best)


def one_sided_slope(samples: Samples) -> Slope:
    """The slope on a side where the function is defined, if it is not on the other one."""
    steps = (sign * 2.0**-k for k in range(_LONGEST, 34) for sign in (1, -1))
    found = [slope for h in steps if math.isfinite((slope := _side(samples, h)).error)]
    return min(found, key=lambda s: s.error, default=Slope(math.nan, math.inf))


def _side(samples: Samples, h: float) -> Slope:
    with np.errstate(all="ignore"):
        one, half, quarter = ((samples(x) - samples(0.0)) / x for x in (h, h / 2, h / 4))
        coarse, fine = 2 * half - one, 2 * quarter - half
        return Slope(fine, size_of(fine - coarse) + 4 * samples.rounding(h), h)
