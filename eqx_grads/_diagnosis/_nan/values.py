"""What is carried beside a value in a derivative: births of NaNs and infinities, and zeros."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._programs.pairs import is_inexact
from ..carried import Place


def is_nonfinite(x: Any) -> bool:
    return is_inexact(x) and not np.isfinite(np.asarray(x)).all()


def with_nan(x, nan):
    return np.where(nan, np.asarray(np.nan, jnp.result_type(x)), np.asarray(x))


def union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)


class Stopped(Exception):
    """The evaluation ends here: the time is over, or a check in the program raised an error."""


class Value(NamedTuple):
    """An array without NaNs, and what is carried beside it.

    - `nan`: for each element that is NaN in truth the number of the set of births that made it,
        or 0. `None`: no element is.
    - `infs`: the births of its infinities.
    - `decided`: the births of NaNs that a comparison decided it by.
    - `zero`: for each element of a cotangent the number of the `Zero` that it is, or 0.
    - `is_ct`, `is_active`: whether it depends on the seed, and on the model.
    """

    x: Any
    nan: Any = None
    infs: frozenset[int] = frozenset()
    decided: frozenset[int] = frozenset()
    zero: Any = None
    is_ct: bool = False
    is_active: bool = False

    @property
    def truth(self) -> Any:
        return self.x if self.nan is None else with_nan(self.x, self.nan != 0)

    @property
    def zeros(self) -> Any:
        return np.zeros(np.shape(self.x), np.int32) if self.zero is None else self.zero

    @property
    def nans(self) -> Any:
        return np.zeros(np.shape(self.x), np.int32) if self.nan is None else self.nan


@dataclasses.dataclass
class Birth:
    """Where elements become NaN, infinite, or larger than a threshold.

    - `xs`: the operands. `output`: which output. `bad`: which of its elements.
    - `of`: the births that it is to be blamed on.
    - `is_low`: it is minus infinity, as the logarithm of a probability may be.
    - `zero`: the number of the `Zero` that the cotangent is which is multiplied there, or 0.
    - `is_meant`: an infinity of the data or of a constant, such as a mask of `-inf`.
    - `is_outside`: it is an input of the loss, with this `number`, or a constant.
    """

    place: Place | None
    xs: Sequence[Any]
    output: int
    bad: Any
    is_nan: bool
    of: frozenset[int] = frozenset()
    is_ct: bool = False
    is_large: bool = False
    is_low: bool = False
    zero: int = 0
    is_meant: bool = False
    number: int | None = None
    is_outside: bool = False


def infs_of(x, values: Sequence[Value]) -> frozenset[int]:
    infs = union(v.infs for v in values)
    return infs if infs and np.isinf(np.asarray(x)).any() else frozenset()


def labels_of(labels: Any) -> list[int]:
    return [] if labels is None else [int(i) for i in np.unique(labels) if i]


def calmed(x):
    """An operand with ones where it is infinite."""
    return np.where(np.isfinite(x), x, np.ones_like(x)) if is_nonfinite(x) else x
