"""The derivative of a scan step as a program of tangents, for either mode.

The two modes differ where a function in the step has a rule for reverse mode only, as
`clip_gradient` has: in forward mode, it has the derivative of the function. Backpropagation
through time applies the pullback of the step. If that is linear in its cotangents, its
transpose carries a derivative forward in time. If a backward rule is not linear, nothing does.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._errors import rule_error
from .._jaxprs.dependence import without_unused
from .._jaxprs.evaluate import bind
from .._jaxprs.interpret import Domain, interpret
from .._jaxprs.linearity import output_statuses, surely_linear, why_nonlinear
from .._jaxprs.operands import at, restricted
from .._jaxprs.structure import (
    CallWithRule,
    equations,
    inner_programs,
    structure,
)
from .._jaxprs.versions import function_name
from .._tangent_spaces import is_differentiable


Function = Callable[..., list[Any]]  # of arrays that are differentiable


def forward_tangents(fn: Function, primals: Sequence[Any]) -> ClosedJaxpr:
    """The tangents of the outputs, as a program of the tangents of the inputs."""
    tangents = lambda *ts: jax.jvp(fn, tuple(primals), ts)[1]
    return without_unused(jax.make_jaxpr(tangents)(*primals))


def reverse_tangents(fn: Function, primals: Sequence[Any], where: str) -> ClosedJaxpr:
    """The same, of the linear map that reverse mode transposes. An error names the rule, if it
    is not seen to be linear."""
    backward, types = _pullback(fn, primals)
    reason = _why_not_linear(backward)
    if reason is not None:
        raise _not_linear(_rules_that_are_not_linear(fn, primals), reason, where)
    transposed = jax.linear_transpose(jaxpr_as_fun(backward), *types)
    return without_unused(jax.make_jaxpr(lambda *ts: transposed(list(ts)))(*primals))


def _pullback(fn: Function, primals: Sequence[Any]) -> tuple[ClosedJaxpr, Sequence[Any]]:
    """The cotangents of the inputs, as a program of the cotangents of the outputs, and the
    types of the latter."""
    types = jax.make_jaxpr(fn)(*primals).out_avals
    pull_back = lambda *cts: list(jax.vjp(fn, *primals)[1](list(cts)))
    return without_unused(jax.make_jaxpr(pull_back)(*types)), types


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
    found: list[Any] = []

    def apply(eqn, depend, _):
        if any(depend) and isinstance(structure(eqn), CallWithRule):
            found.append(eqn)
        return [any(depend)] * len(eqn.outvars)

    enters = lambda known: not isinstance(known, CallWithRule)
    domain = Domain(lambda x: False, operator.or_, apply, enters)
    interpret(program, [True] * len(program.in_avals), domain)
    return found


def _calls(program: ClosedJaxpr) -> Iterator[Any]:
    return (eqn for eqn in equations(program) if isinstance(structure(eqn), CallWithRule))


def _rules_that_are_not_linear(fn: Function, primals: Sequence[Any]) -> list[str]:
    """The names of the functions in a step whose backward rules are not linear."""
    program = jax.make_jaxpr(fn)(*primals)
    return [_name_of(eqn) for eqn in _calls(program) if not _is_linear(eqn)]


def _is_linear(eqn: Any) -> bool:
    types = [v.aval for v in eqn.invars]
    perturbed = [i for i, t in enumerate(types) if is_differentiable(t)]

    def why(operands):
        of_all = lambda *xs: [y for y in bind(eqn, xs) if is_differentiable(y)]
        call = restricted(of_all, operands, perturbed)
        reasons.append(_why_not_linear(_pullback(call, at(operands, perturbed))[0]))

    reasons: list[str | None] = []
    jax.eval_shape(why, types)
    return reasons == [None]


def _name_of(eqn: Any) -> str:
    """The user's name for a function with a rule."""
    call = eqn.params.get("call")  # of `_rules/call_primitive.py`
    name = function_name(*inner_programs(eqn)) if call is None else call.name
    return "filter_custom_vjp" if name == _OF_EQUINOX else name


# For a function that `eqx.filter_custom_vjp` decorates, the program has no other name.
_OF_EQUINOX = "fn_wrapped"


def _not_linear(rules: list[str], reason: str, where: str):
    names = " and ".join(f"`{name}`" for name in dict.fromkeys(rules))
    return rule_error(
        "A rule for reverse mode can't be followed online, as it is not linear in its "
        "cotangent.",
        f"the backward rule {'of ' if names else ''}{names or 'in a step'}: {reason}",
        where,
        do="An online `filter_scan` computes the derivative of the carry before there is a "
        "cotangent. Apply the function to what only the outputs use, or use `checkpoint` or "
        "`truncate`.",
    )
