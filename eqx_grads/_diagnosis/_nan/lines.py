"""The line of the user's code that is shown for a cause."""

import dataclasses
from typing import Any

from ..origins import NumberedLoss, Origin
from ..source_lines import layer_line, rule_line, SourceLine
from .cause import Cause
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


def rule_of(cause: Cause) -> str:
    """The line of the rule in which the value that is to blame is made, or empty."""
    for spot in (cause.source, cause.spot):
        if isinstance(spot, Spot):
            line = rule_line(spot.eqn)
            if line.file:
                return str(line)
    return ""
