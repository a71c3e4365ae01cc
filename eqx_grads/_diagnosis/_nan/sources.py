"""Which equations made elements of a value non-finite, and which elements there.

The elements are followed back all at once: those of one operation may have several causes.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .replay import Frame, is_inexact
from .trace_back import (
    depends_on,
    Elements,
    Input,
    is_nonfinite,
    origins_of_elements,
    reached_by,
)


# A constant is put into the layout of what uses it.
_LAYOUT = ("broadcast_in_dim", "convert_element_type", "reshape")
_LIMIT = 400  # equations that are looked at

Found = dict[Any, Elements | Input]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Elements of a variable of a program that are all NaN, or all infinite.

    - `user`: the elements of the equation that they are an operand of, which depend on them.
    - `is_part`: whether they are those of some steps or elements in a loop only.
    """

    frame: Frame
    atom: Any
    mask: Any
    is_nan: bool
    user: Elements | None = None
    is_part: bool = False


def key_of(source: Elements | Input) -> Any:
    """Equal for the same equation at several steps of a loop."""
    if isinstance(source, Input):
        return source.number
    return id(source.frame.node), source.position


def nonfinite_operands(elements: Elements, operands: Iterable[int]) -> list[Part]:
    """Of some operands of an equation, what is not finite and what the elements depend on."""
    parts = []
    for k in operands:
        if not is_inexact(elements.operands[k]):
            continue
        x = np.asarray(elements.operands[k])
        bad = is_nonfinite(x)
        if not bad.any():
            continue
        bad = bad & depends_on(elements, k)
        for is_nan in (True, False):
            mask = bad & (np.isnan(x) == is_nan)
            if mask.any():
                user = elements.among(reached_by(elements, k, mask))
                atom = elements.eqn.invars[k]
                is_part = elements.is_part
                parts.append(Part(elements.frame, atom, mask, is_nan, user, is_part))
    return parts


def sources_of_nonfinite(parts: Sequence[Part]) -> Found:
    """The equations of which all operands are finite and a result is not, and the inputs, that
    the parts are not finite because of, by their keys, in the order in which they are found.

    Of what is made from constants only, these are the equations that use a NaN, and those that
    make a NaN of two infinities; and if there are no others, those that use an infinity. The
    difference of two logarithms of zero comes before these: often they are meant.
    """
    found, first_nans, users, _ = _follow(parts)
    differences: Found = {}
    for elements in first_nans:
        operands = nonfinite_operands(elements, range(len(elements.operands)))
        of_infinities = _follow(operands)[0]
        if not of_infinities:
            _add(found, elements)
        elif elements.eqn.primitive.name == "sub":
            if all(map(_is_log_of_zero, of_infinities.values())):
                _add(differences, elements)
    return {**differences, **found} or users


def followed(parts: Sequence[Part]) -> Sequence[Elements]:
    """The elements on the way from what made the parts not finite."""
    return _follow(parts)[-1]


def sources_without(parts: Sequence[Part], dropped: Mapping[Any, Any]) -> Found:
    """As `sources_of_nonfinite`, if these elements of some arrays were finite."""
    found, _, users, _ = _follow(parts, dropped)
    return {**users, **found}


def _is_log_of_zero(source: Elements | Input) -> bool:
    if isinstance(source, Input) or source.eqn.primitive.name != "log":
        return False
    return bool(np.all(source.values[source.mask] == -np.inf))


def _follow(
    parts: Sequence[Part], dropped: Mapping[Any, Any] | None = None
) -> tuple[Found, list[Elements], Found, Sequence[Elements]]:
    """The equations and inputs that made the parts; the elements that are NaN because of
    infinities; the equations that use an infinite constant; and all that was followed.

    - `dropped`: for some arrays the elements that are taken to be finite."""
    found: Found = {}
    users: Found = {}
    first_nans: list[Elements] = []
    seen: dict[Any, Elements] = {}
    todo = list(parts)
    while todo and len(seen) < _LIMIT:
        part = todo.pop(0)
        # A carry that begins with infinities may become NaN later.
        holds = np.isnan if part.is_nan else is_nonfinite
        for place in origins_of_elements(part.frame, part.atom, part.mask, holds):
            if place is not None and part.is_part:
                place = dataclasses.replace(place, is_part=True)
            if place is None:
                if part.user is not None:
                    _add(found if part.is_nan else users, part.user)
            elif isinstance(place, Input):
                _add(found, place)
            elif (new := _unseen(_without(place, dropped), seen)).mask.any():
                operands = nonfinite_operands(new, range(len(new.operands)))
                made = new.among(~_union(operands))
                if made.mask.any():
                    _add(found, made)
                of_infinities = np.isnan(new.values) & ~made.mask
                of_nans = _union(p for p in operands if p.is_nan)
                first = new.among(of_infinities & ~of_nans)
                if first.mask.any():
                    first_nans.append(first)
                if new.eqn.primitive.name in _LAYOUT:
                    operands = [dataclasses.replace(p, user=part.user) for p in operands]
                todo += operands
    return found, first_nans, users, [*seen.values()]


def _union(parts: Iterable[Part]) -> Any:
    """The elements of the equation that depend on some parts of its operands."""
    union = np.bool_(False)
    for part in parts:
        if part.user is not None:
            union = union | part.user.mask
    return union


def _without(place: Elements, dropped: Mapping[Any, Any] | None) -> Elements:
    mask = (dropped or {}).get(array_of(place))
    return place if mask is None else place.among(~mask)


def _unseen(place: Elements, seen: dict[Any, Elements]) -> Elements:
    """Those of the elements that were not followed yet, which now are."""
    key = array_of(place)
    if key not in seen:
        seen[key] = place
        return place
    new = place.among(~seen[key].mask)
    seen[key] = dataclasses.replace(place, mask=place.mask | seen[key].mask)
    return new


def _add(found: Found, source: Elements | Input) -> None:
    known = found.setdefault(key_of(source), source)
    if known is source:
        return
    is_part = known.is_part or source.is_part
    if array_of(known) == array_of(source):
        known = dataclasses.replace(known, mask=known.mask | source.mask)
    elif isinstance(known, Elements):
        others: Found = {array_of(other): other for other in known.others}
        same = others.setdefault(array_of(source), source)
        mask = same.mask | source.mask
        others[array_of(source)] = dataclasses.replace(same, mask=mask)
        known = dataclasses.replace(known, others=tuple(others.values()))
    found[key_of(source)] = dataclasses.replace(known, is_part=is_part)


def array_of(source: Elements | Input) -> Any:
    """Equal for elements of the same array."""
    if isinstance(source, Input):
        return source.number
    return id(source.frame), source.position, source.output
