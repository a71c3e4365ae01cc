"""The line of the user's code that is shown for a cause, and what the user calls there."""

import dataclasses

from ..._jaxprs.primitives import kind_of
from ..carried import Place
from ..origins import is_in_derivative, NumberedLoss, Origin
from ..source_lines import (
    called_functions,
    is_of_jax,
    layer_line,
    rule_line,
    SourceLine,
    UNKNOWN,
)


def users_line(numbered: NumberedLoss, origin: Origin, *places: Place | None) -> SourceLine:
    """The line of the loss. If that calls a library, such as a solver, which called a function
    of the user's in a rule, the line in this function."""
    library = library_of(numbered, origin)
    for place in places:
        if library and place is not None and (line := line_in_rule(place)).file:
            return dataclasses.replace(line, library=library)
    return origin.source


def line_in_rule(place: Place | None) -> SourceLine:
    """The line of the rule that made an equation, or one around it: the equations of
    `jnp.where` have the line of its first call only."""
    lines = (rule_line(p.eqn) for p in (place.outward() if place is not None else ()))
    return next((line for line in lines if line.file), UNKNOWN)


def library_of(numbered: NumberedLoss, origin: Origin) -> str:
    """The place in a library that the line of an equation of the loss calls, or empty."""
    around = (numbered.origins[i] for i in reversed(origin.enclosing))
    lines = (layer_line(o.eqn) for o in (origin, *around))
    return origin.source.library or next(filter(None, lines), "")


def rule_of(*places: Place | None) -> str:
    """The line of the rule in which the value that is to blame is made, or empty."""
    lines = (rule_line(place.eqn) for place in places if place is not None)
    return next((str(line) for line in lines if line.file), "")


def names_of_calls(numbered: NumberedLoss, origin: Origin, *places: Place | None) -> list[str]:
    """The functions of JAX that an operation is in, such as `softmax`, outermost first."""
    eqns = [*(numbered.origins[i].eqn for i in origin.enclosing), origin.eqn]
    if line_in_rule(places[0]).file:
        around = [p for place in places if place is not None for p in place.outward()]
        eqns += [p.eqn for p in reversed(around)]
    names: list[str] = []
    for eqn in eqns:
        names += reversed(called_functions(eqn))
        names += [str(eqn.params.get("name", ""))] if is_of_jax(eqn) else []
    return [name.lstrip("_") for name in names]


def first_of_rule(place: Place) -> str:
    """The operation of which an equation of a rule is a part of the derivative: the first one
    that was traced at the same place, but for changes of the layout and the type."""
    traceback = place.eqn.source_info.traceback
    same = [e for e in place.program.eqns if e.source_info.traceback == traceback]
    passes = lambda e: kind_of(e).layout or e.primitive.name == "convert_element_type"
    computed = (e for e in same if not passes(e))
    return next(computed, [*same, place.eqn][0]).primitive.name


def differentiated(numbered: NumberedLoss, origin: Origin) -> str:
    """The operation of which an operation is the derivative, which the loss takes itself."""
    if not is_in_derivative(numbered.origins, origin):
        return ""
    traceback = origin.eqn.source_info.traceback
    same = (o for o in numbered.origins if o.eqn.source_info.traceback == traceback)
    name = next(same, origin).primitive
    return "" if name == origin.primitive else name
