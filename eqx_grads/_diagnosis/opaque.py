"""The operations of a loss that JAX can't differentiate."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._jaxprs.interpret import Domain, interpret
from .._jaxprs.structure import CallWithRule
from .origins import no_derivative_error, NumberedLoss, Origin, raised_error
from .pairs import differentiable_pairs
from .traced_loss import TracedLoss


def no_gradient(loss: Callable[..., Any], traced: TracedLoss, error: Exception) -> Exception:
    """The error to raise if the gradient of a loss raises an error in any mode."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return raised_error(loss, error)
    opaque = _opaque_operations(NumberedLoss(traced))
    return no_derivative_error(loss, opaque, error) if opaque else error


def _opaque_operations(numbered: NumberedLoss) -> list[Origin]:
    """The operations on values that depend on a leaf, and that have no derivative."""
    found: dict[int, Origin] = {}

    def apply(eqn: Any, ins: Sequence[bool], path: Any) -> list[bool]:
        if any(ins) and differentiable_pairs(eqn, {i for i, x in enumerate(ins) if x}) is None:
            origin = numbered.origin_at((*path, eqn))
            found[origin.number] = origin
        return [any(ins)] * len(eqn.outvars)

    domain = Domain[bool](
        constant=lambda x: False,
        join=lambda a, b: a or b,
        apply=apply,
        enters=lambda known: not isinstance(known, CallWithRule),
    )
    traced = numbered.traced
    interpret(
        traced.program, [i < len(traced.leaves) for i in range(len(traced.values))], domain
    )
    return list(found.values())
