"""The kind of a birth: the experiment that would have made it finite."""

import enum

import numpy as np

from ..._jaxprs.evaluate import bind
from .._programs.pairs import is_inexact
from .values import Birth, is_nonfinite


class Kind(enum.StrEnum):
    DEAD_BRANCH = "dead branch"
    MASKED_PRODUCT = "zero mask"
    ZERO_TIMES_INFINITY = "zero times infinity"
    SINGULARITY = "true singularity"
    INDETERMINATE = "0/0"
    DIFFERENCE = "inf - inf"
    QUOTIENT = "inf / inf"
    DOMAIN = "outside of the domain"
    OVERFLOW = "overflow"
    LARGE = "exceeds the threshold"
    INPUT = "NaN in the input"
    INFINITE_INPUT = "inf in the input"
    INFINITE_CONSTANT = "constant infinity"


def kind_of(birth: Birth) -> Kind:
    if birth.is_large:
        return Kind.LARGE
    if birth.is_outside:
        is_selected = birth.place and birth.place.eqn.primitive.name == "select_n"
        infinite = Kind.INFINITE_CONSTANT if is_selected else Kind.INFINITE_INPUT
        return Kind.INPUT if birth.is_nan else infinite
    if birth.is_nan and any(map(is_nonfinite, birth.xs)):
        return _of_infinities(birth)
    near = np.stack([_again(birth, lambda x, s=s: _moved(x, s)) for s in (1, -1)])
    sides = np.isfinite(near).any(1)
    if birth.is_nan and not birth.is_ct and not sides.all():
        return Kind.DOMAIN
    if sides.any():
        of_numbers = _is_of_numbers(birth)
        return Kind.INDETERMINATE if birth.is_nan and of_numbers else Kind.SINGULARITY
    return Kind.DOMAIN if birth.is_nan else Kind.OVERFLOW


def _is_of_numbers(birth: Birth) -> bool:
    """Whether an element of the output is computed from one of each operand."""
    try:
        return np.broadcast_shapes(*map(np.shape, birth.xs)) == birth.bad.shape
    except ValueError:
        return False


def _of_infinities(birth: Birth) -> Kind:
    """Other factors in the place of zeros, and other signs of the infinities."""
    infinite = [k for k, x in enumerate(birth.xs) if is_nonfinite(x)]
    if not np.isnan(_again(birth, lambda x: np.where(x == 0, np.ones_like(x), x))).all():
        return Kind.ZERO_TIMES_INFINITY
    for k in infinite:
        for change in (np.abs, np.negative):
            if not np.isnan(_again(birth, change, k)).all():
                return Kind.DIFFERENCE
    return Kind.QUOTIENT if len(infinite) > 1 else Kind.DOMAIN


def _moved(x, sign):
    size = np.where(x == 0, 1e-3, 1e-2 * np.abs(x))
    return x + (sign * size * np.random.default_rng(0).uniform(0.5, 1, x.shape)).astype(x.dtype)


def _again(birth: Birth, change, only: int | None = None):
    """The bad elements, with other operands."""
    with np.errstate(all="ignore"):
        xs = [
            np.asarray(change(np.asarray(x)), x.dtype)
            if is_inexact(x) and only in (None, k)
            else x
            for k, x in enumerate(birth.xs)
        ]
        assert birth.place is not None
        return np.asarray(bind(birth.place.eqn, xs)[birth.output])[birth.bad]
