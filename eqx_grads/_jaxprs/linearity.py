"""Is a traced function linear in its arguments? Decided on its jaxpr, where it can be seen.

Two users: a forward rule that is not linear in its tangents is an error, and a backward
rule that is may be differentiated to drop the terms of dead outputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal


@dataclasses.dataclass(frozen=True)
class _Status:
    """How a value depends on the arguments; the statuses are ordered by `rank`."""

    rank: int
    reason: str = ""


ZERO = _Status(0)  # does not depend on them, and is known to be zero
CONSTANT = _Status(1)  # does not depend on them
LINEAR = _Status(2)
UNKNOWN = _Status(3)  # depends on them in a way that this file does not know


def _nonlinear(reason: str) -> _Status:
    return _Status(4, reason)


def output_statuses(jaxpr: ClosedJaxpr) -> list[_Status]:
    """How each output depends on the inputs, all of which are taken as arguments."""
    consts = [_status_of_constant(c) for c in jaxpr.consts]
    return _run(jaxpr.jaxpr, consts, [LINEAR] * len(jaxpr.jaxpr.invars))


def linear_in(jaxpr: ClosedJaxpr, flags: Sequence[bool]) -> list[_Status]:
    """How each output depends on the flagged inputs."""
    consts = [_status_of_constant(c) for c in jaxpr.consts]
    return _run(jaxpr.jaxpr, consts, [LINEAR if f else CONSTANT for f in flags])


def why_nonlinear(statuses: Sequence[_Status]) -> str | None:
    """What makes an output non-linear, or affine; `None` where nothing can be held
    against any of them."""
    for status in statuses:
        if status.rank == 4:
            return status.reason
        if status == CONSTANT:
            return "it returns something that no tangent multiplies"
    return None


def surely_linear(statuses: Sequence[_Status]) -> bool:
    return all(status in (ZERO, LINEAR) for status in statuses)


def _status_of_constant(x) -> _Status:
    if isinstance(x, Tracer) or not jnp.issubdtype(jnp.result_type(x), jnp.number):
        return CONSTANT  # there is no number to look at
    return CONSTANT if np.any(np.asarray(x)) else ZERO


# Linear in all of their operands together.
_JOINTLY = frozenset(
    """
    neg reshape broadcast_in_dim squeeze expand_dims transpose reduce_sum slice rev real imag
    conj copy copy_p cumsum reduce_window_sum psum psum2 psum_invariant all_gather all_to_all
    ppermute pvary pbroadcast pcast reduce_scatter concatenate pad complex add sub add_any
    sharding_constraint optimization_barrier split device_put fft
    """.split()  # noqa: SIM905
)
# Linear in the operands at these places; the others must not depend on the arguments.
_AT_PLACES = {
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
    "scatter-add": (0, 2),
    "select_and_scatter_add": (0,),
    "div": (0,),
    "triangular_solve": (1,),
}
# Linear in each operand while the others do not depend on the arguments.
_MULTILINEAR = ("mul", "dot_general", "conv_general_dilated")
_NONLINEAR = frozenset(
    """
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp exp2 expm1 log log1p sqrt
    rsqrt cbrt logistic erf erfc erf_inv lgamma digamma igamma igammac polygamma abs sign
    floor ceil round pow square max min rem atan2 clamp nextafter reduce_max reduce_min
    reduce_prod cumprod cummax cummin cumlogsumexp argmax argmin eq ne lt le gt ge is_finite
    sort
    """.split()  # noqa: SIM905
)
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _run(jaxpr, consts, args) -> list[_Status]:
    env: dict[Any, _Status] = {}

    def read(atom):
        if isinstance(atom, Literal):
            return _status_of_constant(atom.val)
        return env[atom]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        statuses = _apply(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, statuses, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn, ins: list[_Status]) -> list[_Status]:
    name, n_out = eqn.primitive.name, len(eqn.outvars)
    if name == "scan" and _knows_layout(eqn.params):
        return _scan(eqn.params, ins)
    if name == "cond" and "branches" in eqn.params:
        return _cond(eqn.params["branches"], ins)
    inner = next((eqn.params[k] for k in _CALLS if k in eqn.params), None)
    if inner is not None and name not in ("scan", "cond", "while"):
        if len(_open(inner).invars) == len(ins):
            return _call(inner, ins)
    return [_one(eqn, name, ins)] * n_out


def _open(jaxpr):
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _call(jaxpr, ins):
    closed = isinstance(jaxpr, ClosedJaxpr)
    consts = [_status_of_constant(c) for c in jaxpr.consts] if closed else []
    return _run(_open(jaxpr), consts, ins)


def _one(eqn, name, ins) -> _Status:
    if name in _MULTILINEAR and ZERO in ins:
        return ZERO
    if all(status in (ZERO, CONSTANT) for status in ins):
        return ZERO if _keeps_zero(name, ins) else CONSTANT
    worst = max(ins, key=lambda status: status.rank)
    if worst.rank >= UNKNOWN.rank:
        return worst
    dependent = [i for i, status in enumerate(ins) if status == LINEAR]
    if name == "select_n":
        return _joint(name, ins[1:]) if ins[0].rank < LINEAR.rank else UNKNOWN
    if name in _JOINTLY:
        return _joint(name, ins)
    if name in _AT_PLACES:
        places = _AT_PLACES[name]
        if all(i in places for i in dependent):
            return _joint(name, [ins[i] for i in places])
        return _nonlinear("it divides by a tangent") if name == "div" else UNKNOWN
    if name in _MULTILINEAR:
        return (
            LINEAR
            if len(dependent) == 1
            else _nonlinear("it multiplies a tangent by a tangent")
        )
    if name == "convert_element_type":
        return LINEAR if jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact) else UNKNOWN
    if name == "integer_pow":
        y = eqn.params["y"]
        return LINEAR if y == 1 else _nonlinear(f"it raises a tangent to the power {y}")
    if name in _NONLINEAR:
        return _nonlinear(f"it applies `{name}` to a tangent")
    return UNKNOWN


def _keeps_zero(name, ins) -> bool:
    if name in _JOINTLY or name == "convert_element_type":
        decisive = ins
    elif name in _AT_PLACES:
        decisive = [ins[i] for i in _AT_PLACES[name]]
    else:
        decisive = ins[1:] if name == "select_n" else []
    return bool(decisive) and all(status == ZERO for status in decisive)


def _joint(name, ins) -> _Status:
    if all(status in (ZERO, LINEAR) for status in ins):
        return LINEAR
    if name in ("add", "sub", "add_any"):
        return _nonlinear("it adds something that no tangent multiplies")
    return UNKNOWN  # a constant part, which may well be zero


def _join(a: _Status, b: _Status) -> _Status:
    """What is known of a value that is either the one or the other."""
    low, high = sorted((a, b), key=lambda status: status.rank)
    return UNKNOWN if (low, high) == (CONSTANT, LINEAR) else high


def _cond(branches, ins):
    if ins[0].rank >= LINEAR.rank:
        return [UNKNOWN] * len(_open(branches[0]).outvars)
    outs = [_call(branch, ins[1:]) for branch in branches]
    result = outs[0]
    for other in outs[1:]:
        result = [_join(a, b) for a, b in zip(result, other, strict=True)]
    return result


def _knows_layout(params) -> bool:
    """Whether this is a `scan` as some JAX up to 0.12 writes it."""
    return "num_consts" in params or hasattr(params.get("ft_in"), "elts")


def scan_counts(params) -> tuple[int, int]:
    """How many of the operands are constants, and how many carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].elts  # JAX 0.12
    return len(consts.elts), len(carry.elts)


def _scan(params, ins):
    n_consts, n_carry = scan_counts(params)
    consts, carry = ins[:n_consts], ins[n_consts : n_consts + n_carry]
    xs = ins[n_consts + n_carry :]
    while True:  # statuses only rise, so this ends
        outs = _call(params["jaxpr"], [*consts, *carry, *xs])
        joined = [_join(a, b) for a, b in zip(carry, outs[:n_carry], strict=True)]
        if joined == carry:
            return [*carry, *outs[n_carry:]]
        carry = joined
