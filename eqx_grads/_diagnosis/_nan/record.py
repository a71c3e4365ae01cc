"""The record of one cause: its place, its operands, and what to do about it."""

from typing import Any

import numpy as np

from ..._jaxprs.structure import CallWithRule, structure
from ..._rules.nan_where import NO_SECOND_DERIVATIVE
from ..origins import is_in_derivative, Origin
from ..source_lines import safe_function, UNKNOWN
from .births import Births
from .causes import Cause
from .cures import cure_of
from .kinds import Kind
from .lines import (
    differentiated,
    first_of_rule,
    library_of,
    names_of_calls,
    rule_of,
    users_line,
)
from .report import NonFinite
from .values import ALIVE, Birth, CANCELS, Zero


_IN_A_LIBRARY = " The operation is in a library: change what you pass to it."


def record_of(births: Births, cause: Cause, helps: str) -> NonFinite:
    """- `helps`: the call of `zero_safe` that was tried and makes the gradient finite."""
    derivative, numbered = births.derivative, births.derivative.numbered
    traced, birth, source = numbered.traced, cause.birth, cause.source
    origin = derivative.origin(source.place) or derivative.origin(birth.place)
    places = source.place, birth.place
    where = users_line(numbered, origin, *places) if origin else UNKNOWN
    is_inside = origin is not None and where != origin.source
    primitive, leaf, holder = origin.primitive if origin else "", "", ""
    if source.number is not None:
        leaf, holder = traced.leaf_of(source.number), traced.inputs[source.number]
        primitive = primitive or holder
    meant = [births.births[j] for j in sorted(source.of) if births.births[j].is_meant]
    if meant and meant[0].number is not None:
        holder = traced.inputs[meant[0].number]
    corner = _function_at_corner(births, origin, source)
    if is_inside and source.place is not None:
        primitive = first_of_rule(source.place)
    rule = "" if is_inside else rule_of(*places)
    library = where.library or (library_of(numbered, origin) if origin else "")
    bad = cause.bad
    first = tuple(map(int, np.argwhere(bad)[0]))
    mask = _mask_fields(births, cause.zero) if _is_zero(cause) else {}
    of = differentiated(numbered, origin) if origin and not is_inside else ""
    return NonFinite(
        **{**where.fields(), "library": library},
        kind=str(cause.kind),
        leaf=leaf if origin is None else "",
        caller=numbered.caller_of(origin) if origin and not is_inside else "",
        primitive=corner or primitive,
        derivative_of=of,
        path=origin.path if origin else "",
        step=derivative.steps_of(birth.place),
        count=cause.n_steps,
        is_forward=cause.is_value,
        rule=rule,
        index=first,
        shape=bad.shape,
        n_bad=int(bad.sum()),
        cure=cure_of(
            cause.kind,
            of or primitive,
            helps,
            is_value=cause.is_value and not of,
            mask=mask.get("mask", ""),
            calls=names_of_calls(numbered, origin, *places) if origin else (),
            holder=holder,
            leaf=leaf,
            is_rule=bool(rule) and origin is not None and _has_rule(origin),
            is_nan_operand=source.is_outside and source.is_nan,
            is_of_meant=bool(meant),
            is_in_derivative=origin is not None and is_in_derivative(numbered.origins, origin),
            corner=corner,
        )
        + _IN_A_LIBRARY * (bool(library) and not is_inside and not helps),
        **mask,
    )


def _is_zero(cause: Cause) -> bool:
    kinds = Kind.DEAD_BRANCH, Kind.MASKED_PRODUCT, Kind.ZERO_TIMES_INFINITY
    return cause.zero.why != ALIVE and cause.kind in kinds


def _has_rule(origin: Origin) -> bool:
    return isinstance(structure(origin.eqn), CallWithRule)


def _function_at_corner(births: Births, origin: Origin | None, source: Birth) -> str:
    """The function of `eqx_grads.safe` whose second derivative is NaN at a kink, or empty."""
    if source.place is None:
        return ""
    eqns = [source.place.eqn, *([origin.eqn] if origin else [])]
    if not any(NO_SECOND_DERIVATIVE in str(e.source_info.name_stack) for e in eqns):
        return ""
    enclosing = reversed(origin.enclosing) if origin else ()
    around = [births.derivative.numbered.origins[i].eqn for i in enclosing]
    return safe_function([*eqns, *around]) or (origin.primitive if origin else "")


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
    numbered = births.derivative.numbered
    origin = births.derivative.origin(zero.place)
    line = users_line(numbered, origin, zero.place) if origin else UNKNOWN
    name = zero.place.eqn.primitive.name
    if origin is not None and not _has_rule(origin):
        around = [numbered.origins[i].eqn for i in origin.enclosing[-1:]]
        is_clip = any(eqn.params.get("name") == "clip" for eqn in around)
        name = "clamp" if is_clip else origin.primitive
    elif origin is not None and origin.source.library and name not in _MASKS:
        return {}  # it is inside of the rule of a library
    name = "terms cancel, or underflow" if zero.why == CANCELS else _MASKS.get(name, name)
    return {"mask": name, "mask_file": line.file, "mask_line": line.line}
