"""Finite differences: central, in float64, with Richardson extrapolation.

A long step has a large truncation error, a short step a large rounding error, and the best
step depends on the function. So several steps are tried, and each is extrapolated with its
half. The estimate that changes least from one step to the next is returned, with that change as
its error.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import check_function
from ._compare import as_real, norm
from ._flat_function import double_precision, FlatFunction


_STEPS = tuple(2.0**-k for k in range(3, 25, 3))


def directional(
    fn: Callable[..., Sequence[Any]], leaves: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], float]:
    """The derivative of `fn` along `tangents`, and its estimated relative error.

    The steps are fractions of `tangents`, which should be about as large as the leaves.
    """
    estimates = [_richardson(fn, leaves, tangents, step) for step in _STEPS]
    best, error = estimates[0], float("inf")
    for coarse, fine in itertools.pairwise(estimates):
        gap = _norm([a - b for a, b in zip(coarse, fine, strict=True)])
        size = max(_norm(fine), np.finfo(np.float64).tiny)
        change = gap / size if _norm(fine) > 0 else (0.0 if gap == 0 else 1.0)
        if np.isfinite(change) and change < error:
            best, error = fine, change
    return best, error


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
            (np.asarray(a) - np.asarray(b)) / (2 * step)
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
                (column,), _ = directional(subject.arrays, subject.leaves, tangents)
                columns.append(column / scale)
            shape = (*np.shape(out[0]), *leaf.shape)
            empty = np.zeros((*np.shape(out[0]), 0))
            stacked = np.stack(columns, -1) if columns else empty
            jacobians.append(stacked.reshape(shape))
    return jacobians[0] if len(jacobians) == 1 else jacobians
