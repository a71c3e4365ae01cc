"""Default batching: a call under `vmap` without a batching rule of the user."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._jaxprs.current_trace import is_of_innermost_trace
from .._tangent_spaces import is_differentiable
from .call_record import Call, no_vmap_rule, vmap_over


def batched_call(
    call: Call,
    axis_data: Any,
    batched: Sequence[bool],
    call_jaxpr: ClosedJaxpr | None,
    n_consts: int,
) -> tuple[Call, list[bool]]:
    """A call for a whole batch: `vmap` of the function, and `vmap` of its rule. And which
    outputs have the batch dimension, a list that is filled when the function or the rule runs.

    An output that can have a tangent has the batch dimension: its tangent may have it although
    its value does not. (The value of `replace_gradient` depends on one operand, and its tangent
    on the other.) Other outputs have the batch dimension if `jax.vmap` gives it to them.
    """
    # The function of one example, where it was traced before.
    traced = None if call_jaxpr is None else jaxpr_as_fun(call_jaxpr)
    axes = [0 if b else None for b in batched]
    out_batched: list[bool] = []
    vmap = ft.partial(vmap_over(axis_data), out_axes=0 if any(batched) else None)

    def decide(out):
        out_batched[:] = [is_differentiable(x) or is_of_innermost_trace(x) for x in out]

    def as_decided(out):
        if not any(batched):
            return list(out)
        return [x if b else x[0] for x, b in zip(out, out_batched, strict=True)]

    def primal(operands):
        def one(*xs):
            out = call.primal(xs[n_consts:]) if traced is None else traced(*xs)
            decide(out)
            return out

        return as_decided(vmap(one, axes)(*operands))

    def jvp(primals, tangents):
        t_axes = [None if t is None else a for t, a in zip(tangents, axes, strict=True)]

        def one(xs, ts):
            out, t_out = call.jvp(xs[n_consts:], ts[n_consts:])
            decide(out)
            return out, t_out

        out, t_out = vmap(one, (axes, t_axes))(list(primals), list(tangents))
        return as_decided(out), t_out

    batched_call = dataclasses.replace(
        call,
        n_operands=n_consts + call.n_operands,
        n_args=n_consts + call.n_args,
        primal=primal,
        jvp=jvp,
        vmap=no_vmap_rule,
    )
    return batched_call, out_batched
