"""The line of the user's code that is shown for a cause, and what the user calls there."""

import dataclasses
import re

from ..carried import Place
from ..origins import NumberedLoss, Origin
from ..source_lines import called_functions, layer_line, rule_line, SourceLine, UNKNOWN


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


def names_of_calls(numbered: NumberedLoss, origin: Origin, *places: Place | None) -> set[str]:
    """The functions of JAX that an operation is in, such as `softmax`."""
    eqns = [origin.eqn, *(numbered.origins[i].eqn for i in origin.enclosing)]
    if line_in_rule(places[0]).file:
        eqns += [p.eqn for place in places if place is not None for p in place.outward()]
    names = {str(eqn.params.get("name", "")) for eqn in eqns}
    names |= {name for eqn in eqns for name in called_functions(eqn)}
    return {re.sub(r"^_+", "", name) for name in names}


def first_of_rule(place: Place) -> str:
    """The operation of which an equation of a rule is a part of the derivative: the first one
    that was traced at the same place."""
    traceback = place.eqn.source_info.traceback
    same = (eqn for eqn in place.program.eqns if eqn.source_info.traceback == traceback)
    return next(same, place.eqn).primitive.name


def differentiated(numbered: NumberedLoss, origin: Origin) -> str:
    """The operation of which an operation is the derivative, which the loss takes itself."""
    if "jvp(" not in str(origin.eqn.source_info.name_stack):
        return ""
    same = (
        o.primitive
        for o in numbered.origins
        if o.source == origin.source
        and o.source.span == origin.source.span
        and o.enclosing == origin.enclosing
    )
    name = next(same, "")
    return "" if name == origin.primitive else name
