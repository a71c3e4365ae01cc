"""Why an element of a cotangent, or of a value, is zero or a constant."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import bind
from ..._jaxprs.primitives import linear_operands, MULTILINEAR
from .replay import Frame, is_inexact
from .trace_back import (
    element,
    elements_of,
    Index,
    indices,
    is_nonfinite,
    is_zero,
    origin_of_value,
    Spot,
)


_LIMIT = 400  # elements that are looked at
_MOST_TERMS = 8  # of a sum

# Why an element of a cotangent is zero.
NOT_SELECTED = "not selected"
FACTOR = "multiplied by zero"
CANCELS = "sum that cancels"
UNDERFLOWS = "underflow"
REPLACED = "replaced"  # it was bad, see `replay.py`
BOUND = "bound"  # that of a constant that a selection takes, after this cotangent


@dataclasses.dataclass(frozen=True)
class Zero:
    """Where an element of a cotangent becomes zero, and why."""

    spot: Spot
    why: str


def sources_of_zero(
    frame: Frame, atom: Any, index: Index, is_selection: Callable[[Spot], bool]
) -> list[Zero]:
    """The equations that make an element of a cotangent zero, for which not all that it depends
    on is. In the order in which they are found.

    - `is_selection`: whether an equation is the derivative of an operation that selects, such
        as a maximum. It makes zeros of what it does not select also where zeros arrive.
    """
    todo, seen, found = [(frame, atom, index)], set(), []
    while todo and len(seen) < _LIMIT:
        frame, atom, index = todo.pop(0)
        place = origin_of_value(frame, atom, index, is_zero)
        if not isinstance(place, Spot):
            continue
        key = (id(place.frame), place.position, place.output, place.index)
        if key in seen or place.eqn.outvars[place.output] not in place.frame.node.cotangents:
            continue
        seen.add(key)
        arrived = {
            k: depends
            for k, x in enumerate(place.operands)
            if place.is_cotangent(k)
            and is_inexact(x)
            and (depends := elements_of(place, k)).any()
        }
        if is_selection(place) and _has_zero_factor(place):
            found.append(Zero(place, NOT_SELECTED))
        elif all(is_zero(np.asarray(place.operands[k])[d]).all() for k, d in arrived.items()):
            if not arrived:
                found.append(Zero(place, NOT_SELECTED))
            todo.extend(
                (place.frame, place.eqn.invars[k], index)
                for k, depends in arrived.items()
                # From the first to the last: the zeros of a sum may have several causes.
                for index in indices(depends, _MOST_TERMS)
            )
        elif (why := _why_zero(place)) is not None:
            found.append(Zero(place, why))
    return found


def _why_zero(spot: Spot) -> str | None:
    """Why an element is zero though a cotangent that it depends on is not. `None` if that is
    not known."""
    if is_nonfinite(spot.value):
        return REPLACED
    name = spot.eqn.primitive.name
    is_product = name in MULTILINEAR
    if is_product and not _with_operands(spot, lambda x: x != 0):
        return FACTOR
    if not is_product and name != "convert_element_type" and linear_operands(spot.eqn) is None:
        return None
    return CANCELS if _with_operands(spot, jnp.abs) else UNDERFLOWS


def _has_zero_factor(spot: Spot) -> bool:
    """Whether it is a product that is zero for each cotangent."""
    if spot.eqn.primitive.name != "mul":
        return False
    factors = [x for k, x in enumerate(spot.operands) if not spot.is_cotangent(k)]
    return any(bool(is_zero(element(x, spot.index))) for x in factors)


# What may be between a selection and what uses it.
_LAYOUT = frozenset(
    """
    broadcast_in_dim convert_element_type copy expand_dims reshape squeeze transpose
    """.split()  # noqa: SIM905
)


def selected_constant(spot: Spot, k: int) -> Spot | None:
    """The selection, such as a maximum, that the element of operand `k` comes from, if it takes
    what does not depend on the model there."""
    while True:
        needed = indices(elements_of(spot, k))
        if len(needed) != 1:
            return None
        value = np.asarray(spot.operands[k])[needed[0]]
        is_same = lambda x: np.asarray(x) == value  # noqa: B023
        made = origin_of_value(spot.frame, spot.eqn.invars[k], needed[0], is_same)
        if not isinstance(made, Spot):
            return None
        name = made.eqn.primitive.name
        if name in _LAYOUT:
            taken = [0]
        elif name == "select_n":
            taken = [int(element(made.operands[0], made.index)) + 1]
        elif name in ("max", "min", "clamp"):
            taken = [
                k
                for k in range(len(made.operands))
                if element(made.operands[k], made.index) == made.value
            ]
        else:
            return None
        if not any(made.is_active(k) for k in taken):
            return made if name not in _LAYOUT else None
        if len(taken) > 1:  # equal ones
            return None
        spot, k = made, taken[0]


def _with_operands(spot: Spot, change: Callable[[Any], Any]) -> bool:
    """Whether the element is not zero for operands that are changed, by which none cancels."""
    operands = [
        jnp.asarray(change(x)).astype(x.dtype) if is_inexact(x) else x for x in spot.operands
    ]
    return bool(bind(spot.eqn, operands)[spot.output][spot.index] != 0)
