"""Finite differences: central, in float64, with Richardson extrapolation.

A long step has a large truncation error, a short step a large rounding error, and the best
step depends on the function. So several steps are tried, and each is extrapolated with its
half. The estimate that changes least from one step to the next is returned, with that change as
its error.

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

    def __call__(self, *xs):
        out = self._fn(*xs)
        self._values.append([as_real(x) for x in out])
        return out

    @property
    def is_single(self) -> bool:
        with np.errstate(over="ignore"):
            fits = all(np.all(x == x.astype(np.float32)) for xs in self._values for x in xs)
        first = self._values[0]
        return fits and any(
            np.any(x != y) for xs in self._values for x, y in zip(first, xs, strict=True)
        )


def _of_smooth(fn, leaves, tangents) -> FiniteDifference:
    estimates = [_richardson(fn, leaves, tangents, step) for step in _STEPS]
    best, error = estimates[0], float("inf")
    for coarse, fine in itertools.pairwise(estimates):
        gap = _norm([a - b for a, b in zip(coarse, fine, strict=True)])
        size = max(_norm(fine), np.finfo(np.float64).tiny)
        change = gap / size if _norm(fine) > 0 else (0.0 if gap == 0 else 1.0)
        if np.isfinite(change) and change < error:
            best, error = fine, change
    return FiniteDifference(best, error, [0.0] * len(best))


def _of_rounded(fn, leaves, tangents, eps: float) -> FiniteDifference:
    sizes, errors = _sizes_and_errors(fn, leaves, eps)
    estimates = [_richardson(fn, leaves, tangents, step) for step in _LONG_STEPS]
    best, of_best = estimates[0], [float("inf")] * len(sizes)
    before = [0.0] * len(sizes)
    for step, coarse, fine in zip(_LONG_STEPS[1:], estimates, estimates[1:], strict=False):
        changes = [norm(as_real(a - b)) for a, b in zip(coarse, fine, strict=True)]
        # The weights of the extrapolated difference, times an error in each value.
        found = [
            max(change, last * _LEAST_FALL) + 1.5 * error / step
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
    values = [[as_real(x) for x in fn(*at(k))] for k in range(-2, 3)]
    sizes = [norm(x) for x in values[2]]
    errors = [eps * size for size in sizes]
    for before, here, after in zip(values, values[1:], values[2:], strict=False):
        middle = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
        gaps = [2 * norm(x - y) for x, y in zip(here, middle, strict=True)]
        errors = [max(e, gap) for e, gap in zip(errors, gaps, strict=True)]
    return sizes, errors


def _richardson(fn, leaves, tangents, step):
    full = _central(fn, leaves, tangents, step)
    half = _central(fn, leaves, tangents, step / 2)
    with np.errstate(invalid="ignore", over="ignore"):
        return [(4 * h - f) / 3 for f, h in zip(full, half, strict=True)]


def _central(fn, leaves, tangents, step):
    ahead = fn(*[x + step * t for x, t in zip(leaves, tangents, strict=True)])
    behind = fn(*[x - step * t for x, t in zip(leaves, tangents, strict=True)])
    with np.errstate(invalid="ignore", over="ignore"):
        return [
            (as_double(a) - as_double(b)) / (2 * step)
            for a, b in zip(ahead, behind, strict=True)
        ]


def _norm(xs) -> float:
    return norm(np.array([norm(as_real(x)) for x in xs]))


def numerical_jacobian(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The Jacobian by finite differences: central, in float64, with Richardson extrapolation.

    It uses neither rules nor autodiff. It calls `fn` 32 times for each entry of the arguments.

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

    A `TypeError` if a leaf is complex, or if `fn` does not return one array.
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
