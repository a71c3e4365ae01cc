"""Evaluate a jaxpr with tangents that are known to be zero, without the terms they are in.

A rule is linear in its tangents, so the terms of arguments that are not being differentiated
are zero. Multiplied by an infinite or undefined factor they would be NaN; here they are not
computed at all (clause 2 of the contract).

Each value has a flag. `True`: it is zero because inputs are. `None`: it is zero, or an array of
zeros, as the program says so. `False`: nothing is known. What the program says to be zero is no
reason to drop a factor, as `0 * nan` is what the user wrote; but it does not make a sum with a
known zero anything else than zero.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from .evaluate import bind, enter, evaluate
from .linearity import linear_operands, MULTILINEAR
from .structure import Call, Checkpoint, Cond, Scan, structure, While
from .versions import assigns_shardings


Flag = bool | None


def evaluate_with_zeros(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program, `None` being zero, in `args` as well as in the outputs.

    An equation of which not enough is known gets arrays of zeros. (Its derivative at zero would
    do without, but drops the outputs that do not depend on the inputs at all.)
    """
    return _evaluate(program, args, [x is None for x in args])


def _evaluate(program: ClosedJaxpr, args: Sequence[Any], flags: Sequence[Flag]) -> list[Any]:
    pairs = [(None if f is True else x, f) for x, f in zip(args, flags, strict=True)]
    constant = lambda x: (x, _flag_of_constant(x))
    out = evaluate(program, pairs, _evaluate_equation, constant=constant)
    return [x for x, _ in out]


def _evaluate_equation(eqn: Any, pairs: list[tuple[Any, Flag]]) -> Sequence[tuple[Any, Flag]]:
    values, flags = [x for x, _ in pairs], [flag for _, flag in pairs]
    out_flags = _flags_of_equation(eqn, flags)
    if True not in flags:
        out = bind(eqn, values)
    elif out_flags and all(flag is True for flag in out_flags) and not eqn.effects:
        out = [None] * len(out_flags)
    else:
        out = _evaluate_partly(eqn, values, flags, out_flags)
    return list(zip(out, out_flags, strict=True))


def _evaluate_partly(eqn, values, flags, out_flags) -> Sequence[Any]:
    """An equation that some zeros enter, and of which not all outputs are known zeros."""
    known, name = structure(eqn), eqn.primitive.name
    if isinstance(known, Call) and not assigns_shardings(eqn.params):
        return _evaluate(*known.programs, values, flags)
    # A `CallWithRule` is not entered, as its rule would be lost.
    if isinstance(known, Checkpoint | Scan | While) or (
        isinstance(known, Cond) and not known.by_platform
    ):
        return _enter(eqn, known, values, flags, out_flags)
    if name in ("add", "add_any", "sub"):  # one of two operands is left
        x = jnp.negative(values[1]) if values[0] is None and name == "sub" else None
        x = (values[1] if values[0] is None else values[0]) if x is None else x
        return [jnp.broadcast_to(x, eqn.outvars[0].aval.shape)]
    out = bind(eqn, _with_zeros(values, eqn.invars))
    return [None if flag is True else x for x, flag in zip(out, out_flags, strict=True)]


def _enter(eqn, known, values, flags, out_flags) -> Sequence[Any]:
    """Evaluate the programs of a checkpoint, a loop or branches with zeros.

    What is carried or returned is `None` where it is always zero, and an array everywhere else.
    """
    first, last = _carry(known)
    flags = list(flags)
    flags[first:last] = _flags_of_carry(known, flags)
    values = [
        None if flag is True else x
        for x, flag in zip(_with_zeros(values, eqn.invars), flags, strict=True)
    ]

    def run(program, values, extra):
        if extra is not None:  # the condition of a `while_loop`, which is not an output
            n = known.n_cond_consts
            out = _evaluate(program, values, [*flags[:n], *flags[first:last]])
            return _with_zeros(out, program.jaxpr.outvars)
        out = _evaluate(program, values, _flags_inside(known, flags))
        dense = _with_zeros(out, program.jaxpr.outvars)
        return [None if f is True else x for x, f in zip(dense, out_flags, strict=True)]

    extras = [(), None] if isinstance(known, While) else None
    return enter(eqn, values, run, extras)


def _with_zeros(values, variables) -> list[Any]:
    return [
        ad.zeros_like_aval(v.aval) if x is None else x
        for x, v in zip(values, variables, strict=True)
    ]


# ---------------------------------------------------------------- flags


def _flags_of_equation(eqn: Any, flags: Sequence[Flag]) -> list[Flag]:
    known = structure(eqn)
    if known is None:
        return _flags_by_name(eqn, flags)
    if isinstance(known, Cond):
        branches = [_flags_of_program(branch, flags[1:]) for branch in known.programs]
        return [_either(*outs) for outs in zip(*branches, strict=True)]
    if not isinstance(known, Scan | While):
        return _flags_of_program(*known.programs, flags)
    first, last = _carry(known)
    carry = _flags_of_carry(known, flags)
    inside = _flags_inside(known, [*flags[:first], *carry, *flags[last:]])
    out = _flags_of_program(known.programs[-1], inside)
    return [*carry, *out[len(carry) :]]


def _flags_of_carry(known, flags) -> list[Flag]:
    """The flags that the carry of a loop has in all of its steps."""
    first, last = _carry(known)
    carry = list(flags[first:last])
    while carry:  # an element only loses its flag, so this ends
        inside = _flags_inside(known, [*flags[:first], *carry, *flags[last:]])
        out = _flags_of_program(known.programs[-1], inside)
        new = [_either(a, b) for a, b in zip(carry, out, strict=False)]
        if new == carry:
            break
        carry = new
    return carry


def _flags_inside(known, flags) -> Sequence[Flag]:
    """The flags of the inputs of the program that is run with these operands."""
    if isinstance(known, Cond):
        return flags[1:]
    return flags[known.n_cond_consts :] if isinstance(known, While) else flags


def _carry(known) -> tuple[int, int]:
    """Where the carry of a loop begins and ends among the operands."""
    if isinstance(known, Scan):
        return known.n_consts, known.n_consts + known.n_carry
    if isinstance(known, While):
        first = known.n_cond_consts + known.n_body_consts
        return first, first + len(known.programs[1].out_avals)
    return 0, 0


def _flags_of_program(program: ClosedJaxpr, flags: Sequence[Flag]) -> list[Flag]:
    return evaluate(program, flags, _flags_of_equation, constant=_flag_of_constant)


def _flags_by_name(eqn, flags) -> list[Flag]:
    name, n = eqn.primitive.name, len(eqn.outvars)
    if name == "optimization_barrier":
        return list(flags)
    if name in MULTILINEAR:
        return [True in flags] * n
    if name == "convert_element_type":
        is_inexact = jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact)
        return [flags[0] if is_inexact or flags[0] is None else False]
    if name == "select_n":
        return [_either(*flags[1:])] * n
    indices = linear_operands(eqn)
    if indices is None or not indices:
        return [False] * n
    return [_either(*(flags[i] for i in indices))] * n


def _either(*flags: Flag) -> Flag:
    """The flag of a value that is one of these, or their sum."""
    if False in flags:
        return False
    return True if True in flags else None


def _flag_of_constant(x: Any) -> Flag:
    is_number = isinstance(x, int | float | complex | np.ndarray | np.generic)
    is_scalar = is_number and np.ndim(x) == 0 and np.result_type(x) != float0
    return None if is_scalar and x == 0 else False
