"""Finite differences of a function of arrays along a direction, in float64.

They use no rule. Where the function raises an error, or is not finite, on one side, they are of
the other side.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import check_function
from ._compare import as_double, as_real, norm
from ._outcome import in_one_line, outcome
from ._slope import central_slope, one_sided_slope, Samples, Slope
from ._subject import double_precision, FlatFunction


_NEAR = 2.0**-20  # how far `FailsNearby` says that the arguments were moved
_HALF = ("bfloat16", "float16", "float32")
_TRUSTED = 1e-3  # the largest error of differences that are a reference, relative to them
_ZERO = 1e-5  # or relative to the values: a smaller derivative may be zero


class FailsNearby(ValueError):
    """There are no differences: the function raises an error at arguments close by."""


class Difference(NamedTuple):
    """The derivative of a function along a direction.

    - `tangents_out`, `errors`: the derivative of each output, and its estimated absolute error.
    - `is_trusted`: whether the errors are small enough for a reference.
    - `is_rounded`: whether the values of the function are rounded to less than float64.
    - `why`: why it is not trusted.
    """

    tangents_out: list[Any]
    errors: list[float]
    is_trusted: bool
    is_rounded: bool = False
    why: str = ""


def directional(
    fn: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    tangents: Sequence[Any],
    rounded_to: Any = None,
    accuracy: float = 1e-8,
) -> Difference:
    """The derivative of `fn` along `tangents`, which should be about as large as the leaves.

    - `rounded_to`: the dtype that the values are rounded to, if that is known. It is seen if
        all values are numbers of a dtype.

    Raises `FailsNearby` if `fn` raises an error wherever the leaves are moved.
    """
    rounded_to = None if rounded_to is None else str(jnp.dtype(rounded_to))
    known: dict[float, list[np.ndarray]] = {0.0: list(map(as_double, fn(*leaves)))}
    errors: list[Exception] = []

    def values_at(h):
        if h not in known:
            out = outcome(fn, *(x + h * t for x, t in zip(leaves, tangents, strict=True)))
            errors.extend([out] if isinstance(out, Exception) else [])
            is_error = isinstance(out, Exception)
            known[h] = (
                [x * np.nan for x in known[0.0]] if is_error else list(map(as_double, out))
            )
        return known[h]

    slopes, is_rounded = [], False
    for i in range(len(known[0.0])):
        at = lambda h, i=i: values_at(h)[i]
        samples = Samples(lambda steps, at=at: map(at, steps))
        slope = _slope(samples, accuracy)
        values = [x[i] for x in known.values()]
        if _is_rounded_to(values, _HALF[-1]):
            values.append(values_at(_NEAR / 3)[i])  # at the other steps, it may be by chance
        for dtype in _HALF:
            if dtype == rounded_to or _is_rounded_to(values, dtype):
                near = [at(k * _NEAR) for k in range(-2, 3)]
                eps = max(float(jnp.finfo(dtype).eps), 2 * _roughness(near), _grain(at))
                samples.eps, is_rounded = eps / 8, True
                slope = _slope(samples, accuracy)
                break
        if all(np.array_equal(x, values[0]) for x in values):
            slope = Slope(0 * values[0], 0.0)  # what does not change at all has no error
        slopes.append(slope)
    finite = [xs for xs in known.values() if all(np.all(np.isfinite(x)) for x in xs)]
    is_moved = lambda xs: any(np.any(x != y) for x, y in zip(xs, known[0.0], strict=True))
    if errors and not any(map(is_moved, finite)):
        raise _fails_nearby(errors[-1])
    found = [
        np.broadcast_to(np.asarray(s.value), x.shape)
        for s, x in zip(slopes, known[0.0], strict=True)
    ]
    sizes = [norm(np.array([norm(as_real(x)) for x in xs])) for xs in (found, known[0.0])]
    error = norm(np.array([s.error for s in slopes]))
    is_trusted = bool(error <= max(_TRUSTED * sizes[0], _ZERO * sizes[1], 1e-300))
    why = "" if is_trusted else "the function is not smooth here, or too rough for differences"
    if why and not any(len(finite) > 1 and np.all(np.isfinite(x)) for x in found):
        near = [xs for h in (_NEAR, -_NEAR) for xs in values_at(h)]
        is_finite = any(np.all(np.isfinite(x)) for x in near)
        why = why if is_finite else "the function is not finite at arguments close by"
    return Difference(found, [s.error for s in slopes], is_trusted, is_rounded, why)


def _slope(samples: Samples, accuracy: float) -> Slope:
    with np.errstate(all="ignore"):
        rough = as_real(samples.central(2.0**-10))
    size = norm(np.where(np.isfinite(rough), rough, 0))
    size = max(size, 1e-4 * norm(as_real(samples(0.0))))
    slope = central_slope(samples, size, accuracy)
    return slope if np.isfinite(slope.error) else one_sided_slope(samples)


def _roughness(values: Sequence[np.ndarray]) -> float:
    """The rounding error of values that are close together, relative to them."""
    with np.errstate(all="ignore"):
        gaps = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
        sizes = [norm(as_real(x)) for x in (*gaps, values[2])]
    error = max(sizes[:-1])
    return error / sizes[-1] if sizes[-1] and np.isfinite(error) else 0.0


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
    size = norm(as_real(here))
    return norm(grain) / size if size else 0.0


def _real(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x


def _is_rounded_to(values: Sequence[np.ndarray], dtype: str) -> bool:
    """Whether all values are numbers of a dtype, and not all are the same."""
    real = [_real(x[np.isfinite(x)]) for x in values]
    with np.errstate(over="ignore"):
        fits = all(np.all(x == x.astype(jnp.dtype(dtype)).astype(float)) for x in real)
    return fits and any(np.any(x != y) for x, y in itertools.pairwise(values))


def _fails_nearby(error: Exception) -> FailsNearby:
    kind, _, message = in_one_line(error).partition(": ")
    text = (
        f"the function raises {kind} at arguments that are moved by {_NEAR:.0e} of their size"
    )
    return FailsNearby(f"{text}: {message}" if message else text)


def numerical_jacobian(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The Jacobian by finite differences: central, in float64, with Richardson extrapolation.

    It uses neither rules nor autodiff. For each entry of the arguments, it calls `fn` 9 times
    if `fn` is smooth there, and up to 180 times if not. At the edge of where `fn` is defined,
    the differences are of one side.

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
            shape = np.shape(out[0])
            stacked = np.stack(columns, -1) if columns else np.zeros((*shape, 0))
            jacobians.append(stacked.reshape((*shape, *leaf.shape)))
    return jacobians[0] if len(jacobians) == 1 else jacobians
