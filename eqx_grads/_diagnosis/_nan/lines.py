"""The line of the user's code that is shown for a cause."""

import dataclasses
from typing import Any

from ..._jaxprs.structure import Scan, structure, While
from ..origins import NumberedLoss, Origin
from ..source_lines import layer_line, rule_line, SourceLine
from .derivative_program import Derivative
from .trace_back import Spot


def users_line(numbered: NumberedLoss, origin: Origin, *spots: Any) -> SourceLine:
    """The line of the loss. If that calls a library, such as a solver, which called a function
    of the user's in a rule, the line in this function."""
    library = library_of(numbered, origin)
    for spot in spots:
        if library and isinstance(spot, Spot):
            line = _line_in_rule(spot)
            if line.file:
                return dataclasses.replace(line, library=library)
    return origin.source


def _line_in_rule(spot: Spot) -> SourceLine:
    """The line of the rule that made an equation, or one around it: those of `jnp.where` have
    the line of its first call only."""
    line, node = rule_line(spot.eqn), spot.frame.node
    while not line.file and node.parent is not None:
        line, node = rule_line(node.parent.eqns[node.position]), node.parent
    return line


def library_of(numbered: NumberedLoss, origin: Origin) -> str:
    """The place in a library that the line of an equation of the loss calls, or empty."""
    around = (numbered.origins[i] for i in reversed(origin.enclosing))
    lines = (layer_line(o.eqn) for o in (origin, *around))
    return origin.source.library or next(filter(None, lines), "")


def rule_of(*spots: Any) -> str:
    """The line of the rule in which the value that is to blame is made, or empty."""
    for spot in spots:
        if isinstance(spot, Spot):
            line = rule_line(spot.eqn)
            if line.file:
                return str(line)
    return ""


def place_in_rule(derivative: Derivative, origin: Origin, *spots: Any) -> Any:
    """Equal for what is at one place of a function that a rule of a library calls, as a solver
    does: to the loss, all of it is one operation. `None` if it is in no such function."""
    if not library_of(derivative.numbered, origin):
        return None
    for spot in spots:
        if isinstance(spot, Spot) and _line_in_rule(spot).file:
            return _calls_in_rule(spot)
    return None


def _calls_in_rule(spot: Spot) -> tuple[Any, ...]:
    """Those of the user's, as in `_line_in_rule`: of the equation, and of the jitted functions
    around it, up to the next loop. A jitted function has the lines of its first call only."""
    eqn, node = spot.eqn, spot.frame.node
    found = [rule_line(eqn)]
    while node.parent is not None:
        eqn, node = node.parent.eqns[node.position], node.parent
        if isinstance(structure(eqn), Scan | While):
            break
        found.append(rule_line(eqn))
    return tuple((line.calls, line.span) for line in found if line.file)
