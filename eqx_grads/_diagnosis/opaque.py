"""The operations of a loss that JAX can't differentiate."""

from collections.abc import Callable
from typing import Any

import jax

from .._errors import first_line, name_of, place_of, rule_error
from .._jaxprs.structure import CallWithRule, structure
from .origins import NumberedLoss, Origin, raised_error
from .pairs import differentiable_pairs
from .traced_loss import TracedLoss


def no_gradient(loss: Callable[..., Any], traced: TracedLoss, error: Exception) -> Exception:
    """The error to raise if the gradient of a loss raises an error in any mode."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return raised_error(loss, error)
    numbered = NumberedLoss(traced)
    opaque = [o for o in numbered.origins if _is_opaque(numbered.around(o))]
    if not opaque:
        return error
    return rule_error(
        f"The loss `{name_of(loss)}` has no derivative.",
        ", ".join(f"JAX can't differentiate `{o.primitive}` at {o.source}" for o in opaque),
        f"JAX says: {first_line(error)}",
        place_of(loss),
        do="Give it a derivative with `eqg.custom_jvp` or `eqg.custom_vjp`, or apply "
        "`jax.lax.stop_gradient` to its arguments.",
    )


def _is_opaque(around: list[Origin]) -> bool:
    """Whether an operation, with those around it, has no derivative, and no rule has either."""
    eqn, has_rule = around[0].eqn, [isinstance(structure(o.eqn), CallWithRule) for o in around]
    is_entered = structure(eqn) is not None and not has_rule[0]
    operands = set(range(len(eqn.invars)))
    return not (is_entered or any(has_rule[1:])) and differentiable_pairs(eqn, operands) is None
