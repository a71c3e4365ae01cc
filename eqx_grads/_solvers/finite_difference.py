"""The Jacobian of NumPy code by central differences or by complex steps."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .host_callback import read_only


Run = Callable[[list[np.ndarray]], list[Any]]


def central_differences(
    run: Run, leaves: Sequence[np.ndarray], i: int, rank: int, step: float
) -> list[list[Any]]:
    r"""The derivatives of the outputs of `run` with respect to each element of `leaves[i]`.

    An element $x$ is moved by $\pm h$ with $h = \mathrm{step} \cdot \max(|x|, 1)$, in all
    members of a batch at once: `rank` is the number of axes behind those of the batch. The
    differences are divided by how far the element really moved, which rounding decides. For a
    complex leaf the elements are moved along the real axis, and then along the imaginary one.

    Returns a list with one entry for each element: the list of the outputs' derivatives.
    """
    x = leaves[i]
    columns = []
    for direction in (1.0, 1.0j) if np.iscomplexobj(x) else (1.0,):
        for k in range(_n_elements(x, rank)):
            value = _elements(x, rank)[..., k]
            h = np.asarray(step * np.maximum(np.abs(value), 1) * direction).astype(x.dtype)
            above, up = _moved(x, rank, k, h)
            below, down = _moved(x, rank, k, -h)
            distance = ((above - below) / direction).real.astype(np.float64)
            outs = zip(_run_at(run, leaves, i, up), _run_at(run, leaves, i, down), strict=True)
            columns.append([_quotient(a, b, distance) for a, b in outs])
    return columns


def complex_steps(run: Run, leaves: Sequence[np.ndarray], i: int, rank: int) -> list[list[Any]]:
    r"""As `central_differences`, by $\mathrm{Im} f(x + \mathrm{i} h) / h$ with a tiny $h$.
    Nothing cancels in it, so it is right to rounding, if `run` is analytic."""
    x = leaves[i]
    # Far below the resolution of the dtype, and far above the smallest number.
    h = float(jnp.finfo(x.dtype).tiny) ** 0.5  # NumPy does not know bfloat16
    moved = x.astype(np.complex128 if x.dtype == np.float64 else np.complex64)
    columns = []
    for k in range(_n_elements(x, rank)):
        _, there = _moved(moved, rank, k, np.asarray(1j * h, moved.dtype))
        columns.append([_imaginary(out, h) for out in _run_at(run, leaves, i, there)])
    return columns


class NotComplex(Exception):
    """The function returned a real array for a complex argument."""


def _elements(x, rank):
    return x.reshape((*x.shape[: x.ndim - rank], -1))


def _n_elements(x, rank) -> int:
    return int(np.prod(x.shape[x.ndim - rank :], dtype=int))


def _moved(x, rank, k, h):
    """`x` with `h` added to its element number `k`; this element, and all of them."""
    moved = np.array(_elements(x, rank))
    moved[..., k] += h
    element = moved[..., k].copy()
    return element, read_only(moved.reshape(x.shape))


def _run_at(run, leaves, i, x):
    leaves = list(leaves)
    leaves[i] = x
    return run(leaves)


def _quotient(above, below, distance: Any):
    above, below = (np.asarray(x) for x in (above, below))
    wide = np.result_type(above.dtype, np.float32)  # not in half precision
    difference = above.astype(wide) - below.astype(wide)
    # The axes of the batch are in front.
    distance = distance.reshape(distance.shape + (1,) * (difference.ndim - distance.ndim))
    return difference / distance.astype(wide)


def _imaginary(out, h):
    if not np.iscomplexobj(out):
        raise NotComplex
    return out.imag / h
