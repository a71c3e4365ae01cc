"""Finite differences of a function of arrays along a direction, in float64.

They use no rule. Where the function raises an error, or is not finite, on one side, they are of
the other side.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import check_function
from ._compare import as_double, norm
from ._outcome import in_one_line, outcome
from ._slope import central_slope, one_sided_slope, Samples, Slope
from ._subject import double_precision, FlatFunction


_NEAR = 2.0**-24  # how far `FailsNearby` says that the arguments were moved
_HALF = ("bfloat16", "float16", "float32")
_TRUSTED = 1e-3  # the largest error of differences that are a reference, relative to them
_ZERO = 1e-5  # or relative to the values: a smaller derivative may be zero


class FailsNearby(ValueError):
    """There are no differences: the function raises an error at arguments close by."""


class Difference(NamedTuple):
    """The derivative of a function along a direction.

    - `tangents_out`: the derivative, one array for each output.
    - `error`: its estimated absolute error, in the norm of all outputs.
    - `is_trusted`: whether that is small enough for a reference.
    - `is_rounded`: whether the values of the function are rounded to less than float64.
    - `why`: why it is not trusted.
    """

    tangents_out: list[Any]
    error: float
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

    - `rounded_to`: the dtype that the values are rounded to, if that is known. It is seen if all
        values are numbers of a dtype.

    Raises `FailsNearby` if `fn` raises an error wherever the leaves are moved.
    """
    here = list(map(as_double, fn(*leaves)))
    shapes = [x.shape for x in here]
    size = sum(x.size for x in here)
    errors: list[Exception] = []

    def value_at(h):
        if h == 0:
            return _flat(here)
        pairs = zip(leaves, tangents, strict=True)
        out = outcome(fn, *(x + h * t for x, t in pairs))
        if isinstance(out, Exception):
            errors.append(out)
            return np.full(size, np.nan)
        return _flat(out)

    samples = Samples(lambda steps: map(value_at, steps))
    slope = _slope(samples, accuracy)
    is_rounded = False
    for dtype in _HALF:
        if dtype == rounded_to or _is_rounded_to(samples.values, dtype):
            samples.eps, is_rounded = float(jnp.finfo(dtype).eps) / 8, True
            slope = _slope(samples, accuracy)
            break
    if errors and not np.isfinite(slope.error):
        values = [x for x in samples.values if np.all(np.isfinite(x))]
        if len(values) == 1:
            raise _fails_nearby(errors[-1])
    value = np.broadcast_to(np.asarray(slope.value), (size,))
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    parts = [x.reshape(s) for x, s in zip(np.split(value, ends), shapes, strict=True)]
    trusted = max(_TRUSTED * norm(_real(value)), _ZERO * norm(_real(samples(0.0))))
    is_trusted = bool(slope.error <= max(trusted, 1e-300))
    why = "" if is_trusted else "the function is not smooth here, or too rough for differences"
    near = [samples(sign * _NEAR) for sign in (1, -1)] if why else []
    if why and not any(np.all(np.isfinite(x)) for x in near):
        why = "the function is not finite at arguments close by"
    return Difference(parts, slope.error, is_trusted, is_rounded, why)


def _slope(samples: Samples, accuracy: float) -> Slope:
    rough = (samples(2.0**-10) - samples(-(2.0**-10))) * 2.0**9
    rough = norm(_real(np.where(np.isfinite(rough), rough, 0)))
    slope = central_slope(samples, rough, accuracy)
    return slope if np.isfinite(slope.error) else one_sided_slope(samples)


def _flat(arrays: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(as_double(x).ravel() for x in arrays)])


def _real(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x


def _is_rounded_to(values: Sequence[np.ndarray], dtype: str) -> bool:
    """Whether all values are numbers of a dtype, and not all are the same."""
    real = [_real(x[np.isfinite(x)]) for x in values]
    with np.errstate(over="ignore"):
        fits = all(np.all(x == x.astype(jnp.dtype(dtype)).astype(float)) for x in real)
    return fits and any(np.any(x != y) for x, y in zip(values, values[1:], strict=False))


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
