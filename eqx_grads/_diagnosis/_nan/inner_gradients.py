"""A gradient inside of the loss, such as a force, of which a dead branch makes a NaN."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from ..._jaxprs.primitives import JOINTLY_LINEAR
from .sources import (
    array_of,
    followed,
    nonfinite_operands,
    Part,
    sources_of_nonfinite,
    sources_without,
)
from .trace_back import depends_on, element, Elements, indices, is_zero, origin_of_value, Spot


_LIMIT = 200  # elements that are looked at for one cotangent
_MOST_FACTORS = 64  # of one product


def masks_of_sources(parts: Sequence[Part]) -> dict[Any, Spot]:
    """By the keys of what makes the parts not finite, the `where` that drops it, if nothing but
    a gradient in the loss uses it: there it is a factor in the backward pass, of cotangents
    that are zero because of the `where`, or NaN because of such factors."""
    dropped: dict[Any, Any] = {}
    masks: dict[Any, Spot] = {}
    for elements in followed(parts):
        if elements.eqn.primitive.name != "mul" or not _is_backward(elements):
            continue
        first: dict[int, tuple[Spot, Spot]] = {}
        where = np.zeros_like(elements.mask)
        for index in indices(elements.mask)[:_MOST_FACTORS]:
            spot = elements.at(index)
            infinite = [k for k in (0, 1) if np.isinf(element(spot.operands[k], index))]
            mask = _mask_of(spot, 1 - infinite[0], [0]) if infinite else None
            if mask is not None:
                where[index] = True
                first.setdefault(infinite[0], (spot, mask))
        dropped[array_of(elements)] = where
        for k, (spot, mask) in first.items():
            for key in sources_of_nonfinite(nonfinite_operands(spot.alone, [k])):
                masks.setdefault(key, mask)
    others = sources_without(parts, dropped) if masks else {}
    return {key: mask for key, mask in masks.items() if key not in others}


def _is_backward(place: Spot | Elements) -> bool:
    return "transpose(" in str(place.eqn.source_info.name_stack)


def _mask_of(spot: Spot, k: int, n_seen: list[int]) -> Spot | None:
    """The selection in a backward pass because of which a cotangent is zero or NaN."""
    masks = []
    for index in indices(depends_on(spot.alone, k)):
        n_seen[0] += 1
        value = np.asarray(spot.operands[k])[index]
        if n_seen[0] > _LIMIT or not (is_zero(value) or np.isnan(value)):
            return None
        holds = np.isnan if np.isnan(value) else is_zero
        made = origin_of_value(spot.frame, spot.eqn.invars[k], index, holds)
        mask = _mask_at(made, n_seen) if isinstance(made, Spot) else None
        if mask is None:
            return None
        masks.append(mask)
    return masks[0] if masks else None


def _mask_at(made: Spot, n_seen: list[int]) -> Spot | None:
    name = made.eqn.primitive.name
    if name == "select_n":
        k = int(element(made.operands[0], made.index)) + 1
        if is_zero(made.value) and not _is_made(made, k):
            return made if _is_backward(made) else None
        return _mask_of(made, k, n_seen)
    if name in ("mul", "div"):
        factors = (0, 1) if name == "mul" else (0,)
        return next(filter(None, (_mask_of(made, k, n_seen) for k in factors)), None)
    if name in JOINTLY_LINEAR or name == "convert_element_type":
        used = [k for k in range(len(made.operands)) if depends_on(made.alone, k).any()]
        masks = [_mask_of(made, k, n_seen) for k in used]
        return masks[0] if masks and None not in masks else None
    return None


def _is_made(spot: Spot, k: int) -> bool:
    """Whether an operand depends on anything but constants."""
    frame, atom = spot.frame, spot.eqn.invars[k]
    if isinstance(atom, Literal):
        return False
    if atom not in frame.node.producers:
        return atom in frame.node.program.jaxpr.invars
    i, _ = frame.node.producers[atom]
    eqn = frame.node.eqns[i]
    return any(not isinstance(v, Literal) for v in eqn.invars)
