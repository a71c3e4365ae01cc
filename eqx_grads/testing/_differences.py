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
from ._compare import as_double, norm, size_of, size_of_all
from ._outcome import outcome, raised
from ._slope import central_slope, one_sided_slope, Samples, Slope
from ._subject import double_precision, FlatFunction


_TRUSTED = 1e-3  # the largest error of differences that are a reference, relative to them
_ZERO = 1e-5  # or relative to the values: a smaller derivative may be zero


class FailsNearby(ValueError):
    """Differences are not possible: the function raises an error at arguments close by."""


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
) -> Difference:
    """The derivative of `fn` along `tangents`, which should be about as large as the leaves.

    - `rounded_to`: the dtype that the values are rounded to, if that is not their own.

    Raises `FailsNearby` if `fn` raises an error wherever the leaves are moved.
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
        slope = _slope(Samples(at, eps))
        if all(np.array_equal(values[i], x) for values in known.values()):
            slope = Slope(0 * x, 0.0)  # what does not change at all has no error
        slopes.append(slope)
    finite = [xs for xs in known.values() if np.isfinite(size_of_all(xs))]
    is_moved = lambda xs: not all(map(np.array_equal, xs, known[0.0]))
    if errors and not any(map(is_moved, finite)):
        raise FailsNearby(f"the function raises nearby: {raised(errors[-1])[0]}")
    found = [np.broadcast_to(s.value, x.shape) for s, x in zip(slopes, known[0.0], strict=True)]
    error = size_of_all(s.error for s in slopes)
    least = max(_TRUSTED * size_of_all(found), _ZERO * size_of_all(known[0.0]), 1e-300)
    is_trusted = bool(error <= least)
    why = "" if is_trusted else "the function is not smooth here, or too rough for differences"
    if why and len(finite) < 2:
        why = "the function is not finite at arguments close by"
    return Difference(found, [s.error for s in slopes], is_trusted, is_rounded, why)


def _slope(samples: Samples) -> Slope:
    with np.errstate(all="ignore"):
        rough = samples.central(2.0**-10)
    size = size_of(np.where(np.isfinite(rough), rough, 0))
    slope = central_slope(samples, max(size, 1e-4 * size_of(samples(0.0))), accuracy=1e-8)
    return slope if np.isfinite(slope.error) else one_sided_slope(samples)


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
    size = size_of(here)
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
            jacobian = np.zeros((*np.shape(out[0]), leaf.size))
            for i, x in enumerate(leaf.ravel()):
                tangents = [np.zeros(x.shape) for x in subject.leaves]
                tangents[number].flat[i] = scale = abs(float(x)) or 1.0
                (column,), *_ = directional(subject.arrays, subject.leaves, tangents)
                jacobian[..., i] = column / scale
            jacobians.append(jacobian.reshape((*np.shape(out[0]), *leaf.shape)))
    return jacobians[0] if len(jacobians) == 1 else jacobians
