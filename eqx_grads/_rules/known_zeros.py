"""Evaluate a jaxpr with tangents that are known to be zero, without the terms they are in.

A rule is linear in its tangents, so the terms of arguments that are not being differentiated
are zero. Multiplied by an infinite or undefined factor they would be NaN; here they are not
computed at all (clause 2 of the contract).

Each value has a flag. `True`: it is zero because inputs are. `None`: it is zero, or an array of
zeros, as the program says so. `False`: nothing is known. A zero of the program is not a reason
to drop a factor, because the user wrote `0 * nan`. But its sum with a known zero is zero.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from .._jaxprs.dependence import variables
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.interpret import Domain, interpret, Interpretation, Step
from .._jaxprs.primitives import kind_of, linear_operands
from .._jaxprs.structure import Call, Checkpoint, Cond, Scan, Structure, structure, While
from .._jaxprs.versions import assigns_shardings


Flag = bool | None


def evaluate_with_zeros(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program, `None` being zero, in `args` as well as in the outputs.

    If too little is known of an equation, it gets arrays of zeros. (Its derivative at zero
    needs no such arrays, but drops the outputs that do not depend on the inputs at all.)
    """
    flags = interpret(program, [x is None for x in args], _ZEROS)
    return _evaluate(flags, args)


def _evaluate(flags: Interpretation[Flag], args: Sequence[Any]) -> list[Any]:
    """The outputs. Inputs and outputs are `None` where their flag is `True`."""
    steps, used = iter(flags.steps), set(variables(flags.program.jaxpr.outvars))
    for step in reversed(flags.steps):
        if _is_needed(step, used):
            pairs = zip(step.eqn.invars, step.ins, strict=True)
            used.update(variables(v for v, f in pairs if f is not True))

    def hook(eqn, values):
        step = next(steps)
        if not _is_needed(step, used):  # such as a factor of a zero, which may be NaN
            return [None] * len(step.outs)
        values = [None if f is True else x for f, x in zip(step.ins, values, strict=True)]
        return _evaluate_partly(step, values) if True in step.ins else bind(eqn, values)

    return evaluate(flags.program, args, hook)


def _is_needed(step: Step[Flag], used: set[Any]) -> bool:
    pairs = zip(step.eqn.outvars, step.outs, strict=True)
    return bool(step.eqn.effects) or any(v in used and f is not True for v, f in pairs)


def _evaluate_partly(step: Step[Flag], values: list[Any]) -> Sequence[Any]:
    """An equation with some zeros among its operands, and other outputs than known zeros."""
    eqn, known, name = step.eqn, structure(step.eqn), step.eqn.primitive.name
    if isinstance(known, Call) and not assigns_shardings(eqn.params):
        return _evaluate(step.inner[0], values)
    # A `CallWithRule` is not entered, as its rule would be lost.
    if isinstance(known, Checkpoint | Scan | While) or (
        isinstance(known, Cond) and not known.by_platform
    ):
        return _enter(step, known, values)
    if name in ("add", "add_any", "sub"):  # one of two operands is left
        x, y = values
        x = x if y is None else jnp.negative(y) if name == "sub" else y
        return [jnp.broadcast_to(x, eqn.outvars[0].aval.shape)]
    return _with_flags(bind(eqn, _with_zeros(values, eqn.invars)), step.outs)


def _enter(step: Step[Flag], known: Structure, values: list[Any]) -> Sequence[Any]:
    """Evaluate the programs of a checkpoint, a loop or branches with zeros.

    What is carried or returned is `None` where it is always zero, and an array everywhere else.
    """
    values = _with_zeros(values, step.eqn.invars)
    if isinstance(known, Scan | While):
        first, last = known.n_before_carry, known.n_before_carry + known.n_carry
        of_carry = step.outs[: known.n_carry]
        values[first:last] = _with_flags(values[first:last], of_carry)

    inner = {id(flags.program.jaxpr): flags for flags in step.inner}

    def run(program, values, _):
        out = _with_zeros(_evaluate(inner[id(program.jaxpr)], values), program.jaxpr.outvars)
        is_condition = isinstance(known, While) and program.jaxpr is step.inner[0].program.jaxpr
        return out if is_condition else _with_flags(out, step.outs)

    return enter(step.eqn, values, run)


def _with_flags(values: Sequence[Any], flags: Sequence[Flag]) -> list[Any]:
    return [None if f is True else x for x, f in zip(values, flags, strict=True)]


def _with_zeros(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    return [
        ad.zeros_like_aval(v.aval) if x is None else x
        for x, v in zip(values, variables, strict=True)
    ]


# ---------------------------------------------------------------- flags


def _flags_of_outputs(eqn: Any, flags: Sequence[Flag], _) -> list[Flag]:
    kind, n = kind_of(eqn), len(eqn.outvars)
    if kind.identity:
        return list(flags)
    if kind.linear == "each":
        return [True in flags] * n
    if eqn.primitive.name == "convert_element_type":
        is_inexact = jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact)
        return [flags[0] if is_inexact or flags[0] is None else False]
    if eqn.primitive.name == "select_n":
        return [_either(*flags[1:])] * n
    indices = linear_operands(eqn)
    return [_either(*(flags[i] for i in indices)) if indices else False] * n


def _either(*flags: Flag) -> Flag:
    """The flag of a value that is one of several values, or their sum."""
    if False in flags:
        return False
    return True if True in flags else None


def _flag_of_constant(x: Any) -> Flag:
    is_number = isinstance(x, int | float | complex | np.ndarray | np.generic)
    is_scalar = is_number and np.ndim(x) == 0 and np.result_type(x) != float0
    return None if is_scalar and x == 0 else False


_ZEROS = Domain[Flag](constant=_flag_of_constant, join=_either, apply=_flags_of_outputs)
