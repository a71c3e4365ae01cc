"""The rounding error of a function, measured: the part of it that is not smooth."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._compare import difference


_STEP = 1e-6  # relative; the second differences of smooth functions are about its square
_N = 2


def rounding_error(fn: Callable[[list[Any]], list[Any]], leaves: Sequence[Any]) -> float:
    """The relative error of `fn` that rounding explains, from second differences between
    nearby points. Zero where that is not finite."""
    rng = np.random.default_rng(0)
    leaves = [np.asarray(x) for x in leaves]
    signs = [rng.choice([-1.0, 1.0], x.shape) for x in leaves]
    points = [
        fn(
            [
                (x * (1 + k * _STEP * s)).astype(x.dtype)
                for x, s in zip(leaves, signs, strict=True)
            ]
        )
        for k in range(-_N, _N + 1)
    ]
    errors = []
    with np.errstate(all="ignore"):
        for before, here, after in zip(points, points[1:], points[2:], strict=False):
            middle = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
            names = [""] * len(here)
            errors.append(difference(here, middle, names).error)
    return max((e for e in errors if np.isfinite(e)), default=0.0)
