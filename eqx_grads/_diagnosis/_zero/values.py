"""Evaluate a derivative of a loss, and record what is zero in it.

In the program of a derivative, the values that move are cotangents (in reverse mode) or
tangents (in forward mode). The program is evaluated, and at each equation that something that
moves enters, it is recorded which operands and outputs are zero everywhere.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..._jaxprs.evaluate import bind, evaluate
from ..._jaxprs.primitives import MULTILINEAR
from ..._jaxprs.structure import Call, Checkpoint, Cond, Scan, structure
from .._programs.propagate import is_inexact, operands_of_outputs
from .._programs.record import AbstractRecorder, record


@dataclasses.dataclass(frozen=True)
class _Value:
    """What is known of a value before the program runs.

    - `moves`: whether it is a cotangent or tangent.
    - `source`: the name of the input that it is (transposed or broadcast, for example), or the
        equation that computes it.
    """

    moves: bool = False
    source: Any = None


@dataclasses.dataclass(frozen=True)
class Watched:
    """An equation that something that moves enters.

    - `reads`: for each output, the operands that move and that it depends on.
    - `factors`: the other operands of floats, by index.
    - `sources`: those of the operands, see `_Value`.
    - `inner`: for each inner program, its equations that are watched.
    """

    eqn: Any
    reads: Sequence[set[int]]
    ins: Sequence[int]
    factors: Sequence[int]
    sources: Sequence[Any]
    inner: Sequence["Plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A program, and its equations that are watched, by their index."""

    program: ClosedJaxpr
    watched: dict[int, Watched]

    @ft.cached_property
    def inner(self) -> list[Sequence["Plan"]]:
        n = len(self.program.eqns)
        return [self.watched[i].inner if i in self.watched else () for i in range(n)]


class FoundInEquation(NamedTuple):
    """What was found at an equation. In a loop, there is a leading axis for its steps.

    - `ins`, `outs`, `factors`: whether something is not zero in the operands that move, in the
        outputs, and in the other operands.
    - `overlaps`: whether a term of a product has two factors that are not zero.
    - `cancels`: whether a term of a product is not zero.
    - `units`: for each axis, the indices along it where the operand that moves is not zero, and
        those where the output is not.
    - `inner`: for each inner program.
    """

    ins: list[Any]
    outs: list[Any]
    factors: list[Any]
    overlaps: Any
    cancels: Any
    units: list[tuple[Any, Any]]
    inner: list["Found"]


class Found(NamedTuple):
    """What was found in a program: whether each input is not zero somewhere, and the equations
    that are watched."""

    inputs: list[Any]
    equations: list[FoundInEquation]


class WatchedDerivative(AbstractRecorder):
    """The program of a derivative, watched while it is evaluated.

    - `names`: a name for each input, or `None` for one that moves.
    - `counts_units`: whether the units that die are wanted for an equation.
    """

    def __init__(
        self,
        program: ClosedJaxpr,
        names: Sequence[str | None],
        counts_units: Callable[[Any], bool],
    ):
        self._counts_units = counts_units
        ins = [_Value(name is None, name) for name in names]
        _, self.plan = _plan(program, ins)

    def __call__(self, *values: Any) -> Any:
        """The `Found` of the program, with arrays of NumPy.

        Operation by operation, and loops compiled: where each value is looked at, XLA fuses all
        that it depends on once more, and takes minutes for some hundred operations.
        """
        return jax.tree.map(np.asarray, record(self.plan, values, self)[1])

    def of_equation(self, tree, i, values, outs, inside):
        watched = tree.watched.get(i)
        found = None if watched is None else self._look_at(watched, values, outs, inside)
        return outs, found

    def of_program(self, values, records) -> Found:
        return Found([_any(x) for x in values], [x for x in records if x is not None])

    def _look_at(self, watched: Watched, values, outs, inner) -> FoundInEquation:
        moving = [values[i] for i in watched.ins]
        factors = [values[i] for i in watched.factors]
        overlaps = cancels = jnp.zeros((), bool)
        if watched.eqn.primitive.name in MULTILINEAR and len(moving) == len(factors) == 1:
            # The same product, of what can't cancel.
            is_in = [jnp.asarray(x != 0, x.dtype) for x in values]
            overlaps = _any(bind(watched.eqn, is_in)[0])
            sizes = [jnp.asarray(jnp.abs(x), x.dtype) for x in values]
            cancels = _any(bind(watched.eqn, sizes)[0])
        same = [x for x in moving if jnp.shape(x) == jnp.shape(outs[0])]
        units = []
        if same and self._counts_units(watched.eqn):
            axes = range(jnp.ndim(outs[0]))
            units = [(_any_along(same[0], a), _any_along(outs[0], a)) for a in axes]
        ins, outs, factors = ([_any(x) for x in xs] for xs in (moving, outs, factors))
        return FoundInEquation(ins, outs, factors, overlaps, cancels, units, inner)


def _any(x):
    if not jnp.issubdtype(jnp.result_type(x), jnp.number):
        return jnp.zeros((), bool)  # a float0
    return jnp.any(x != 0)


def _any_along(x, axis):
    """For each index along an axis, whether something is not zero there."""
    return jnp.any(x != 0, [i for i in range(jnp.ndim(x)) if i != axis])


# ---------------------------------------------------------------- what to watch

_COPIES = frozenset(
    "reshape broadcast_in_dim transpose squeeze convert_element_type copy slice rev".split()  # noqa: SIM905
)


def _plan(program: ClosedJaxpr, ins: Sequence[_Value]) -> tuple[list[_Value], Plan]:
    watched: dict[int, Watched] = {}
    positions = iter(range(len(program.eqns)))

    def hook(eqn, ins):
        i = next(positions)
        outs, watch = _plan_equation(eqn, ins)
        if watch is not None:
            watched[i] = watch
        return outs

    outs = evaluate(program, ins, hook, constant=_constant)
    return outs, Plan(program, watched)


def _constant(x) -> _Value:
    del x
    return _Value()


def _plan_equation(eqn, ins: list[_Value]) -> tuple[Sequence[_Value], Watched | None]:
    known = structure(eqn)
    if not any(v.moves for v in ins):
        if isinstance(known, Call):
            return _plan(*known.programs, ins)[0], None
        is_copy = eqn.primitive.name in _COPIES and ins[0].source is not None
        return [_Value(False, ins[0].source if is_copy else eqn)] * len(eqn.outvars), None
    reads = operands_of_outputs(eqn, [v.moves for v in ins])
    outs = [_Value(bool(r), None if r else eqn) for r in reads]
    inner = []
    match known:
        case Call() | Checkpoint():
            inner = [_plan(*known.programs, ins)[1]]
        case Scan():
            carry = [dataclasses.replace(out, source=None) for out in outs[: known.n_carry]]
            first, last = known.n_consts, known.n_consts + known.n_carry
            inner = [_plan(*known.programs, [*ins[:first], *carry, *ins[last:]])[1]]
        case Cond(by_platform=False):
            inner = [_plan(branch, ins[1:])[1] for branch in known.programs]
    moving = [i for i, v in enumerate(ins) if v.moves and is_inexact(eqn.invars[i])]
    factors = [i for i, v in enumerate(ins) if not v.moves and is_inexact(eqn.invars[i])]
    watched = Watched(eqn, reads, moving, factors, [v.source for v in ins], inner)
    return outs, watched
