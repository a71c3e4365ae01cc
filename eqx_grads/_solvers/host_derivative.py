"""The derivative of a host function: its rules, finite differences, or a Jacobian by basis
vectors, in both modes and at every order that they allow."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from .._errors import rule_error
from .._jaxprs.current_trace import outside_of_linearization
from .._jaxprs.varying import varying_types
from .._rules.custom_jvp import custom_jvp
from .._rules.linear_primitive import linear_call, LinearMap
from .._rules.rule import Rule
from .host_callback import AbstractHostOp, call_on_host
from .host_jacobian import (
    contract,
    contract_transpose,
    DifferenceOp,
    ForwardBasisOp,
    ReverseBasisOp,
)
from .host_ops import is_complex, is_inexact, PrimalOp, Types
from .host_rule_ops import CotangentOp, ForwardOp, TangentOp
from .host_spec import forward_op


@custom_jvp
def host_call(op: AbstractHostOp, leaves: list[Any]) -> list[jax.Array]:
    """The outputs of `op`, with its derivative."""
    return call_on_host(op, leaves)


def _host_call_jvp(primals, tangents):
    op, leaves = primals
    ts = tangents[1]
    has_forward_rule = isinstance(op, PrimalOp) and op.code.fwd is not None
    with outside_of_linearization(leaves):
        values = host_call(forward_op(op) if has_forward_rule else op, leaves)
    # The derivative of a forward rule is that of its function. Its residuals have none: second
    # derivatives are with respect to the arguments, from which residuals are computed.
    function = op.call if isinstance(op, ForwardOp) else op
    residuals = values[len(function.out_types) :]
    live = _live(function, ts)
    t_live = _Derivative(function, live).push_forward(
        [*leaves, *residuals], [ts[i] for i in live]
    )
    t_out: list[Any] = [None] * len(op.out_types)
    inexact = [i for i, t in enumerate(function.out_types) if is_inexact(t)]
    for i, t in zip(inexact, t_live, strict=True):
        t_out[i] = t
    return values[: len(op.out_types)], t_out


# Linear by construction, so that nothing need be traced to see it.
host_call._rules.set_jvp(Rule(_host_call_jvp, symbolic_zeros=True, surely_linear=True))


def _live(op, ts) -> tuple[int, ...]:
    """Which inputs are being differentiated, of those that have a derivative."""
    live = tuple(i for i, t in enumerate(ts) if t is not None)
    call = op.call
    for i in live:
        if call.n_args <= i < len(call.in_types):
            raise rule_error(
                f"`{call.name}` was differentiated with respect to a keyword-only argument.",
                f"at {call.in_path(i)}",
                call.place,
                do="Keyword-only arguments are configuration. Make it a positional parameter "
                "to give it a derivative, or pass `jax.lax.stop_gradient` of it.",
            )
    return live


class _Derivative:
    """The tangent map of `op` with respect to its inputs `live`, and the transpose.

    Either is the transpose of the other, so both may be transposed again. `operands` are the
    inputs of `op`, and residuals behind them.
    """

    def __init__(self, op: AbstractHostOp, live: tuple[int, ...]):
        self.op = op
        self.live = live
        self.sources: Types = tuple(op.in_types[i] for i in live)
        self.targets: Types = tuple(t for t in op.out_types if is_inexact(t))
        self.push: TangentOp | None = None
        self.pull: CotangentOp | None = None
        if isinstance(op, PrimalOp):
            if op.code.jvp is not None:
                self.push = TangentOp(op, live)
            if op.code.bwd is not None:
                self.pull = CotangentOp(forward_op(op), live)
        if self.push is None and self.pull is None and not _has_differences(op):
            raise _no_derivative(op)

    def push_forward(self, operands: Sequence[Any], ts: Sequence[Any]) -> list[Any]:
        forward = LinearMap(
            self.op.name,
            self.tangents,
            self.cotangents,
            varying_types(map(tangent_type, self.targets), operands, ts),
        )
        return list(linear_call(forward, operands, ts))

    def pull_back(self, operands: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        types = varying_types(map(tangent_type, self.sources), operands, cts)
        backward = LinearMap(self.op.name, self._pull, self._push_dense, types)
        return list(linear_call(backward, operands, cts))

    def tangents(self, operands, ts):
        n = len(self.op.in_types)
        if self.push is not None:
            return host_call(self.push, [*operands[:n], *ts])
        if _has_differences(self.op):
            jacobian = host_call(self._differences(), operands[:n])
        else:
            assert self.pull is not None
            self._check_calls(self.pull, self.targets, "forward", "def_jvp")
            jacobian = host_call(ReverseBasisOp(self.pull, self.live), list(operands))
        return contract(jacobian, self.sources, self.targets, ts)

    def cotangents(self, operands, cts):
        cts = dense(cts, self.targets)
        if self.pull is not None:
            return self.pull_back(operands, cts)
        n = len(self.op.in_types)
        if _has_differences(self.op):
            jacobian = host_call(self._differences(), operands[:n])
        else:
            assert self.push is not None
            self._check_calls(self.push, self.sources, "reverse", "def_bwd")
            jacobian = host_call(ForwardBasisOp(self.push, self.live), operands[:n])
        return contract_transpose(jacobian, self.sources, self.targets, cts)

    def _pull(self, operands, cts):
        assert self.pull is not None
        return host_call(self.pull, [*operands, *cts])

    def _push_dense(self, operands, ts):
        return self.push_forward(operands, dense(ts, self.sources))

    def _differences(self) -> DifferenceOp:
        op, call = self.op, self.op.call
        if isinstance(op, CotangentOp):
            op = dataclasses.replace(op, recompute=True)
        if call.code.finite_difference == "complex" and isinstance(op, PrimalOp):
            _check_real(op, self.sources, self.targets)
            return DifferenceOp(op, self.live, (None,) * len(self.live))
        step = ft.partial(_step, call, _n_differences(op))
        return DifferenceOp(op, self.live, tuple(step(i, op.in_types[i]) for i in self.live))

    def _check_calls(self, op, types: Types, mode, missing) -> None:
        n = sum((1 + is_complex(t)) * t.size for t in types)
        most = op.call.code.max_rule_calls
        if n > most:
            raise rule_error(
                f"`{op.call.name}` was differentiated in {mode} mode, and has no rule for it.",
                f"the Jacobian takes {n} calls of the rule `{op.name}`; `max_rule_calls` is "
                f"{most}",
                op.place,
                do=f"Give a rule with `@{op.call.name}.{missing}`, or "
                "`finite_difference='central'`, or a larger `max_rule_calls`.",
            )


def tangent_type(t):
    return ShapedArray(t.shape, t.dtype)


def dense(cts, types):
    return [
        jnp.zeros(t.shape, t.dtype) if ct is None else ct
        for ct, t in zip(cts, types, strict=True)
    ]


def _has_differences(op) -> bool:
    return op.call.code.finite_difference is not None


def _n_differences(op) -> int:
    """How many central differences `op` takes of each other."""
    n = 0
    while isinstance(op, DifferenceOp):
        n += all(step is not None for step in op.steps)
        op = op.op
    return n


def _step(call: PrimalOp, n: int, i: int, t: jax.ShapeDtypeStruct) -> float:
    r"""The relative step of a central difference.

    If the relative error of the function is $\epsilon$, that of the difference is least, and
    about $\epsilon^{2/3}$, at a step of about $\epsilon^{1/3}$. This is the error of what the
    next difference is taken of.
    """
    given = call.steps[i] if i < call.n_args else None
    step = float(jnp.finfo(t.dtype).eps) ** (1 / 3) if given is None else given
    return step ** ((2 / 3) ** n)


def _check_real(op: PrimalOp, sources, targets) -> None:
    for t in (*sources, *targets):
        if is_complex(t):
            raise rule_error(
                f"`{op.name}` has complex arguments or outputs, and complex steps were asked "
                "for.",
                f"one is {t.dtype}[{','.join(map(str, t.shape))}]",
                op.place,
                do="Use `finite_difference='central'`, or give a rule.",
            )


def _no_derivative(op):
    call = op.call
    if call.code.is_linear:
        whose = f"The adjoint `{call.name}` of `{call.code.adjoint_of}`, which reverse mode "
        whose += "calls,"
        return rule_error(
            (whose if call.code.adjoint_of else f"The linear host function `{call.name}`")
            + " was differentiated with respect to a parameter: it is linear in its first "
            "argument, and the others have no derivative.",
            call.place,
            do="Pass `jax.lax.stop_gradient` of the parameter; or use "
            "`eqx_grads.host_function`, or write the derivative with `eqx_grads.custom_jvp`. "
            f"For the solution of a linear system, {_LINEAR_SOLVE}",
        )
    if op is call:
        return rule_error(
            f"`{call.name}` was differentiated, and has no derivative.",
            call.place,
            do=f"It runs on the host, where JAX can't see it. Give a rule with "
            f"`@{call.name}.def_bwd` or `@{call.name}.def_jvp`, or "
            "`finite_difference='central'`; or pass `jax.lax.stop_gradient` of its arguments.",
        )
    return rule_error(
        f"The rule `{op.name}` of `{call.name}` was differentiated: a second derivative of "
        f"`{call.name}` was asked for.",
        op.place,
        do="The rule runs on the host, where JAX can't see it. With "
        "`finite_difference='central'` its derivative is taken by differences. Or write "
        "the rule in JAX, with `eqx_grads.custom_vjp` or `eqx_grads.custom_jvp`, and call "
        "host functions in it that have derivatives of their own. For the solution of a linear "
        f"system, {_LINEAR_SOLVE}",
    )


_LINEAR_SOLVE = (
    '`jax.lax.custom_linear_solve` around a host function has all derivatives: see "A sparse '
    'solve" in the guide "Host code".'
)
