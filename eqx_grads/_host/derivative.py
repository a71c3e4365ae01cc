"""The derivative of a host function: its rules, finite differences, or a Jacobian by basis
vectors, in both modes and at every order that they allow."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from .._errors import rule_error
from .._jaxprs.current_trace import outside_of_linearization
from .._jaxprs.varying import varying_types
from .._rules.custom_jvp import custom_jvp
from .._rules.linear_primitive import apply_side, Side
from .._rules.rule import Rule
from .._rules.signature import OURS
from .host_call import HostCall
from .host_callback import call_on_host
from .host_op import HostOp, inexact, is_complex, is_inexact, Types
from .jacobian import (
    basis_op,
    difference_op,
    n_columns,
    n_differences,
    product,
    transposed_product,
)
from .rules import cotangent_op, forward_op, tangent_op


@custom_jvp
def host_call(op: HostOp, leaves: list[Any]) -> list[jax.Array]:
    """The outputs of `op`, with its derivative."""
    return call_on_host(op, leaves)


def _host_call_jvp(primals, tangents):
    op, leaves = primals
    call, ts = op.call, tangents[1]
    # A forward rule has the derivative of its function.
    function = op if op.parts else call.op
    with outside_of_linearization(leaves):
        values = host_call(forward_op(call) if call.code.fwd and not op.parts else op, leaves)
    live = tuple(i for i, t in enumerate(ts) if t is not None)
    for i in live:
        if call.n_args <= i < len(call.in_types):
            kind, do = OURS.configuration
            what = f"`{call.name}` was differentiated with respect to {kind}."
            raise rule_error(what, f"at {call.in_path(i)}", call.place, do=do)
    t_live = iter(_tangents(function, live, leaves, [ts[i] for i in live]))
    return values, [next(t_live) if is_inexact(t) else None for t in op.out_types]


# Linear by construction, so that nothing need be traced to see it.
host_call._rules.set_jvp(Rule(_host_call_jvp, symbolic_zeros=True, surely_linear=True))


def _tangents(op: HostOp, live: tuple[int, ...], operands, ts) -> list[Any]:
    """The tangents of the inexact outputs of `op`, with a transpose that may be transposed
    again. `operands` are the inputs of `op`."""
    call, code = op.call, op.call.code
    sources, targets = tuple(op.in_types[i] for i in live), inexact(op.out_types)
    has_rules = not op.parts
    push = tangent_op(call, live) if has_rules and code.jvp is not None else None
    pull = cotangent_op(call, live) if has_rules and code.bwd is not None else None
    differences = None
    if code.finite_difference is not None:
        differences = _difference_op(op, live, sources, targets)
    elif push is None and pull is None:
        raise _no_derivative(op)

    def forward(operands, ts):
        if push is not None:
            return host_call(push, [*operands, *ts])
        if differences is not None:
            return product(host_call(differences, operands), targets, ts)
        columns = host_call(_basis_op(pull, targets, "forward", "def_jvp"), operands)
        return transposed_product(columns, targets, sources, ts)

    def backward(operands, cts):
        if pull is not None:
            return host_call(pull, [*operands, *cts])
        columns_op = differences or _basis_op(push, sources, "reverse", "def_bwd")
        columns = host_call(columns_op, operands)
        return transposed_product(columns, sources, targets, cts)

    types_of = lambda types: varying_types(map(tangent_type, types), operands, ts)
    ways = Side(op.name, forward, types_of(targets)), Side(op.name, backward, types_of(sources))
    return apply_side(*ways, operands, ts)


def tangent_type(t: Any) -> ShapedArray:
    return ShapedArray(t.shape, t.dtype)


def _difference_op(op: HostOp, live, sources, targets) -> HostOp:
    call = op.call
    is_real = not any(map(is_complex, (*sources, *targets)))
    if call.code.finite_difference == "complex" and is_real and not op.parts:
        return difference_op(op, live, (None,) * len(live))
    n = n_differences(op)
    return difference_op(op, live, tuple(_step(call, n, i, op.in_types[i]) for i in live))


def _step(call: HostCall, n: int, i: int, t: jax.ShapeDtypeStruct) -> float:
    r"""The relative step of a central difference.

    If the relative error of the function is $\epsilon$, the error of the difference is smallest
    at a step of about $\epsilon^{1/3}$: about $\epsilon^{2/3}$. This is the error of what the
    next difference is taken of.
    """
    given = call.steps[i] if i < len(call.steps) else None
    step = float(jnp.finfo(t.dtype).eps) ** (1 / 3) if given is None else given
    return step ** ((2 / 3) ** n)


def _basis_op(op: Any, types: Types, mode: str, missing: str) -> HostOp:
    """The columns of the rule for the other mode."""
    n, call = n_columns(types), op.call
    if n > call.code.max_rule_calls:
        raise rule_error(
            f"`{call.name}` was differentiated in {mode} mode, and has no rule for it.",
            f"the Jacobian takes {n} calls of the rule `{op.name}`; `max_rule_calls` is "
            f"{call.code.max_rule_calls}",
            op.place,
            do=f"Give a rule with {call.rules(missing)}, or `finite_difference='central'`, "
            "or a larger `max_rule_calls`.",
        )
    return basis_op(op, types)


def _no_derivative(op: HostOp):
    name = op.call.name
    if op.call.code.is_linear:
        what = f"The linear host function `{name}` was differentiated with respect to a "
        what += "parameter: it is linear in its first argument, the others have no derivative."
        do = "Pass `jax.lax.stop_gradient` of the parameter; or use `eqx_grads.host_function`, "
        do += f"or write the derivative with `eqx_grads.custom_jvp`. {_LINEAR_SOLVE}"
    elif op.parts:
        what = f"The rule `{op.name}` was differentiated: a second derivative of `{name}` was "
        what += "asked for."
        do = "The rule runs on the host, where JAX can't see it. Give "
        do += "`finite_difference='central'`. Or write the rule in JAX, and call host "
        do += f"functions in it that have derivatives of their own. {_LINEAR_SOLVE}"
    else:
        what = f"`{name}` was differentiated, and has no derivative."
        do = "It runs on the host, where JAX can't see it. Give a rule with "
        do += f"{op.call.rules('def_bwd', 'def_jvp')}, or `finite_difference='central'`; or "
        do += "pass `jax.lax.stop_gradient` of its arguments."
    return rule_error(what, op.place, do=do)


_LINEAR_SOLVE = (
    "For the solution of a linear system, `jax.lax.custom_linear_solve` around a host function "
    'has all derivatives: see "A sparse solve" in the guide "Host code".'
)
