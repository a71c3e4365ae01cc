"""Decide from its jaxpr whether a function is linear in its arguments.

A forward rule that is not linear in its tangents is an error. A backward rule that is linear
in its cotangents may be differentiated to drop the terms of unused outputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .dependence import without_unused
from .host_calls import is_without_derivative, name_on_host
from .interpret import Domain, interpret
from .primitives import kind_of, linear_operands
from .structure import CallWithRule, holds, structure, While


class Status(NamedTuple):
    """How a value depends on the arguments; the statuses are ordered by `rank`."""

    rank: int
    reason: str = ""
    may_be_zero: bool = False  # of a constant: where it is added


ZERO = Status(0)  # does not depend on them, and is known to be zero
CONSTANT = Status(1)  # does not depend on them
MAYBE_ZERO = Status(1, may_be_zero=True)
LINEAR = Status(2)
# May depend on them in a way that this file does not know, or adds something that may not be
# zero. The reason, if there is one, is why JAX can't transpose it, linear or not.
UNKNOWN = Status(3)


def _nonlinear(reason: str) -> Status:
    return Status(4, reason)


# The ranks of a value that certainly depends on the arguments.
DEPENDS = (LINEAR.rank, 4)


def output_statuses(program: ClosedJaxpr) -> Sequence[Status]:
    """How each output depends on the inputs; all inputs count as arguments."""
    return linear_in(program, [True] * len(program.in_avals))


def linear_in(
    program: ClosedJaxpr, flags: Sequence[bool], others: Status = CONSTANT
) -> Sequence[Status]:
    """How each output depends on the flagged inputs."""
    return interpret(program, [LINEAR if f else others for f in flags], LINEARITY).outs


def why_nonlinear(statuses: Sequence[Status]) -> str | None:
    """The reason why an output is non-linear, or affine; `None` if all outputs are linear."""
    for status in statuses:
        if status.rank == 4:
            return status.reason
        if status == CONSTANT:
            return "it returns something that no tangent multiplies"
    return None


def why_not_transposable(program: ClosedJaxpr, statuses: Sequence[Status]) -> dict[int, str]:
    """Why JAX can't transpose an output, by index. It is tried where that is not certain."""
    # JAX transposes no `jax.custom_vjp`, linear or not.
    is_certain = not holds(program, "custom_vjp_call")
    reasons: dict[int, str] = {}
    for i, status in enumerate(statuses):
        if is_certain and status in (ZERO, MAYBE_ZERO, LINEAR):
            continue
        reason = status.reason or _failure_of_transpose(program, i)
        if reason is not None:
            reasons[i] = reason
    return reasons


def _failure_of_transpose(program: ClosedJaxpr, i: int) -> str | None:
    one = without_unused(program, [j == i for j in range(len(program.out_avals))])
    transpose = jax.linear_transpose(jaxpr_as_fun(one), *program.in_avals)
    try:
        jax.eval_shape(transpose, one.out_avals)
    except Exception as error:  # of JAX, or of a rule of another library
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"JAX can't transpose it ({reason})"
    return None


def surely_linear(statuses: Sequence[Status]) -> bool:
    return all(status in (ZERO, LINEAR) for status in statuses)


def _status_of_constant(x) -> Status:
    if isinstance(x, Tracer) or not jnp.issubdtype(jnp.result_type(x), jnp.number):
        return CONSTANT  # there is no number to look at
    return CONSTANT if np.any(np.asarray(x)) else ZERO


_CALLBACKS = ("pure_callback", "io_callback")


def _apply(eqn: Any, ins: Sequence[Status], _) -> list[Status]:
    if kind_of(eqn).identity:
        return list(ins)
    return [_one(eqn, eqn.primitive.name, ins)] * len(eqn.outvars)


def _one(eqn, name, ins) -> Status:
    kind = kind_of(eqn)
    if kind.linear == "each" and ZERO in ins:
        return ZERO
    if all(status.rank <= CONSTANT.rank for status in ins):
        if _keeps_zero(eqn, name, ins):
            return ZERO
        # An unknown value may keep a zero.
        may_keep_zero = kind.linear is None and set(ins) == {ZERO}
        return MAYBE_ZERO if may_keep_zero or MAYBE_ZERO in ins else CONSTANT
    worst = max(ins, key=lambda status: status.rank)
    if name in _CALLBACKS and not worst.reason:
        name = name_on_host(eqn)
        called = f"`{name}`" if name else "a function"
        return Status(UNKNOWN.rank, f"it calls {called} on the host with a tangent")
    if worst.rank >= UNKNOWN.rank:
        return worst
    dependent = [i for i, status in enumerate(ins) if status == LINEAR]
    if name == "select_n":
        return _joint(name, ins[1:]) if ins[0].rank < LINEAR.rank else UNKNOWN
    indices = linear_operands(eqn)
    if indices is not None:
        if all(i in indices for i in dependent):
            return _joint(name, [ins[i] for i in indices])
        return _nonlinear("it divides by a tangent") if name == "div" else UNKNOWN
    if kind.linear == "each":
        return (
            LINEAR
            if len(dependent) == 1
            else _nonlinear("it multiplies a tangent by a tangent")
        )
    if name == "convert_element_type":
        dtype = eqn.params["new_dtype"]
        inexact = jnp.issubdtype(dtype, jnp.inexact)
        return LINEAR if inexact else _nonlinear(f"it casts a tangent to {dtype}")
    if name == "integer_pow":
        y = eqn.params["y"]
        return LINEAR if y == 1 else _nonlinear(f"it raises a tangent to the power {y}")
    if kind.linear == "no":
        return _nonlinear(f"it applies `{name}` to a tangent")
    if name == "stop_gradient":
        return Status(UNKNOWN.rank, "it applies `stop_gradient` to a tangent")
    return UNKNOWN


def _keeps_zero(eqn, name, ins) -> bool:
    indices = linear_operands(eqn)
    if indices is not None:
        decisive = [ins[i] for i in indices]
    else:
        decisive = {"convert_element_type": ins, "select_n": ins[1:]}.get(name, [])
    return bool(decisive) and all(status == ZERO for status in decisive)


def _joint(name, ins) -> Status:
    if all(status in (ZERO, LINEAR, MAYBE_ZERO) for status in ins):
        return LINEAR
    if name in ("add", "sub", "add_any"):
        return _nonlinear("it adds something that no tangent multiplies")
    return UNKNOWN  # a constant part, which may well be zero


def _join(a: Status, b: Status) -> Status:
    """The status of a value that is either the one or the other."""
    low, high = (a, b) if b.rank > a.rank else (b, a)  # of equals `a`, for loops to end
    return UNKNOWN if low.rank == CONSTANT.rank and high == LINEAR else high


def _decide(eqn: Any, index: Status, out: Status) -> Status:
    if index.rank < LINEAR.rank:
        return out
    return index if index.rank > UNKNOWN.rank else UNKNOWN


def _finish(eqn: Any, ins: Sequence[Status], outs: Sequence[Status]) -> Sequence[Status]:
    known = structure(eqn)
    if not (isinstance(known, CallWithRule) and known.transposes):
        return outs
    if any(map(is_without_derivative, known.programs[0].eqns)):
        return outs  # a host function, whose rule is an error
    return [UNKNOWN if status.rank == UNKNOWN.rank else status for status in outs]


# JAX has no transpose of a `while_loop`, so none is entered.
LINEARITY = Domain(
    constant=_status_of_constant,
    join=_join,
    apply=_apply,
    enters=lambda known: not isinstance(known, While),
    decide=_decide,
    finish=_finish,
)
