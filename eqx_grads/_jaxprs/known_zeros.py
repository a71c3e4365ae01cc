"""Evaluate a jaxpr with tangents that are known to be zero, without the terms they are in.

A rule is linear in its tangents, so the terms of arguments that are not being differentiated
are zero. Multiplied by an infinite or undefined factor they would be NaN; here they are not
computed at all (clause 2 of the contract).

What is zero is told by the statuses of `linearity.py`, in which these inputs are `ZERO`. An
equation that has none of them among its operands is evaluated as it is: if the user wrote
`0 * nan`, it is NaN.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from .evaluate import bind, enter, evaluate
from .interpret import interpret, Interpretation, Step
from .linearity import LINEAR, LINEARITY, Status, ZERO
from .structure import Call, Checkpoint, Cond, Scan, Structure, structure, While
from .versions import assigns_shardings


# Loops that JAX can't transpose too.
_DOMAIN = LINEARITY._replace(enters=lambda known: True)


def evaluate_with_zeros(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program, `None` being zero, in `args` as well as in the outputs.

    If too little is known of an equation, it gets arrays of zeros. (Its derivative at zero
    needs no such arrays, but drops the outputs that do not depend on the inputs at all.)
    """
    statuses = [ZERO if x is None else LINEAR for x in args]
    return _evaluate(interpret(program, statuses, _DOMAIN), args)


def _evaluate(known: Interpretation[Status], args: Sequence[Any]) -> list[Any]:
    """The outputs. No input is `None` unless its status is `ZERO`."""
    steps = iter(known.steps)

    def hook(eqn, values):
        step = next(steps)
        if not any(x is None for x in values):
            return bind(eqn, values)
        if step.outs and all(s == ZERO for s in step.outs) and not eqn.effects:
            return [None] * len(step.outs)
        return _evaluate_partly(step, values)

    return evaluate(known.program, args, hook)


def _evaluate_partly(step: Step[Status], values: list[Any]) -> Sequence[Any]:
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
        x = jnp.negative(values[1]) if values[0] is None and name == "sub" else None
        x = (values[1] if values[0] is None else values[0]) if x is None else x
        return [jnp.broadcast_to(x, eqn.outvars[0].aval.shape)]
    return _without_zeros(bind(eqn, _with_zeros(values, eqn.invars)), step.outs)


def _enter(step: Step[Status], known: Structure, values: list[Any]) -> Sequence[Any]:
    """Evaluate the programs of a checkpoint, a loop or branches with zeros.

    What is carried or returned is `None` where it is always zero, and an array everywhere else.
    """
    values = _with_zeros(values, step.eqn.invars)
    if isinstance(known, Scan | While):
        first, last = known.n_before_carry, known.n_before_carry + known.n_carry
        of_carry = step.outs[: known.n_carry]
        values[first:last] = _without_zeros(values[first:last], of_carry)

    inner = {id(part.program.jaxpr): part for part in step.inner}

    def run(program, values, _):
        part = inner[id(program.jaxpr)]
        out = _evaluate(part, _without_zeros(values, part.ins))
        out = _with_zeros(out, program.jaxpr.outvars)
        is_condition = isinstance(known, While) and program.jaxpr is step.inner[0].program.jaxpr
        return out if is_condition else _without_zeros(out, step.outs)

    return enter(step.eqn, values, run)


def _without_zeros(values: Sequence[Any], statuses: Sequence[Status]) -> list[Any]:
    return [None if s == ZERO else x for x, s in zip(values, statuses, strict=True)]


def _with_zeros(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    return [
        ad.zeros_like_aval(v.aval) if x is None else x
        for x, v in zip(values, variables, strict=True)
    ]
