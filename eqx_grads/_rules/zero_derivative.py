"""Where a rule says that a derivative is zero, the function may forbid a derivative.

`nondifferentiable` raises where it is differentiated. A rule replaces the derivative of its
function, so nothing in the function is differentiated. Without the check here, the rule may
return `None` for what the function calls nondifferentiable: a silent zero instead of an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._errors import name_of, RuleError
from .._jaxprs.operands import at, restricted
from .._tangent_spaces import is_differentiable
from .flat_call import RuleCall
from .rule import Rule, try_to_trace


def check_zeros(rule: Rule, call: RuleCall, indices: Sequence[int]) -> None:
    """Raise if the function forbids a derivative with respect to the perturbed operands at
    `indices`, for which `rule` says zero."""

    def check():
        of_all = lambda *operands: call.flat.call(operands)[1]
        fn = restricted(of_all, call.operands, indices)
        check_function_of_zeros(rule.name, call.fn, fn, at(call.operands, indices))

    call.rules.cache.get(call, ("zeros", *indices), check)


def check_function_of_zeros(
    rule: str, fn: Any, of_zeros: Callable[..., Any], primals: Sequence[Any]
) -> None:
    """The same for `of_zeros`, which is `fn` as a function of its primals only."""
    errors: list[RuleError] = []

    def inexact_outputs(*xs):
        return [y for y in jax.tree.leaves(of_zeros(*xs)) if is_differentiable(y)]

    def backward(*xs):
        try:
            out, pull_back = jax.vjp(inexact_outputs, *xs)
            return pull_back(out)  # for the types, any cotangents do
        except RuleError as error:
            if error.forbids_derivative:
                errors.append(error)
            raise

    try_to_trace(jax.eval_shape, backward, *primals)
    if errors:
        errors[0].add_note(
            f"`{name_of(fn)}` passes it to `nondifferentiable`, and the rule `{rule}` returns "
            "no derivative for it, which would be a silent zero. Return the derivative, or an "
            "array of zeros if zero is meant."
        )
        raise errors[0]
