"""Find where a derivative becomes zero, from what was recorded while it was evaluated.

The walk begins at the output, which is zero, and goes back through the program: from an output
that is zero to the operands that it depends on, as long as these are zero. Where one is not,
the derivative ends. So a product with zero is not named if another term of its sum is not zero.

In a loop, what is walked is an array of flags: one for each step.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from ..._jaxprs.structure import Cond, Scan, structure
from .values import Found, FoundInEquation, Plan, Watched


@dataclasses.dataclass(frozen=True)
class End:
    """An equation of a derivative where it becomes zero.

    - `enclosing`: the equations that it is in, outermost first.
    - `step`: of each loop around it, the last one where that happens.
    - `zero_factors`: the source of each factor that is zero everywhere: the name of an input or
        an equation.
    - `overlaps`: whether a term of a product has two factors that are not zero.
    - `cancels`: whether a term of a product is not zero.
    - `units`: for each axis of the output, the indices along it where it ends, and how many
        there are in all.
    """

    eqn: Any
    enclosing: tuple[Any, ...]
    step: tuple[int, ...]
    zero_factors: Sequence[Any]
    overlaps: bool
    cancels: bool
    units: Sequence[tuple[tuple[int, ...], int]]


def find_ends(plan: Plan, found: Found, output: int) -> list[End]:
    """Where the derivative ends that an output depends on, which is zero."""
    return _walk(plan, found, {output: np.ones((), bool)}, ())[0]


# What is walked, by the index of an input or output. A flag is a scalar or an array of NumPy.
_Flags = Any
_Marks = dict[int, _Flags]


def _walk(
    plan: Plan, found: Found, outputs: Mapping[int, _Flags], enclosing
) -> tuple[list[End], _Marks]:
    """The ends, and the inputs that are reached."""
    jaxpr = plan.program.jaxpr
    marks: dict[Any, _Flags] = {}
    for k, mark in outputs.items():
        _mark(marks, jaxpr.outvars[k], mark)
    result: list[End] = []
    pairs = zip(plan.watched.values(), found.equations, strict=True)
    for watched, found_here in reversed(list(pairs)):
        wanted = {
            k: mark
            for k, v in enumerate(watched.eqn.outvars)
            if v in marks and np.any(mark := marks[v] & ~found_here.outs[k])
        }
        if wanted:
            ends, reached = _walk_equation(watched, found_here, wanted, enclosing)
            result = ends + result
            for i, mark in reached.items():
                _mark(marks, watched.eqn.invars[i], mark)
    return result, {k: marks[v] for k, v in enumerate(jaxpr.invars) if v in marks}


def _mark(marks: dict[Any, _Flags], key: Any, mark: _Flags):
    if not isinstance(key, Literal):
        marks[key] = marks[key] | mark if key in marks else mark


def _walk_equation(
    watched: Watched, found: FoundInEquation, wanted: _Marks, enclosing
) -> tuple[list[End], _Marks]:
    is_in = dict(zip(watched.ins, found.ins, strict=True))
    ends, inside = _walk_inner(watched, found, wanted, (*enclosing, watched.eqn))
    event = np.zeros((), bool)
    reached: _Marks = {}
    if ends or inside:
        for i, mark in inside.items():
            if i in is_in:
                event = event | (mark & is_in[i])
                _mark(reached, i, mark & ~is_in[i])
        if ends:
            return ends, reached
    else:
        for k, mark in wanted.items():
            operands = [i for i in watched.reads[k] if i in is_in]
            ends_here = mark & np.logical_or.reduce([is_in[i] for i in operands] or [False])
            event = event | ends_here
            for i in operands:
                _mark(reached, i, mark & ~ends_here)
    return [_end_at(watched, found, enclosing, event)] if np.any(event) else [], reached


def _walk_inner(watched, found, wanted: _Marks, enclosing) -> tuple[list[End], _Marks]:
    """The same in the inner programs; what is reached are operands of the equation."""
    known = structure(watched.eqn)
    if isinstance(known, Scan) and watched.inner:
        return _walk_scan(known, watched, found, wanted, enclosing)
    result: list[End] = []
    reached: _Marks = {}
    for plan, inner in zip(watched.inner, found.inner, strict=True):
        ends, marks = _walk(plan, inner, wanted, enclosing)
        result += ends
        for i, mark in marks.items():
            _mark(reached, i + isinstance(known, Cond), mark)
    return result, reached


def _walk_scan(known: Scan, watched, found, wanted: _Marks, enclosing):
    if not known.length:
        return [], {}
    (plan,), (inner,) = watched.inner, found.inner
    n, first = known.n_carry, known.n_consts
    outputs = {k: _all_steps(known, mark, only_last=k < n) for k, mark in wanted.items()}
    while True:  # what is walked only grows, so this ends
        ends, inputs = _walk(plan, inner, outputs, enclosing)
        grown = dict(outputs)
        for k in range(n):
            if first + k in inputs:
                mark = _extended(known, inputs[first + k], ~inner.inputs[first + k])
                _mark(grown, k, _of_step_before(known, mark))
        if all(np.array_equal(grown[k], outputs.get(k, False)) for k in grown):
            break
        outputs = grown
    reached: _Marks = {}
    for i, mark in inputs.items():
        is_carry = first <= i < first + n
        begin = mark[..., -1 if known.reverse else 0]
        _mark(reached, i, begin if is_carry else np.any(mark, -1))
    return ends, reached


def _all_steps(known: Scan, mark: _Flags, *, only_last: bool) -> _Flags:
    steps = np.ones(known.length, bool)
    if only_last:
        steps[:] = False
        steps[0 if known.reverse else -1] = True
    return mark[..., None] & steps


def _extended(known: Scan, mark: _Flags, is_zero: _Flags) -> _Flags:
    """Flags of steps, continued to all steps before as long as the carry is zero there.

    Step after step the walk would do the same. It would take as many rounds as there are steps.
    """
    mark = mark.copy()
    steps = range(known.length)[1:] if known.reverse else range(known.length - 1)[::-1]
    for t in steps:
        mark[..., t] |= mark[..., t - 1 if known.reverse else t + 1] & is_zero[..., t]
    return mark


def _of_step_before(known: Scan, mark: _Flags) -> _Flags:
    """Flags of the carry that comes into steps, as flags of the carry that steps return."""
    result = np.zeros_like(mark)
    if known.reverse:
        result[..., 1:] = mark[..., :-1]
    else:
        result[..., :-1] = mark[..., 1:]
    return result


def _end_at(watched: Watched, found: FoundInEquation, enclosing, event: _Flags) -> End:
    steps = np.argwhere(event)
    zero_factors = [
        watched.sources[i]
        for i, flag in zip(watched.factors, found.factors, strict=True)
        if not np.any(flag & event)
    ]
    units = []
    for before, after in found.units:
        size = before.shape[-1]
        before, after = (np.any(x.reshape(-1, size), 0) for x in (before, after))
        units.append((tuple(np.flatnonzero(before & ~after).tolist()), size))
    overlaps, cancels = (bool(np.any(x & event)) for x in (found.overlaps, found.cancels))
    step = tuple(steps[-1].tolist()) if len(steps) else ()
    return End(watched.eqn, enclosing, step, zero_factors, overlaps, cancels, units)


# ---------------------------------------------------------------- gates


def find_gates(plan: Plan, found: Found, output: int) -> list[End]:
    """The equations whose units were recorded and that an output depends on, in the order of
    the derivative."""
    return list(_gates(plan, found, {output}, ()))


def _gates(plan: Plan, found: Found, outputs: set[int], enclosing) -> Iterator[End]:
    for watched, here, wanted in reversed(list(_needed(plan, found, outputs)[0])):
        if here.units and 0 in wanted:
            yield _end_at(watched, here, enclosing, here.ins[0])
        known = structure(watched.eqn)
        for inner, found_inner in zip(watched.inner, here.inner, strict=True):
            needed = wanted
            while isinstance(known, Scan):  # a carry goes into the next step
                _, inputs = _needed(inner, found_inner, needed)
                carry = {i - known.n_consts for i in inputs} & set(range(known.n_carry))
                if carry <= needed:
                    break
                needed = needed | carry
            yield from _gates(inner, found_inner, needed, (*enclosing, watched.eqn))


def _needed(plan: Plan, found: Found, outputs: set[int]):
    """The equations that outputs depend on, last ones first, with the indices of their outputs
    that are needed; and the inputs that are."""
    jaxpr = plan.program.jaxpr
    needed: dict[Any, _Flags] = {}
    for k in outputs:
        _mark(needed, jaxpr.outvars[k], np.ones((), bool))
    result = []
    for watched, here in reversed(
        list(zip(plan.watched.values(), found.equations, strict=True))
    ):
        wanted = {k for k, v in enumerate(watched.eqn.outvars) if v in needed}
        if wanted:
            result.append((watched, here, wanted))
            for i in set().union(*(watched.reads[k] for k in wanted)):
                _mark(needed, watched.eqn.invars[i], np.ones((), bool))
    return result, {i for i, v in enumerate(jaxpr.invars) if v in needed}
