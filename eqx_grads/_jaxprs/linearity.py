"""Decide from its jaxpr whether a function is linear in its arguments.

A forward rule that is not linear in its tangents is an error. A backward rule that is linear
in its cotangents may be differentiated to drop the terms of unused outputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .dependence import without_unused
from .evaluate import evaluate
from .host_calls import is_without_derivative, name_on_host
from .structure import Cond, holds, Scan, structure, While


@dataclasses.dataclass(frozen=True)
class _Status:
    """How a value depends on the arguments; the statuses are ordered by `rank`."""

    rank: int
    reason: str = ""


ZERO = _Status(0)  # does not depend on them, and is known to be zero
CONSTANT = _Status(1)  # does not depend on them
MAYBE_ZERO = _Status(1, "of an operand")  # as `CONSTANT`, and may be zero where it is added
LINEAR = _Status(2)
DEPENDENT = _Status(3)  # depends on them, and perhaps adds something that does not
# May depend on them in a way that this file does not know. The reason, if there is one, is why
# JAX can't transpose it, linear or not.
UNKNOWN = _Status(4)


def _nonlinear(reason: str) -> _Status:
    return _Status(5, reason)


def output_statuses(program: ClosedJaxpr) -> list[_Status]:
    """How each output depends on the inputs, all of which are taken as arguments."""
    return _statuses(program, [LINEAR] * len(program.in_avals))


def linear_in(
    program: ClosedJaxpr, flags: Sequence[bool], others: _Status = CONSTANT
) -> list[_Status]:
    """How each output depends on the flagged inputs."""
    return _statuses(program, [LINEAR if f else others for f in flags])


def why_nonlinear(statuses: Sequence[_Status]) -> str | None:
    """What makes an output non-linear, or affine; `None` where nothing can be held
    against any of them."""
    for status in statuses:
        if status.rank == 5:
            return status.reason
        if status == CONSTANT:
            return "it returns something that no tangent multiplies"
    return None


def why_not_transposable(program: ClosedJaxpr, statuses: Sequence[_Status]) -> dict[int, str]:
    """Why JAX can't transpose an output, by index. It is tried where that is not certain."""
    # JAX transposes no `jax.custom_vjp`, linear or not.
    is_certain = not holds(program, "custom_vjp_call")
    reasons: dict[int, str] = {}
    for i, status in enumerate(statuses):
        if is_certain and status in (ZERO, LINEAR):
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


def surely_linear(statuses: Sequence[_Status]) -> bool:
    return all(status in (ZERO, LINEAR) for status in statuses)


def _status_of_constant(x) -> _Status:
    if isinstance(x, Tracer) or not jnp.issubdtype(jnp.result_type(x), jnp.number):
        return CONSTANT  # there is no number to look at
    return CONSTANT if np.any(np.asarray(x)) else ZERO


# Linear in all of their operands together.
JOINTLY_LINEAR = frozenset(
    """
    neg reshape broadcast_in_dim squeeze transpose reduce_sum slice rev real imag conj copy
    cumsum reduce_window_sum psum psum_invariant all_gather all_to_all ppermute pvary pbroadcast
    reduce_scatter concatenate pad complex add sub add_any sharding_constraint
    optimization_barrier split device_put fft stack unstack tile reduce_precision
    all_gather_invariant all_gather_reduced unreduced_psum unreduced_reduce_scatter preduced
    layout_constraint
    """.split()  # noqa: SIM905
)
# Linear in the operands with these indices; the others must not depend on the arguments.
_LINEAR_IN = {
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "scatter-sub": (0, 2),
    "select_and_scatter_add": (0,),
    "div": (0,),
    "triangular_solve": (1,),
    "tridiagonal_solve": (3,),
}
# Linear in each operand while the others do not depend on the arguments.
MULTILINEAR = ("mul", "dot_general", "ragged_dot_general", "conv_general_dilated")
_NONLINEAR = frozenset(
    """
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp exp2 expm1 log log1p sqrt
    rsqrt cbrt logistic erf erfc erf_inv lgamma digamma igamma igammac polygamma abs sign
    floor ceil round pow square max min rem atan2 clamp nextafter reduce_max reduce_min
    reduce_prod cumprod cummax cummin cumlogsumexp argmax argmin eq ne lt le gt ge is_finite
    sort
    """.split()  # noqa: SIM905
)
_CALLBACKS = ("pure_callback", "io_callback")
# What these are differentiable in depends on the types of their operands only, not on shapes or
# parameters.
ELEMENTARY = JOINTLY_LINEAR.union(
    _LINEAR_IN, MULTILINEAR, _NONLINEAR, ("select_n", "convert_element_type", "integer_pow")
)


def linear_operands(eqn: Any) -> Sequence[int] | None:
    """The operands in which an equation is jointly linear, by index; `None` if unknown."""
    name, n = eqn.primitive.name, len(eqn.invars)
    if name in JOINTLY_LINEAR:
        return range(n)
    if name == "eqg_linear":  # our own, `_rules/linear_primitive.py`
        return range(eqn.params["n_residuals"], n)
    if name == "custom_linear_solve":  # the right-hand sides come last
        return range(n - len(eqn.outvars), n)
    return _LINEAR_IN.get(name)


def _statuses(program: ClosedJaxpr, args: Sequence[_Status]) -> list[_Status]:
    return evaluate(program, args, _evaluate_equation, constant=_status_of_constant)


def _evaluate_equation(eqn: Any, ins: list[_Status]) -> list[_Status]:
    known = structure(eqn)
    if isinstance(known, Scan):
        return _scan(known, ins)
    if isinstance(known, Cond):
        return _cond(known, ins)
    if known is None or isinstance(known, While):
        status = _one(eqn, eqn.primitive.name, ins)
        if isinstance(known, While) and status.rank in (DEPENDENT.rank, UNKNOWN.rank):
            status = UNKNOWN  # of any one output
        return [status] * len(eqn.outvars)
    outs = _statuses(*known.programs, ins)
    if eqn.primitive.name == "eqg_call" and not is_without_derivative(eqn):
        # Our own: its rules know how to transpose it.
        outs = [UNKNOWN if status.rank == UNKNOWN.rank else status for status in outs]
    return outs


def _one(eqn, name, ins) -> _Status:
    if name in MULTILINEAR and ZERO in ins:
        return ZERO
    if all(status.rank <= CONSTANT.rank for status in ins):
        other = MAYBE_ZERO if MAYBE_ZERO in ins else CONSTANT
        return ZERO if _keeps_zero(eqn, name, ins) else other
    worst = max(ins, key=lambda status: status.rank)
    if name in _CALLBACKS and worst.rank <= DEPENDENT.rank:
        name = name_on_host(eqn)
        called = f"`{name}`" if name else "a function"
        return _Status(UNKNOWN.rank, f"it calls {called} on the host with a tangent")
    if worst.rank >= DEPENDENT.rank:
        return worst
    dependent = [i for i, status in enumerate(ins) if status == LINEAR]
    if name == "select_n":
        return _joint(name, ins[1:]) if ins[0].rank < LINEAR.rank else UNKNOWN
    indices = linear_operands(eqn)
    if indices is not None:
        if all(i in indices for i in dependent):
            return _joint(name, [ins[i] for i in indices])
        return _nonlinear("it divides by a tangent") if name == "div" else UNKNOWN
    if name in MULTILINEAR:
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
    if name in _NONLINEAR:
        return _nonlinear(f"it applies `{name}` to a tangent")
    if name == "stop_gradient":
        return _Status(UNKNOWN.rank, "it applies `stop_gradient` to a tangent")
    if name == "bitcast_convert_type":  # before a callback, see `_solvers/host_bits.py`
        return DEPENDENT
    return UNKNOWN


def _keeps_zero(eqn, name, ins) -> bool:
    indices = linear_operands(eqn)
    if indices is not None:
        decisive = [ins[i] for i in indices]
    else:
        decisive = {"convert_element_type": ins, "select_n": ins[1:]}.get(name, [])
    return bool(decisive) and all(status == ZERO for status in decisive)


def _joint(name, ins) -> _Status:
    if all(status in (ZERO, LINEAR, MAYBE_ZERO) for status in ins):
        return LINEAR
    if name in ("add", "sub", "add_any"):
        return _nonlinear("it adds something that no tangent multiplies")
    return DEPENDENT  # a constant part, which may well be zero


def _join(a: _Status, b: _Status) -> _Status:
    """What is known of a value that is either the one or the other."""
    low, high = (a, b) if b.rank > a.rank else (b, a)  # of equals `a`, for loops to end
    return UNKNOWN if low.rank == CONSTANT.rank and high == LINEAR else high


def _cond(cond: Cond, ins: list[_Status]) -> list[_Status]:
    if ins[0].rank >= LINEAR.rank:
        status = ins[0] if ins[0].rank > UNKNOWN.rank else UNKNOWN
        return [status] * len(cond.programs[0].out_avals)
    outs = [_statuses(branch, ins[1:]) for branch in cond.programs]
    result = outs[0]
    for other in outs[1:]:
        result = [_join(a, b) for a, b in zip(result, other, strict=True)]
    return result


def _scan(scan: Scan, ins: list[_Status]) -> list[_Status]:
    n = scan.n_carry
    consts, carry = ins[: scan.n_consts], ins[scan.n_consts :][:n]
    xs = ins[scan.n_consts + n :]
    while True:  # statuses only rise, so this ends
        outs = _statuses(*scan.programs, [*consts, *carry, *xs])
        joined = [_join(a, b) for a, b in zip(carry, outs[:n], strict=True)]
        if joined == carry:
            return [*carry, *outs[n:]]
        carry = joined
