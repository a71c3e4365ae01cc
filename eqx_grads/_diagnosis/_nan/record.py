"""The record of one cause: its place, its operands, and what to do about it."""

import dataclasses
from typing import Any

import numpy as np

from ..._jaxprs.primitives import kind_of
from ..._jaxprs.structure import CallWithRule, structure
from ..carried import outward, Place
from ..origins import is_in_derivative, NumberedLoss, Origin
from ..source_lines import called_functions, is_of_jax, rule_line, SourceLine, UNKNOWN
from .births import Births
from .causes import Cause, Kind
from .cures import cure_of, cure_of_input
from .derivative import differentiated, line_in_rule
from .report import NonFinite
from .zeros import CANCELS, Zero


def record_of(births: Births, cause: Cause, helps: str) -> NonFinite:
    """- `helps`: the call of `zero_safe` that was tried and makes the gradient finite."""
    derivative, numbered = births.derivative, births.derivative.numbered
    traced, birth, source = numbered.traced, cause.birth, cause.source
    origin = derivative.origin(source.place) or derivative.origin(birth.place)
    places = source.place, birth.place
    where = users_line(origin, *places) if origin else UNKNOWN
    is_inside = origin is not None and where != origin.source
    is_inner = origin is not None and is_in_derivative(numbered.origins, origin)
    leaf = holder = ""
    if source.number is not None:
        leaf = dict(enumerate(traced.leaves)).get(source.number, "")
        holder = traced.inputs[source.number]
    primitive = holder
    if is_inside and source.place is not None:
        primitive = first_of_rule(source.place)
    elif origin is not None:
        primitive = differentiated(numbered, origin).primitive
    rules = (rule_line(place.eqn) for place in places if place is not None)
    rule = "" if is_inside else next((str(line) for line in rules if line.file), "")
    is_masked = cause.kind in (Kind.DEAD_BRANCH, Kind.MASKED_PRODUCT)
    is_zero = is_masked or cause.kind == Kind.ZERO_TIMES_INFINITY
    mask = _mask_fields(births, cause.zero) if is_zero else {}
    is_input = is_masked and source.is_outside and source.is_nan
    if is_input or cause.kind in (Kind.INPUT, Kind.INFINITE_INPUT):
        cure = cure_of_input(cause.kind, holder, leaf, helps if is_input else "")
    else:
        cure = cure_of(
            cause.kind,
            primitive,
            helps,
            is_value=cause.is_value and not is_inner,
            mask=mask.get("mask", ""),
            calls=names_of_calls(numbered, origin, *places) if origin else (),
            is_rule=bool(rule) and origin is not None and _has_rule(origin),
            is_in_derivative=is_inner,
        )
    if where.library and not is_inside and not helps:
        cure += " The operation is in a library: change what you pass to it."
    return NonFinite(
        **where.fields(),
        kind=str(cause.kind),
        leaf=leaf if origin is None else "",
        caller=numbered.caller_of(origin) if origin and not is_inside else "",
        primitive=primitive,
        path=origin.path if origin else "",
        step=derivative.steps_of(birth.place),
        count=len(cause.steps),
        is_forward=cause.is_value,
        rule=rule,
        index=tuple(map(int, np.argwhere(cause.bad)[0])),
        cure=cure,
        **mask,
    )


def _has_rule(origin: Origin) -> bool:
    return isinstance(structure(origin.eqn), CallWithRule)


# How the user calls the operations that do not select an element.
_MASKS = {
    "select_n": "where",
    "max": "maximum",
    "reduce_max": "max",
    "min": "minimum",
    "reduce_min": "min",
    "clamp": "clip",
    "dynamic_slice": "slice",
    "gather": "index",
}


def _mask_fields(births: Births, zero: Zero) -> dict[str, Any]:
    """The fields of a record on what makes the cotangent zero."""
    if zero.place is None:
        return {}
    origin = births.derivative.origin(zero.place)
    line = users_line(origin, zero.place) if origin else UNKNOWN
    name = zero.place.eqn.primitive.name
    if origin is not None and not _has_rule(origin):
        name = origin.primitive
    elif origin is not None and origin.source.library and name not in _MASKS:
        return {}  # it is inside of the rule of a library
    name = "terms cancel, or underflow" if zero.why == CANCELS else _MASKS.get(name, name)
    return {"mask": name, "mask_file": line.file, "mask_line": line.line}


# ---------------------------------------------------------------- the line of the user


def users_line(origin: Origin, *places: Place | None) -> SourceLine:
    """The line of the loss. If that calls a library, such as a solver, which called a function
    of the user's in a rule, the line in this function."""
    library = origin.source.library
    for place in places:
        if library and place is not None and (line := line_in_rule(place)).file:
            return dataclasses.replace(line, library=library)
    return origin.source


def names_of_calls(numbered: NumberedLoss, origin: Origin, *places: Place | None) -> list[str]:
    """The functions of JAX that an operation is in, such as `softmax`, outermost first."""
    eqns = [o.eqn for o in reversed(numbered.around(origin))]
    if line_in_rule(places[0]).file:
        around = [p for place in places for p in outward(place)]
        eqns += [p.eqn for p in reversed(around)]
    names: list[str] = []
    for eqn in eqns:
        names += reversed(called_functions(eqn))
        names += [str(eqn.params.get("name", ""))] if is_of_jax(eqn) else []
    return [name.lstrip("_") for name in names]


def first_of_rule(place: Place) -> str:
    """The operation whose derivative has this equation of a rule. It is the first operation
    that was traced at the same place, except for changes of the layout."""
    traceback = place.eqn.source_info.traceback
    same = (e for e in place.program.eqns if e.source_info.traceback == traceback)
    return next((e for e in same if not kind_of(e).layout), place.eqn).primitive.name
