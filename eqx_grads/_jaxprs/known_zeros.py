"""Evaluate a program some of whose inputs are known to be zero, and compute no term of these.

A rule is linear in its tangents, so the terms of arguments that are not being differentiated
are zero. Multiplied by an infinite or undefined factor they would be NaN; here they are not
computed at all (clause 2 of the contract).
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from .evaluate import bind, enter, evaluate
from .linearity import linear_operands, MULTILINEAR
from .structure import Call, Checkpoint, Cond, Scan, structure, While
from .versions import assigns_shardings


def evaluate_with_zeros(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program, `None` being zero, in `args` as well as in the outputs.

    An equation of which not enough is known gets arrays of zeros. (Its derivative at zero would
    do without, but drops the outputs that do not depend on the inputs at all.)
    """
    return evaluate(program, args, _evaluate_equation)


def _evaluate_equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name == "convert_element_type" and _is_number(values[0]):  # stays a number
        return [np.asarray(values[0]).astype(eqn.params["new_dtype"])]
    if all(x is not None for x in values):
        return bind(eqn, values)
    flags = [True if x is None else _flag_of_number(x) for x in values]
    is_zero = _zero_outputs(eqn, flags)
    if all(is_zero):
        return [None] * len(is_zero)
    known = structure(eqn)
    if isinstance(known, Call) and not assigns_shardings(eqn.params):
        return evaluate_with_zeros(*known.programs, values)
    # A `CallWithRule` is not entered, as its rule would be lost.
    if isinstance(known, Checkpoint | Scan | While) or (
        isinstance(known, Cond) and not known.by_platform
    ):
        return _enter(eqn, known, values, is_zero)
    if name in ("add", "add_any"):
        return [x for x in values if x is not None]
    if name == "sub":
        return [jnp.negative(values[1]) if values[0] is None else values[0]]
    out = bind(eqn, _with_zeros(values, eqn.invars))
    return [None if zero else x for x, zero in zip(out, is_zero, strict=True)]


def _enter(eqn, known, values, is_zero) -> Sequence[Any]:
    """Evaluate the programs of a checkpoint, a loop or branches with zeros.

    What is carried or returned is `None` where it is always zero, and an array everywhere else.
    """
    carry = _carry(known)
    for i, zero in zip(range(*carry), is_zero, strict=False):
        if not zero:
            values[i : i + 1] = _with_zeros(values[i : i + 1], eqn.invars[i : i + 1])

    def run(program, values, extra):
        out = evaluate_with_zeros(program, values)
        if extra is not None:  # the condition of a `while_loop`, which is not an output
            return _with_zeros(out, program.jaxpr.outvars)
        dense = _with_zeros(out, program.jaxpr.outvars)
        return [None if zero else x for x, zero in zip(dense, is_zero, strict=True)]

    extras = [(), None] if isinstance(known, While) else None
    return enter(eqn, values, run, extras)


def _with_zeros(values, variables) -> list[Any]:
    return [
        ad.zeros_like_aval(v.aval) if x is None else x
        for x, v in zip(values, variables, strict=True)
    ]


def _carry(known) -> tuple[int, int]:
    """Where the carry of a loop begins and ends among the operands."""
    if isinstance(known, Scan):
        return known.n_consts, known.n_consts + known.n_carry
    if isinstance(known, While):
        first = known.n_cond_consts + known.n_body_consts
        return first, first + len(known.programs[1].out_avals)
    return 0, 0


def _zero_outputs(eqn: Any, flags: Sequence[bool | None]) -> list[bool | None]:
    """Which outputs of an equation are zero if its flagged inputs are.

    The number 0 in a program has the flag `None`. It says nothing of a product, as `0 * nan` is
    what the user wrote, but what is padded with it stays zero.
    """
    known = structure(eqn)
    if known is None:
        return _by_name(eqn, flags)
    if isinstance(known, Cond):
        branches = [_zeros(branch, flags[1:]) for branch in known.programs]
        return [all(zero) for zero in zip(*branches, strict=True)]
    if not isinstance(known, Scan | While):
        return _zeros(*known.programs, flags)
    first, last = _carry(known)
    consts, carry, xs = flags[:first], list(flags[first:last]), flags[last:]
    if isinstance(known, While):
        consts = consts[known.n_cond_consts :]
    while True:  # flags only fall, so this ends
        out = _zeros(known.programs[-1], [*consts, *carry, *xs])
        new = [a and b for a, b in zip(carry, out, strict=False)]
        if new == carry:
            return [*carry, *out[len(carry) :]]
        carry = new


def _zeros(program: ClosedJaxpr, flags: Sequence[bool | None]) -> list[bool | None]:
    return evaluate(program, flags, _zero_outputs, constant=_flag_of_number)


def _flag_of_number(x: Any) -> bool | None:
    return None if _is_number(x) and x == 0 else False


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | complex | np.ndarray | np.generic) and np.ndim(x) == 0


def _by_name(eqn, flags) -> list[bool | None]:
    name, n = eqn.primitive.name, len(eqn.outvars)
    if name == "optimization_barrier":
        return list(flags)
    if name in MULTILINEAR:
        return [any(flags)] * n
    if name == "convert_element_type":
        return [flags[0] if jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact) else False]
    if name == "pad" and flags[1] is None:
        return [flags[0] is True]
    indices = linear_operands(eqn)
    if indices is not None:
        return [all(flags[i] for i in indices)] * n
    return [name == "select_n" and all(flags[1:])] * n
