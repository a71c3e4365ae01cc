"""Second derivatives of the functions of `eqx_grads.safe`, which do not exist at a kink."""

from ..._rules.nan_where import NO_SECOND_DERIVATIVE
from ..origins import Origin
from ..source_lines import safe_function
from .derivative_program import Derivative
from .trace_back import Input, Spot


def is_corner(derivative: Derivative, source: Spot | Input | None) -> bool:
    """Whether an equation makes the NaN that is a second derivative at a kink or a pole."""
    if not isinstance(source, Spot) or source.eqn.primitive.name != "sqrt":
        return False
    # In the loss, or in the derivative of the loss.
    origin = derivative.origin(source.frame.node, source.position)
    eqns = [source.eqn] if origin is None else [source.eqn, origin.eqn]
    return any(NO_SECOND_DERIVATIVE in str(eqn.source_info.name_stack) for eqn in eqns)


def function_at_corner(derivative: Derivative, origin: Origin | None) -> str:
    """The function that is there, such as `safe.norm`."""
    if origin is None:
        return ""
    around = (derivative.numbered.origins[i].eqn for i in reversed(origin.enclosing))
    return safe_function([origin.eqn, *around]) or origin.primitive
