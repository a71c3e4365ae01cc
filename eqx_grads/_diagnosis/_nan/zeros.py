"""Why a cotangent is zero: the linear operation that makes it, run on indicators."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ..._jaxprs.primitives import linear_operands, MULTILINEAR
from ..carried import outward, Place
from ..pairs import is_inexact
from .derivative import Derivative


# Why a cotangent is zero. If several zeros are added, the last of these is the reason.
ALIVE, HEALED, UNUSED, NOT_SELECTED, FACTOR, VALUE, CANCELS = range(7)


def labels_of(labels: Any) -> list[int]:
    return [] if labels is None else [int(i) for i in np.unique(labels) if i]


def labels_of_all(x: Any, labels: Any) -> Any:
    """A label for each element of an array; 0 if there are no labels."""
    return np.zeros(np.shape(x), np.int32) if labels is None else labels


class Stopped(Exception):
    """The evaluation ends here: the time is over, or a check in the program raised an error."""


@dataclasses.dataclass(frozen=True)
class Zero:
    """Where a cotangent became zero, and why."""

    why: int
    place: Place | None


class Zeros:
    """The zeros of a derivative, each with a number.

    - `bind`: what an equation computes for arrays.
    """

    def __init__(self, derivative: Derivative, bind: Callable[..., Any]):
        self._derivative, self._bind = derivative, bind
        self.found: list[Zero] = [Zero(ALIVE, None)]
        self._numbers: dict[Any, int] = {}

    def number(self, why: int, place: Place | None) -> int:
        key = (why, *((id(p.eqn), p.step) for p in outward(place)))
        if key not in self._numbers:
            self._numbers[key] = len(self.found)
            self.found.append(Zero(why, place))
        return self._numbers[key]

    def of_cotangent(self, place, values, k, a):
        """For each element of a cotangent that is zero the number of its `Zero`: by running the
        same linear operation on indicators."""
        if np.all(a != 0):
            return np.zeros(a.shape, np.int32)
        eqn = place.eqn
        reached = lambda of, factors: reach(eqn, values, k, of, self._bind, factors)
        alive = lambda v: np.asarray(v.x) != 0
        met = reached(alive, ONES)
        multiplied = reached(alive, SIZES)
        numbers = np.zeros(a.shape, np.int32)
        # A slice takes the others in any case, and a selection decides it by a value.
        unused = UNUSED if linear_operands(eqn) is not None else NOT_SELECTED
        why_of_factor = self._why_of_factor(place, values)
        of_factor = SIZES if why_of_factor == NOT_SELECTED else ONES
        used = reached(lambda v: np.ones(np.shape(v.x), bool), of_factor)  # whatever comes here
        if (used & ~met).any():  # only zeros come here
            self._by_label(values, numbers, lambda of: reached(of, ONES))
        # In this order: a later reason holds where an earlier one does.
        reasons = (
            (~used | (numbers == 0), unused),
            (used & met, why_of_factor),
            (multiplied, CANCELS),
        )
        for where, why in reasons:
            if where.any():
                numbers[where] = self.number(why, place)
        return np.where(a == 0, numbers, 0)

    def _by_label(self, values, into, reached):
        """Write, for each element, the number of the zero that reaches it."""
        labels = {i for v in values if v.is_ct for i in labels_of(v.zero)}
        for label in sorted(labels, key=lambda i: (self.found[i].why, -i)):
            into[reached(lambda v, i=label: labels_of_all(v.x, v.zero) == i)] = label

    def met(self, place, values, k, labels):
        """Write, for each element, the number of the zero that met an infinity or NaN there."""
        reached = lambda of: reach(place.eqn, values, k, of, self._bind, BAD)
        self._by_label(values, labels, reached)
        is_product = place.eqn.primitive.name in MULTILINEAR
        if is_product and self._why_of_factor(place, values) == NOT_SELECTED:
            labels[labels == 0] = self.number(NOT_SELECTED, place)  # an infinity meets a zero

    def _why_of_factor(self, place, values) -> int:
        """A factor is zero: it depends on the model, or the user multiplies by a mask, or it is
        how JAX selects an element."""
        if any(v.is_active for v in values if not v.is_ct):
            return VALUE
        origin = self._derivative.origin(place)
        is_users = origin is None or origin.primitive in MULTILINEAR
        return FACTOR if is_users else NOT_SELECTED


# The factors, if it is asked what the cotangents reach: ones, their sizes, or ones where they
# are not finite.
ONES, SIZES, BAD = range(3)


def reach(eqn, values, k, of, bind, factors):
    """Which elements of an output are reached by elements of the cotangents: the operation is
    run on ones for these.

    - `of`: which elements of a cotangent.
    """
    is_product = eqn.primitive.name in MULTILINEAR
    linear = linear_operands(eqn)

    def factor(i, v):
        if not is_product and (linear is None or i in linear):
            return np.zeros(np.shape(v.x))  # a term
        size = np.abs(np.asarray(v.truth))
        is_finite = np.isfinite(size)
        if is_product and factors == BAD and not is_finite.all():
            return ~is_finite
        if is_product and factors != SIZES:
            return np.ones(np.shape(v.x))
        return np.where(is_finite, size, np.ones_like(size))

    xs = [
        v.x
        if not is_inexact(v.x)
        else np.asarray(of(v) if v.is_ct else factor(i, v), v.x.dtype)
        for i, v in enumerate(values)
    ]
    try:
        return np.asarray(bind(eqn, xs)[k]) != 0
    except (TypeError, ValueError, Stopped):
        return np.ones(eqn.outvars[k].aval.shape, bool)
