"""The derivative of a scan step as a program of tangents, by the rules for reverse mode.

A function in the step may have a rule for reverse mode only, as `clip_gradient` has. Its
derivative in forward mode is another one. Backpropagation through time applies the pullback of
the step. If that is linear in its cotangents, its transpose carries a derivative forward in
time. If a backward rule is not linear, nothing does.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._errors import rule_error
from .._jaxprs.dependence import without_unused
from .._jaxprs.interpret import Domain, interpret
from .._jaxprs.linearity import output_statuses, surely_linear, why_nonlinear
from .._jaxprs.structure import CallWithRule, found, inner_programs, structure
from .._jaxprs.versions import function_name


def reverse_tangents(
    fn: Callable[..., list[Any]], primals: Sequence[Any], where: str
) -> ClosedJaxpr:
    """The tangents of the outputs, as a program of the tangents of the inputs. An error names
    the rules, if the pullback is not seen to be linear."""
    step = jax.make_jaxpr(fn)(*primals)
    types = step.out_avals
    pull_back = lambda *cts: list(jax.vjp(fn, *primals)[1](list(cts)))
    backward = without_unused(jax.make_jaxpr(pull_back)(*types))
    reason = _why_not_linear(backward)
    if reason is not None:
        names = [f"`{_name_of(eqn)}`" for eqn in found(step, CallWithRule)]
        raise _not_linear(" or ".join(dict.fromkeys(names)), reason, where)
    transposed = jax.linear_transpose(jaxpr_as_fun(backward), *types)
    return without_unused(jax.make_jaxpr(lambda *ts: transposed(list(ts)))(*primals))


# ---------------------------------------------------------------- linearity


def _why_not_linear(backward: ClosedJaxpr) -> str | None:
    """The reason why a pullback can't be transposed, as a predicate."""
    statuses = output_statuses(backward)
    if not surely_linear(statuses):
        # The words are those for a function of tangents.
        reason = why_nonlinear(statuses) or "it is not seen to be linear"
        return reason.replace("tangent", "cotangent")
    # A second derivative follows that rule, and would not find it in the transpose.
    applied = _rules_applied(backward)
    return f"it applies `{_name_of(applied[0])}`, which has a rule" if applied else None


def _rules_applied(program: ClosedJaxpr) -> list[Any]:
    """The calls with rules that are applied to what depends on an input."""
    applied: list[Any] = []

    def apply(eqn, depend, _):
        if any(depend) and isinstance(structure(eqn), CallWithRule):
            applied.append(eqn)
        return [any(depend)] * len(eqn.outvars)

    enters = lambda known: not isinstance(known, CallWithRule)
    domain = Domain(lambda x: False, operator.or_, apply, enters)
    interpret(program, [True] * len(program.in_avals), domain)
    return applied


def _name_of(eqn: Any) -> str:
    """The user's name for a function with a rule."""
    call = eqn.params.get("call")  # of `_rules/call_primitive.py`
    name = function_name(*inner_programs(eqn)) if call is None else call.name
    return "filter_custom_vjp" if name == _OF_EQUINOX else name


# For a function that `eqx.filter_custom_vjp` decorates, the program has no other name.
_OF_EQUINOX = "fn_wrapped"


def _not_linear(names: str, reason: str, where: str):
    return rule_error(
        "A rule for reverse mode can't be followed online, as it is not linear in its "
        "cotangent.",
        f"the backward rule {'of ' if names else ''}{names or 'in a step'}: {reason}",
        where,
        do="An online `filter_scan` computes the derivative of the carry before there is a "
        "cotangent. Apply the function to what only the outputs use, or use `checkpoint` or "
        "`truncate`.",
    )
