"""Finite differences, in float64, with an error estimate. They use no rule.

A long step has a large truncation error, a short step a large rounding error. So steps of many
lengths are tried, each extrapolated with its half (Richardson). The slope is where three such
estimates in a row agree best, and their disagreement is its error. Where steps of other lengths
disagree with it, it is not the slope of a smooth function.
"""

import functools as ft
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import check_function, first_line, rule_error
from ._compare import as_double, norm, size_of_all
from ._outcome import outcome, raised
from ._subject import double_precision, FlatFunction


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
_TRUSTED = 1e-3  # the largest error of differences that are a reference, relative to them
_ZERO = 1e-5  # or relative to the values: a smaller derivative may be zero


class Slope(NamedTuple):
    """- `value`, `error`: the slope, and an estimate of its absolute error.
    - `step`: the step that they are from.
    """

    value: Any
    error: float
    step: float = math.nan

    @property
    def relative_error(self) -> float:
        size = norm(self.value)
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


_NO_SLOPE = Slope(math.nan, math.inf)


class Samples:
    """The values of a function at steps from zero, each computed once, and its slope.

    - `fn`: the value at a step, a number or an array; NaN without a value.
    - `eps`: the relative rounding error of a value.
    """

    def __init__(self, fn: Callable[[float], Any], eps: float = _EPS):
        self._fn, self.eps = ft.cache(fn), eps

    def __call__(self, h: float) -> Any:
        return self._fn(h)

    @np.errstate(all="ignore")
    def central(self, h: float) -> Any:
        return (self(h) - self(-h)) / (2 * h)

    @np.errstate(all="ignore")
    def richardson(self, h: float) -> Any:
        return (4 * self.central(h / 2) - self.central(h)) / 3

    def rounding(self, h: float) -> float:
        """The error of a slope with this step that rounding explains."""
        return _ULPS * self.eps * max(norm(self(0.0)), norm(self(h))) / abs(h)

    def slope(self, size: float, accuracy: float = 1e-7) -> Slope:
        """The slope of a function that may be differentiated at zero; on one side, where it is
        not finite on the other.

        - `size`: what the error is relative to. With a relative `accuracy`, no more steps are
            tried.
        """
        best = _NO_SLOPE
        for exponents in (range(9, 12), range(5, 8), _ALL):
            found = [best, *self._slopes(exponents)]
            # Where a function oscillates, the absolute error of a long step is small: so is its
            # slope.
            good = [slope for slope in found if slope.relative_error <= _PLATEAU]
            size_of_error = "relative_error" if good else "error"
            best = min(good or found, key=operator.attrgetter(size_of_error))
            if best.error <= accuracy * size:
                break
        return best if math.isfinite(best.error) else self._one_sided()

    @np.errstate(all="ignore")
    def _slopes(self, exponents: Sequence[int]) -> list[Slope]:
        """A slope for each step but the first and the last, if the values there are finite."""
        steps = [2.0**-k for k in exponents]
        found, slopes = [self.richardson(h) for h in steps], []
        for i in range(1, len(steps) - 1):
            gaps = [norm(a - b) for a, b in itertools.combinations(found[i - 1 : i + 2], 2)]
            error = float(np.max(gaps)) + self.rounding(steps[i])  # NaN if one is
            slopes += [Slope(found[i], error, steps[i])] * math.isfinite(error)
        return slopes

    def confirmed(self, slope: Slope) -> Slope:
        """The same slope, unless shorter steps show another one: a function that oscillates,
        turns close to zero, or has many small kinks, has the slope of an average in long steps.
        """

        def error(shorter):  # relative to both: beyond a kink, the slope may be zero
            return shorter.error / max(norm(shorter.value), norm(slope.value))

        others = [
            shorter
            for shorter in self._slopes(_ALL)
            if not shorter.step >= slope.step
            and norm(shorter.value - slope.value) > _AGREE * (shorter.error + slope.error)
            # In the shortest steps, rounded values are equal.
            and (error(shorter) if shorter.step >= 2.0**-20 else shorter.relative_error)
            <= _PLATEAU
        ]
        # Between two kinks, there may be others in still shorter steps.
        return self.confirmed(min(others, key=error)) if others else slope

    def is_settled(self, slope: Slope) -> bool:
        """Whether a slope is evidence against another one.

        Steps of other lengths have the same slope. In a function with noise, or one that turns
        within the shortest step, a few steps agree by chance and not again.
        """
        if slope.relative_error > _PLATEAU and slope.error > 4 * self.rounding(slope.step):
            return False  # zero, but for changes that are no rounding errors
        is_central = math.isfinite(norm(self.richardson(slope.step)))
        slope_with = self.richardson if is_central else lambda h: self._side(h).value
        found = [slope_with(factor * slope.step) for factor in _OTHER_STEPS]
        # NaN is not agreement.
        return all(abs(x - slope.value) <= _AGREE * slope.error for x in found)

    @ft.cached_property
    def sides(self) -> Sides:
        """The slopes on both sides: of short steps, extrapolated to zero.

        A kink that is one of many is seen in still shorter steps only. They are taken then.
        """
        found = [Sides(math.nan, math.nan, math.inf)]
        for h in (2.0**-k for k in range(8, 34)):
            left, right = self._side(-h), self._side(h)
            if math.isfinite(error := left.error + right.error):
                found.append(Sides(left.value, right.value, error, h))
        best = min(found, key=lambda s: s.error)
        kinks = [s for s in found if s.step < best.step and s.gap > best.gap + 100 * s.error]
        return min(kinks, key=lambda s: s.error, default=best)

    def _one_sided(self) -> Slope:
        found = [self._side(s * 2.0**-k) for k in range(_LONGEST, 34) for s in (1, -1)]
        finite = [slope for slope in found if math.isfinite(slope.error)]
        return min(finite, key=lambda slope: slope.error, default=_NO_SLOPE)

    @np.errstate(all="ignore")
    def _side(self, h: float) -> Slope:
        one, half, quarter = ((self(x) - self(0.0)) / x for x in (h, h / 2, h / 4))
        coarse, fine = 2 * half - one, 2 * quarter - half
        return Slope(fine, norm(fine - coarse) + 4 * self.rounding(h), h)


class Difference(NamedTuple):
    """The derivative of a function along a direction.

    - `tangents_out`, `errors`: the derivative of each output, and its estimated absolute error.
    - `is_rounded`: whether the values of the function are rounded to less than float64.
    - `why`: why the errors are too large for a reference; empty if they are not.
    - `bends`: whether there may be a kink.
    """

    tangents_out: list[Any]
    errors: list[float]
    is_rounded: bool = False
    why: str = ""
    bends: bool = False


def directional(
    fn: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    tangents: Sequence[Any],
    rounded_to: Any = None,
) -> Difference:
    """The derivative of `fn` along `tangents`, which should be about as large as the leaves.

    - `rounded_to`: the dtype that the values are rounded to, if that is not their own.

    Raises a `ValueError` if `fn` raises an error wherever the leaves are moved.
    """
    here = [np.asarray(x) for x in fn(*leaves)]
    known: dict[float, list[np.ndarray]] = {0.0: list(map(as_double, here))}
    errors: list[Exception] = []

    def values_at(h):
        if h not in known:
            out = outcome(fn, *(x + h * t for x, t in zip(leaves, tangents, strict=True)))
            if isinstance(out, Exception):
                errors.append(out)
                out = [x * np.nan for x in known[0.0]]
            known[h] = list(map(as_double, out))
        return known[h]

    slopes, is_rounded = [], False
    for i, x in enumerate(known[0.0]):
        at = lambda h, i=i: values_at(h)[i]
        eps = float(jnp.finfo(rounded_to or here[i].dtype).eps)
        if eps > np.finfo(float).eps:
            eps, is_rounded = max(eps, _grain(at)) / 8, True
        samples = Samples(at, eps)
        rough = samples.central(2.0**-10)
        size = norm(np.where(np.isfinite(rough), rough, 0))
        slope = samples.slope(max(size, 1e-4 * norm(x)), accuracy=1e-8)
        if all(np.array_equal(values[i], x) for values in known.values()):
            slope = Slope(0 * x, 0.0)  # what does not change at all has no error
        slopes.append(slope)
    finite = [xs for xs in known.values() if np.isfinite(size_of_all(xs))]
    is_moved = lambda xs: not all(map(np.array_equal, xs, known[0.0]))
    if errors and not any(map(is_moved, finite)):
        raise ValueError(f"the function raises nearby: {raised(errors[-1])[0]}")
    found = [np.broadcast_to(s.value, x.shape) for s, x in zip(slopes, known[0.0], strict=True)]
    error = size_of_all(s.error for s in slopes)
    least = max(_TRUSTED * size_of_all(found), _ZERO * size_of_all(known[0.0]))
    why = "the function is not smooth here, or too rough for differences"
    if len(finite) < 2:
        why = "the function is not finite at arguments close by"
    why = "" if error <= least else why
    both = lambda h: zip(values_at(h), values_at(-h), known[0.0], strict=True)
    bend = lambda h: size_of_all(a + b - 2 * x for a, b, x in both(h))
    # A kink bends by half for half the step, and a smooth function by a quarter.
    bends = bend(2.0**-11) > 0.4 * bend(2.0**-10)
    return Difference(found, [s.error for s in slopes], is_rounded, why, bends)


def _grain(at: Callable[[float], np.ndarray]) -> float:
    """How far rounded values are apart, relative to them: each value's first change, for steps
    that grow. It is more than their dtype says where larger numbers have canceled."""
    here = at(0.0)
    grain = np.zeros(here.shape)
    for h in (2.0**-k for k in range(26, 14, -2)):
        with np.errstate(all="ignore"):
            gaps = np.abs(np.diff(np.stack([at(k * h) for k in range(-2, 3)]), axis=0))
        change = np.max(np.where(np.isfinite(gaps), gaps, 0), axis=0)
        grain = np.where(grain == 0, change, grain)
        if np.all(grain > 0):
            break
    size = norm(here)
    return norm(grain) / size if size else 0.0


def numerical_jacobian(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute the Jacobian by finite differences: central, in float64, with Richardson
    extrapolation.

    It uses neither rules nor autodiff. For each entry of the arguments, it calls `fn` 9 times
    if `fn` is smooth there, and up to 180 times if not. At the edge of its domain, the
    differences are one-sided.

    !!! example

        ```python
        import eqx_grads.testing as eqgt
        import jax.numpy as jnp

        jacobian = eqgt.numerical_jacobian(jnp.sin, jnp.array([0.0, 1.0]))
        print(jacobian.round(3))
        ```

        ```text
        [[1.   0.  ]
         [0.   0.54]]
        ```

    **Arguments:**

    - `fn`: any function of arrays that returns one array. It is called with float64 arrays
        (complex128 for complex ones).
    - `*args`: any PyTrees. Floating-point leaves are perturbed; the others are constant.
    - `**kwargs`: passed to `fn` unchanged.

    **Returns:**

    For one perturbed leaf, a float64 NumPy array of shape `out.shape + leaf.shape`; for
    several, a list of such arrays, in the order of `jax.tree.leaves(args)`.

    **Raises:**

    A `TypeError` if a leaf is complex, or if `fn` does not return one array; a `ValueError`
    with the leaf and the entry if `fn` raises an error at all arguments close by.
    """
    check_function(fn, "fn", "numerical_jacobian")
    with double_precision():
        subject = FlatFunction(fn, args, kwargs).in_float64()
        out = jax.tree.leaves(subject.call(subject.leaves))
        if len(out) != 1 or any(jnp.iscomplexobj(x) for x in subject.leaves):
            raise TypeError(
                "`numerical_jacobian` takes functions of real arrays that return one array. "
                f"`{subject.name}` returned {len(out)} leaves. "
                "Wrap it in a function that returns one output, or the real part."
            )
        jacobians = []
        for number, leaf in enumerate(subject.leaves):
            jacobian = np.zeros((*np.shape(out[0]), leaf.size))
            for i, x in enumerate(leaf.ravel()):
                tangents = [np.zeros(x.shape) for x in subject.leaves]
                tangents[number].flat[i] = scale = abs(float(x)) or 1.0
                found = outcome(directional, subject.arrays, subject.leaves, tangents)
                if isinstance(found, Exception):
                    entry = list(map(int, np.unravel_index(i, leaf.shape)))
                    raise rule_error(
                        f"`numerical_jacobian` has no differences of `{subject.name}`.",
                        f"at entry {entry} of {subject.names[number]}: {first_line(found)}",
                        do="Pass arguments that can be moved a little.",
                    ) from found
                jacobian[..., i] = found.tangents_out[0] / scale
            jacobians.append(jacobian.reshape((*np.shape(out[0]), *leaf.shape)))
    return jacobians[0] if len(jacobians) == 1 else jacobians
