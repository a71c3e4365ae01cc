"""Finite differences: central, in float64, with Richardson extrapolation.

A long step has a large truncation error, a short step a large rounding error, and the best
step depends on the function. So several steps are tried, and each is extrapolated with its
half. The estimate that changes least from one step to the next is returned. Its error is that
change, and what rounding explains, as two rounded values may be equal by chance. A step to
where the function raises an error, or is not finite, counts for nothing; if all do, there are
differences of one side.

Values that are rounded to float32 are the same at two points that are close to each other, so
that two short steps may agree on a slope of zero. Of a function with such values the rounding
errors are estimated, too, and the steps are longer.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import check_function
from ._compare import as_double, as_real, norm
from ._findings import in_one_line
from ._flat_function import double_precision, FlatFunction


_STEPS = tuple(2.0**-k for k in range(3, 25, 3))
_LONG_STEPS = tuple(2.0**-k for k in range(3, 13))
# Relative to the size of the values of a rounded function: a smaller derivative may be zero.
_SMALL = 1e-2
_NEARBY = 1e-6  # points at this relative distance differ by rounding errors, and linearly
# From one step to the next, which is half as long, the truncation error falls to a 16th.
_LEAST_FALL = 1 / 32

_Function = Callable[..., Sequence[Any]]


class FiniteDifference(NamedTuple):
    """The derivative of a function along a direction.

    - `tangents_out`: the derivative, one array for each output.
    - `error`: the estimated relative error of all arrays together.
    - `rounding`: for each output, the estimated error of the derivative, if the values of the
        function are rounded to a lower precision than float64; otherwise zero.
    """

    tangents_out: list[Any]
    error: float
    rounding: list[float]


def directional(
    fn: _Function, leaves: Sequence[Any], tangents: Sequence[Any], rounded_to: Any = None
) -> FiniteDifference:
    """The derivative of `fn` along `tangents`.

    The steps are fractions of `tangents`, which should be about as large as the leaves.

    - `rounded_to`: the dtype that the values of `fn` are rounded to, if that is known. It is
        seen in the values if all of them are numbers in float32.

    Raises `FailsNearby` if `fn` raises an error for every step.
    """
    if rounded_to is None:
        recorded = _Recorded(fn)
        found = _of_smooth(recorded, leaves, tangents)
        if not recorded.is_single:
            return found
        rounded_to = np.float32
    return _of_rounded(fn, leaves, tangents, float(jnp.finfo(rounded_to).eps))


class _Recorded:
    """A function that knows whether all of its values were numbers in float32."""

    def __init__(self, fn: _Function):
        self._fn = fn
        self._values: list[list[np.ndarray]] = []

    def __call__(self, *xs) -> Sequence[Any]:
        out = self._fn(*xs)
        self._values.append([as_real(x) for x in out])
        return out

    @property
    def sizes(self) -> list[float]:
        """The norm of each value, at a point where all are finite."""
        found = ([norm(x) for x in xs] for xs in self._values)
        return next(filter(lambda sizes: np.all(np.isfinite(sizes)), found), [])

    @property
    def is_single(self) -> bool:
        with np.errstate(over="ignore"):
            fits = all(np.all(x == x.astype(np.float32)) for xs in self._values for x in xs)
        first = self._values[0]
        return fits and any(
            np.any(x != y) for xs in self._values for x, y in zip(first, xs, strict=True)
        )


def _of_smooth(fn, leaves, tangents) -> FiniteDifference:
    estimates, weight = _estimates(fn, leaves, tangents, _STEPS)
    best, error = _first(estimates), float("inf")
    for step, coarse, fine in zip(_STEPS[1:], estimates, estimates[1:], strict=False):
        if coarse is None or fine is None:
            continue
        gap = _norm([a - b for a, b in zip(coarse, fine, strict=True)])
        # What does not change at all has no rounding errors.
        sizes = [n for n, x in zip(fn.sizes, fine, strict=False) if np.any(x)]
        gap += weight * np.finfo(np.float64).eps * norm(np.array(sizes)) / step
        size = max(_norm(fine), np.finfo(np.float64).tiny)
        change = gap / size if _norm(fine) > 0 else (0.0 if gap == 0 else 1.0)
        if np.isfinite(change) and change < error:
            best, error = fine, change
    return FiniteDifference(best, error, [0.0] * len(best))


def _of_rounded(fn, leaves, tangents, eps: float) -> FiniteDifference:
    sizes, errors = _sizes_and_errors(fn, leaves, eps)
    estimates, weight = _estimates(fn, leaves, tangents, _LONG_STEPS)
    best, of_best = _first(estimates), [float("inf")] * len(sizes)
    before = [0.0] * len(sizes)
    for step, coarse, fine in zip(_LONG_STEPS[1:], estimates, estimates[1:], strict=False):
        if coarse is None or fine is None:
            continue
        changes = [norm(as_real(a - b)) for a, b in zip(coarse, fine, strict=True)]
        found = [
            max(change, last * _LEAST_FALL) + weight * error / step
            for change, last, error in zip(changes, before, errors, strict=True)
        ]
        before = changes
        if np.all(np.isfinite(found)) and _norm(found) < _norm(of_best):
            best, of_best = fine, found
    size = max(_norm(best), _SMALL * _norm(sizes))
    relative = _norm(of_best) / size if size > 0 else 0.0
    return FiniteDifference(best, relative, of_best)


def _sizes_and_errors(fn, leaves, eps: float) -> tuple[list[float], list[float]]:
    """The norm of each value of a function, and of its rounding error: at least that of the
    value itself, and more if rounded numbers have canceled."""
    signs = [np.where(np.arange(x.size) % 3 == 1, -1.0, 1.0).reshape(x.shape) for x in leaves]
    at = lambda k: [x * (1 + k * _NEARBY * s) for x, s in zip(leaves, signs, strict=True)]
    sizes = [norm(as_real(x)) for x in fn(*leaves)]
    try:
        values = [[as_real(x) for x in fn(*at(k))] for k in range(-2, 3)]
    except Exception:  # an edge of where it is defined
        values = []
    errors = [eps * size for size in sizes]
    for before, here, after in zip(values, values[1:], values[2:], strict=False):
        middle = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
        gaps = [2 * norm(x - y) for x, y in zip(here, middle, strict=True)]
        errors = [max(e, gap) for e, gap in zip(errors, gaps, strict=True)]
    return sizes, errors


def _estimates(fn, leaves, tangents, steps) -> tuple[list[Any], float]:
    """The derivative by each of the steps, with `None` for a step to where the function raises
    an error, and the weight of an error of the values.

    Central differences; those of one side where the other one is out of bounds.
    """
    of_center, error = [], None
    for difference, weight in _DIFFERENCES:
        found = []
        for step in steps:
            try:
                found.append(_richardson(difference, fn, leaves, tangents, step))
            except Exception as e:
                if error is None:
                    fn(*leaves)  # it may raise that anywhere
                error = e
                found.append(None)
        works = [x is not None and np.isfinite(_norm(x)) for x in found]
        if any(map(all, itertools.pairwise(works))):
            return found, weight
        of_center = of_center or found
    if error is not None and not any(x is not None for x in of_center):
        raise _fails_nearby(error, steps[-1]) from error
    return of_center, _DIFFERENCES[0][1]


class FailsNearby(ValueError):
    """There are no differences, as the function raises an error at arguments close by."""


def _fails_nearby(error: Exception, step: float) -> FailsNearby:
    kind, _, message = in_one_line(error).partition(": ")
    text = f"the function raises {kind} at arguments that are moved by {step:.0e} of their size"
    return FailsNearby(f"{text}: {message}" if message else text)


def _first(estimates):
    return next(x for x in estimates if x is not None)


def _richardson(difference, fn, leaves, tangents, step):
    full = difference(fn, leaves, tangents, step)
    half = difference(fn, leaves, tangents, step / 2)
    with np.errstate(invalid="ignore", over="ignore"):
        return [(4 * h - f) / 3 for f, h in zip(full, half, strict=True)]


def _moved(fn, leaves, tangents, step):
    return [as_double(x) for x in fn(*_along(leaves, tangents, step))]


def _along(leaves, tangents, step):
    return [x + step * t for x, t in zip(leaves, tangents, strict=True)]


def _central(fn, leaves, tangents, step):
    ahead = _moved(fn, leaves, tangents, step)
    behind = _moved(fn, leaves, tangents, -step)
    with np.errstate(invalid="ignore", over="ignore"):
        return [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


def _one_sided(fn, leaves, tangents, step):
    """Of second order, as a central one; behind for a negative step."""
    here, near, far = (_moved(fn, leaves, tangents, k * step) for k in range(3))
    with np.errstate(invalid="ignore", over="ignore"):
        return [
            (4 * y - z - 3 * x) / (2 * step) for x, y, z in zip(here, near, far, strict=True)
        ]


def _behind(fn, leaves, tangents, step):
    return _one_sided(fn, leaves, tangents, -step)


# With what an error of each value is multiplied with, if the step is one.
_DIFFERENCES = ((_central, 1.5), (_one_sided, 12.0), (_behind, 12.0))


def _norm(xs) -> float:
    return norm(np.array([norm(as_real(x)) for x in xs]))


def numerical_jacobian(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The Jacobian by finite differences: central, in float64, with Richardson extrapolation.

    It uses neither rules nor autodiff. It calls `fn` 32 times for each entry of the arguments.
    At the edge of where `fn` is defined, the differences are of one side.

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

    A `TypeError` if a leaf is complex, or if `fn` does not return one array; a `ValueError` if
    `fn` raises an error at all arguments close by.
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
            columns = []
            for i in range(leaf.size):
                tangents = [np.zeros(x.shape) for x in subject.leaves]
                scale = abs(float(leaf.ravel()[i])) or 1.0
                tangents[number].ravel()[i] = scale
                (column,), *_ = directional(subject.arrays, subject.leaves, tangents)
                columns.append(column / scale)
            shape = (*np.shape(out[0]), *leaf.shape)
            empty = np.zeros((*np.shape(out[0]), 0))
            stacked = np.stack(columns, -1) if columns else empty
            jacobians.append(stacked.reshape(shape))
    return jacobians[0] if len(jacobians) == 1 else jacobians
