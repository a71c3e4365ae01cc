"""Evaluate a program, and record something at each of its equations, also at those in loops.

A tree stands for a program. It has `tree.program`, and `tree.inner[i]`: for equation `i` the
trees of its inner programs, if they are entered.
"""

import abc
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._jaxprs.evaluate import bind, enter, evaluate, where_on, with_fixed_dtypes
from ..._jaxprs.structure import Cond, structure, While


class AbstractRecorder(abc.ABC):
    """What is recorded. A record is a PyTree of arrays."""

    @abc.abstractmethod
    def of_equation(
        self,
        tree: Any,
        i: int,
        values: Sequence[Any],
        outs: Sequence[Any],
        inside: Sequence[Any],
    ) -> tuple[Sequence[Any], Any]:
        """What is to be used as the outputs of equation `i`, and a record.

        - `inside`: the records of its inner programs.
        """

    @abc.abstractmethod
    def of_program(self, values: Sequence[Any], records: Sequence[Any]) -> Any:
        """The record of a program, from its inputs and the records of its equations."""


def record(
    tree: Any, values: Sequence[Any], recorder: AbstractRecorder
) -> tuple[list[Any], Any]:
    """The outputs of a program, and its record.

    The record of the body of a scan has a leading axis for the steps. That of a `while_loop`,
    which has no fixed number of steps, is summed over them. That of a branch that is not taken
    is zero. The result is not meant to be differentiated.
    """
    records = []
    positions = enumerate(tree.inner)

    def hook(eqn, values):
        i, inner = next(positions)
        if inner:
            outs, inside = record_inner(eqn, inner, values, recorder)
        else:
            outs, inside = bind(eqn, values), []
        outs, found = recorder.of_equation(tree, i, values, outs, inside)
        records.append(found)
        return outs

    outs = evaluate(tree.program, values, hook)
    return outs, recorder.of_program(values, records)


def record_inner(
    eqn: Any, inner: Sequence[Any], values: Sequence[Any], recorder: AbstractRecorder
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The outputs of an equation, and the records of its inner programs."""
    known = structure(eqn)
    if isinstance(known, While):
        return record_while(known, inner, values, recorder)[:2]
    if isinstance(known, Cond):
        nothing = [_nothing(tree, values[1:], recorder) for tree in inner]

        def branch(k, values):
            outs, found = record(inner[k], values, recorder)
            return outs, [*nothing[:k], found, *nothing[k + 1 :]]

        branches = [ft.partial(branch, k) for k in range(len(inner))]
        return jax.lax.switch(values[0], branches, values[1:])

    [tree] = inner

    def run(program, values, extra):
        del program, extra
        outs, found = record(tree, values, recorder)
        return [*outs, found]

    *outs, found = enter(eqn, values, run)
    return outs, [found]


def record_while(
    loop: While, inner: Sequence[Any], values: Sequence[Any], recorder: AbstractRecorder
) -> tuple[Sequence[Any], Sequence[Any], Any, Any]:
    """As `record_inner`, and for each element of the record of the body the first step at which
    it is not zero, and the number of steps. The condition is not recorded."""
    cond_consts, rest = values[: loop.n_cond_consts], values[loop.n_cond_consts :]
    body_consts, init = rest[: loop.n_body_consts], rest[loop.n_body_consts :]

    def is_on(state):
        return record(inner[0], [*cond_consts, *state[0]], recorder)[0][0]

    def body(state):
        carry, found, first, step = state
        outs, new = record(inner[1], [*body_consts, *carry], recorder)
        is_first = jax.tree.map(lambda x, y: (x == 0) & (y != 0), found, new)
        first = jax.tree.map(lambda b, x: jnp.where(b, step, x), is_first, first)
        outs = with_fixed_dtypes(outs)
        outs = where_on(is_on(state), outs, carry) if loop.is_batched else outs
        return outs, jax.tree.map(jnp.add, found, new), first, step + 1

    of_cond = _nothing(inner[0], [*cond_consts, *init], recorder)
    of_body = _nothing(inner[1], [*body_consts, *init], recorder)
    first = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), of_body)
    start = (with_fixed_dtypes(list(init)), of_body, first, jnp.int32(0))
    any_on = (lambda state: jnp.any(is_on(state))) if loop.is_batched else is_on
    carry, found, first, n_steps = jax.lax.while_loop(any_on, body, start)
    return carry, [of_cond, found], first, n_steps


def _nothing(tree, values, recorder):
    """A record of zeros."""
    shapes = jax.eval_shape(lambda values: record(tree, values, recorder)[1], values)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
