"""The record of one cause: its place, its operands, and what to do about it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._jaxprs.primitives import ELEMENTWISE
from ..._jaxprs.structure import CallWithRule, structure
from ..source_lines import UNKNOWN
from .boundary import is_on_boundary, on_boundary
from .cause import Cause
from .corners import function_at_corner, is_corner
from .cures import (
    cure_at_corner,
    cure_of,
    cure_of_dropped_nan,
    cure_of_infinite_operand,
    cure_of_input,
    cure_of_rule,
    DEAD_BRANCH,
    has_cure,
    IN_A_DERIVATIVE,
    INDETERMINATE,
    LARGE,
    NO_SECOND,
    SINGULARITY,
    ZERO_SAFE,
    ZERO_TIMES_INFINITY,
)
from .derivative_program import Derivative
from .formulas import formula_in, Formulas
from .lines import library_of, rule_of, users_line
from .replay import Frame, is_bad, is_inexact
from .report import NonFinite
from .trace_back import elements_of, index_into, Input, Spot
from .values import first_of_rule, largest_product, value_at
from .zeros import BOUND, CANCELS, UNDERFLOWS, Zero


# The value of a library's function, which the cure would have the user edit.
_IN_A_LIBRARY = " The operation is in a library: change what you pass to it."


def record_of(derivative: Derivative, root: Frame, cause: Cause) -> NonFinite:
    traced = derivative.numbered.traced
    origin, spot, source = cause.origin, cause.spot, cause.source
    where = users_line(derivative.numbered, origin, source, spot) if origin else UNKNOWN
    primitive = origin.primitive if origin else ""
    is_at_corner = is_corner(derivative, cause.source)
    if is_at_corner:
        primitive = function_at_corner(derivative, origin)
    is_inside = origin is not None and where != origin.source
    if is_inside and isinstance(source, Spot):
        primitive = first_of_rule(source).primitive.name
    caller = derivative.numbered.caller_of(origin) if origin and not is_inside else ""
    library = where.library or (library_of(derivative.numbered, origin) if origin else "")
    leaf = ""
    if isinstance(source, Input) and origin is None:
        leaf, primitive = traced.leaf_of(source.number), traced.inputs[source.number]
    has_loss = bool(np.isfinite(root.results[0]))  # without it, `zero_safe` is not tried
    shown = _shown(cause)
    array, operands = _array_of(shown), _operands_of(derivative, cause)
    return NonFinite(
        **{**where.fields(), "library": library},
        leaf=leaf,
        caller=caller,
        primitive=primitive,
        derivative_of=_differentiated(derivative, cause, is_inside),
        path=origin.path if origin else "",
        step=derivative.steps_of(spot.frame.node, spot.frame.steps) if spot else (),
        kind=cause.kind,
        cure=cure_at_corner(primitive)
        if is_at_corner
        else _cure_of(derivative, cause, primitive, operands, is_inside)
        + _IN_A_LIBRARY * (not has_loss and bool(library) and not is_inside),
        **(_mask_fields(derivative, cause.mask) if cause.mask else {}),
        is_forward=cause.forward,
        index=shown.index if shown else (),
        rule="" if is_inside else rule_of(cause.source, cause.spot),
        shape=np.shape(array),
        n_bad=_number_of_bad(cause, shown, array, root.threshold),
        is_batched=origin is not None and derivative.numbered.is_batched(origin),
        operands=tuple(map(_number, operands)),
        cotangent=_cotangent_of(cause),
        count=cause.n_steps,
        are_more_steps=cause.more_steps,
        are_more_bad=cause.more_made,
    )


def _shown(cause: Cause) -> Spot | Input | None:
    """Whose element is shown: that of the value that is made bad. Of a cotangent, elements may
    be bad because of others. Of an operation in a loop, an input may hold the values of all
    steps: it is shown if it is what is to be mended."""
    spot = cause.spot
    if spot is None:
        return cause.source
    is_of_steps = isinstance(cause.source, Input) and bool(spot.frame.steps)
    if cause.n_made is None or (is_of_steps and cause.origin is not None):
        return spot
    return cause.source


def _number_of_bad(
    cause: Cause, shown: Spot | Input | None, array: Any, threshold: float | None
) -> int:
    if cause.n_made is not None and shown is cause.source:
        return cause.n_made
    return int(is_bad(np.asarray(array), threshold).sum()) if is_inexact(array) else 1


def _array_of(shown: Spot | Input | None) -> Any:
    if isinstance(shown, Input):
        return shown.array
    return None if shown is None else shown.frame.outputs[shown.position][shown.output]


def _cure_of(derivative: Derivative, cause: Cause, primitive: str, operands, is_inside) -> str:
    traced, source = derivative.numbered.traced, cause.source
    if isinstance(source, Input) and cause.kind == source.kind:
        return cure_of_input(
            cause.kind, traced.inputs[source.number], traced.leaf_of(source.number)
        )
    mask = _mask_of(derivative, cause.mask) if cause.mask else ""
    holder = traced.inputs[source.number] if isinstance(source, Input) else ""
    if cause.kind == DEAD_BRANCH and any(map(np.isnan, operands)):
        return cure_of_dropped_nan(holder)
    formula = ""
    if is_inside and isinstance(source, Spot):
        formula = formula_in(source.frame.node.program, first_of_rule(source))
    elif cause.origin is not None:
        formula = Formulas(derivative.numbered.origins).formula_of(cause.origin)
    if _is_of_infinite_operand(cause, operands) and not has_cure(primitive, formula):
        return cure_of_infinite_operand(primitive, holder)
    is_rule = not cause.forward and not is_inside and rule_of(cause.source, cause.spot)
    if is_rule and (text := cure_of_rule(cause.kind, primitive)):
        return text
    text = cure_of(
        cause.kind,
        primitive,
        formula,
        is_value=cause.forward,
        explodes=cause.source is cause.spot and not cause.forward,
        mask=mask,
        is_direct=_is_direct(derivative, cause),
        is_bound=cause.mask is not None and cause.mask.why == BOUND,
        by_zero=len(operands) == 2 and not operands[1],
    )
    is_dead = cause.kind == DEAD_BRANCH and primitive == "div" and not any(operands)
    is_dead = is_dead and formula != "x / norm"  # which has no limit
    if cause.forward:  # in a gradient inside of the loss, which `zero_safe` leaves as it is
        text = text.replace(f"{ZERO_SAFE}, or ", "")
    if is_dead and cause.mask is not None and is_on_boundary(cause.mask.spot):
        text += on_boundary(formula)
    return text + _on_derivative(derivative, cause, text)


def _is_of_infinite_operand(cause: Cause, operands: Sequence[Any]) -> bool:
    """Whether an infinite value multiplies a cotangent, and not an infinite derivative."""
    is_product = cause.kind == ZERO_TIMES_INFINITY and not cause.forward
    if not is_product or cause.origin is None or cause.origin.primitive not in ELEMENTWISE:
        return False
    return any(map(np.isinf, operands))


# What may be dropped by a `where` in a function that the loss differentiates.
_DROPPED = (DEAD_BRANCH, SINGULARITY, INDETERMINATE, ZERO_TIMES_INFINITY)


def _on_derivative(derivative: Derivative, cause: Cause, cure: str) -> str:
    """What is to be said of an operation in a derivative that the loss takes."""
    formulas = Formulas(derivative.numbered.origins)
    if cause.origin is None or not formulas.is_in_derivative(cause.origin):
        return ""
    is_dropped = cause.forward and cause.kind in _DROPPED
    return NO_SECOND * ("zero there" in cure) + IN_A_DERIVATIVE * is_dropped


def _differentiated(derivative: Derivative, cause: Cause, is_inside: bool) -> str:
    """The operation whose derivative, which the loss takes, the operation is a part of."""
    if cause.origin is None or is_inside:
        return ""
    return Formulas(derivative.numbered.origins).differentiated(cause.origin)


def _is_direct(derivative: Derivative, cause: Cause) -> bool:
    """Whether only elementwise operations are between the operation and an index into what it
    computes: nothing that reorders, for example."""
    if cause.mask is None or cause.origin is None:
        return False
    mask = derivative.origin(cause.mask.spot.frame.node, cause.mask.spot.position)
    formulas = Formulas(derivative.numbered.origins)
    return mask is not None and formulas.is_made_by(mask, cause.origin, ELEMENTWISE)


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


def _mask_fields(derivative: Derivative, zero: Zero) -> dict[str, Any]:
    """The fields of a record on what makes the cotangent zero."""
    origin = derivative.origin(zero.spot.frame.node, zero.spot.position)
    line = users_line(derivative.numbered, origin, zero.spot) if origin else UNKNOWN
    return {
        "mask": _mask_of(derivative, zero),
        "mask_file": line.file,
        "mask_line": line.line,
    }


def _mask_of(derivative: Derivative, zero: Zero) -> str:
    """What makes a cotangent zero, as the user calls it."""
    if zero.why in (CANCELS, UNDERFLOWS):
        return zero.why
    mask = zero.spot
    origin = derivative.origin(mask.frame.node, mask.position)
    name: str = mask.eqn.primitive.name
    if origin is not None and not isinstance(structure(origin.eqn), CallWithRule):
        name = origin.primitive
        around = [derivative.numbered.origins[i].eqn for i in origin.enclosing[-1:]]
        if any(eqn.params.get("name") == "clip" for eqn in around):  # `jnp.clip`
            return "clip"
    return _MASKS.get(name, name)


def _cotangent_of(cause: Cause) -> float | None:
    """The cotangent that arrived at the element."""
    spot = cause.spot
    if spot is None or cause.forward:
        return None
    if cause.cotangent is not None:
        return float(np.real(cause.cotangent))
    product = largest_product(spot) if cause.kind == LARGE else None
    if product is not None:
        return float(np.real(product[1]))
    for k, x in enumerate(spot.operands):
        if spot.is_cotangent(k) and is_inexact(x):
            values = np.asarray(x)[elements_of(spot, k)]
            if values.size:
                return float(np.real(values[0]))
    return None


def _number(x) -> float:
    return float(np.abs(x)) if np.iscomplexobj(x) else float(x)


def _operands_of(derivative: Derivative, cause: Cause) -> list[Any]:
    """What the operation of the loss was applied to at the element, as far as it is known."""
    origin, spot, source = cause.origin, cause.spot, cause.source
    if origin is None or spot is None:
        return []
    if isinstance(source, Input):  # its element that is not finite, of a matrix for example
        return [source.value]
    if cause.kind == LARGE and origin.primitive not in ELEMENTWISE:
        product = largest_product(spot)
        return [] if product is None else [product[0]]
    places = [place for place in (source, spot) if isinstance(place, Spot)]
    values = (value_at(derivative, place, origin) for place in places)
    value = next(filter(None, values), source)
    return [] if value is None else _operands_at(value)


def _operands_at(spot: Spot) -> list[Any]:
    found = []
    for k, x in enumerate(spot.operands):
        if not is_inexact(x) or spot.is_cotangent(k):
            continue
        x = np.asarray(x)
        if spot.eqn.primitive.name == "pure_callback" and x.ndim == len(spot.value_shape):
            # Most of these are functions of numbers, under `vmap`.
            found.append(x[index_into(x, spot.index)])
        else:
            found.extend(x[elements_of(spot, k)][:1])
    return found
