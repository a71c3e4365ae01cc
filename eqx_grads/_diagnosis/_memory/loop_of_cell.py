"""Whether a traced loop does what a recurrent layer does: run one cell over a sequence."""

import dataclasses
import functools as ft
from collections.abc import Iterable, Set
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from ..._jaxprs.dependence import variables, without_unused
from ..._jaxprs.evaluate import bind, enter, evaluate
from ..._jaxprs.propagate import is_inexact
from ..._jaxprs.structure import Call, Scan, structure
from ..._jaxprs.versions import assigns_shardings
from ..traced_loss import layer_calls


@dataclasses.dataclass(frozen=True)
class LoopOfCell:
    """A loop that a recurrent layer can take the place of.

    - `states`: the indices, in the carry, of the state of the cell. `state_size`: the number of
        elements of its first array.
    - `has_mask`: whether a step keeps the old state where a mask says so.
    - `does_more`: whether a step computes anything of its input or of the new state besides.
    """

    states: tuple[int, ...]
    state_size: int
    has_mask: bool
    does_more: bool


def loop_of_cell(scan: Scan, cell: int) -> LoopOfCell | None:
    """What a loop does with a cell, the layer of this index; `None` if no layer does the same.

    In each step, the cell is called once, with its state, which nothing else uses. The next
    state is what the cell returns, or the old state where a mask says so. A mask has one
    element for each example. Neither it nor another input of the cell depends on an earlier
    state: they can be computed for all steps before the layer.
    """
    return _Step(scan, cell).as_loop()


# Of a `select_n`, all cases are then the same.
_COPIES = ("select_n", "stop_gradient", "copy")


class _Step:
    """The body of a loop, with calls such as `jax.jit` inlined."""

    def __init__(self, scan: Scan, cell: int):
        body = _inlined(scan.programs[0]).jaxpr
        first, last = scan.n_consts, scan.n_consts + scan.n_carry
        self.eqns = body.eqns
        self.xs = body.invars[last:]
        self.carry = list(
            zip(body.invars[first:last], body.outvars[: scan.n_carry], strict=True)
        )
        self.producers = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        of_cell = [[c for c in layer_calls(eqn) if c[0] == cell] for eqn in self.eqns]
        self.calls = {call for calls in of_cell for call in calls}
        self.in_cell = [e for e, calls in zip(self.eqns, of_cell, strict=True) if calls]
        self.made = {v for eqn in self.in_cell for v in eqn.outvars}

    def as_loop(self) -> LoopOfCell | None:
        masks = {}
        for i, (before, after) in enumerate(self.carry):
            mask = self._mask(before, after)
            if mask is not None or self._is_in(self.made, after):
                masks[i] = mask
        # Of the state of an LSTM, both arrays have a mask, or none.
        has_mask = None not in masks.values()
        if len(self.calls) != 1 or not masks or has_mask != any(masks.values()):
            return None
        old = {self.carry[i][0] for i in masks}
        ends = {id(self.producers[self.carry[i][1]]) for i in masks}
        of_cell = {id(eqn) for eqn in self.in_cell}
        others = [e for e in self.eqns if id(e) not in of_cell | ends and not self._copies(e)]
        if any(self._original(v) in old for eqn in others for v in variables(eqn.invars)):
            return None
        later = self._dependent(old)
        inputs = {self._original(v) for eqn in self.in_cell for v in variables(eqn.invars)}
        if later & (inputs - old - self.made) or later.intersection(masks.values()):
            return None
        used = self._dependent([*old, *filter(is_inexact, self.xs)])
        does_more = any(v in used and is_inexact(v) for eqn in others for v in eqn.outvars)
        size = self.carry[next(iter(masks))][0].aval.size
        return LoopOfCell(tuple(masks), size, has_mask, does_more)

    def _is_in(self, known: Set[Any], x: Any) -> bool:
        return not isinstance(x, Literal) and self._original(x) in known

    def _mask(self, before: Any, after: Any) -> Any:
        """The mask of a state that is either new or old; `None` if it is anything else."""
        eqn = None if isinstance(after, Literal) else self.producers.get(after)
        if eqn is None or eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
            return None
        mask, *cases = eqn.invars
        for new, old in (cases, cases[::-1]):
            if self._is_in(self.made, new) and self._is_in({before}, old):
                return mask if self._is_same_for_units(mask) else None
        return None

    def _is_same_for_units(self, mask: Any) -> bool:
        """Whether a mask is broadcast over its last axis, that of the units of the state."""
        if isinstance(mask, Literal) or mask.aval.ndim == 0:
            return not isinstance(mask, Literal)
        eqn = self.producers.get(mask)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        axes, shape = list(eqn.params["broadcast_dimensions"]), eqn.invars[0].aval.shape
        last = mask.aval.ndim - 1
        return last not in axes or shape[axes.index(last)] == 1

    @ft.cached_property
    def _originals(self) -> dict[Any, Any]:
        """Of each variable with the value of an earlier one, that one: `jax.vmap` of a `cond`
        makes such copies of its operands."""
        found: dict[Any, Any] = {}
        for eqn in self.eqns:
            name = eqn.primitive.name
            values = eqn.invars[1:] if name == "select_n" else eqn.invars
            if name in _COPIES and not any(isinstance(v, Literal) for v in values):
                same = {found.get(v, v) for v in values}
                if len(same) == 1:
                    found[eqn.outvars[0]] = same.pop()
        return found

    def _original(self, v: Any) -> Any:
        return self._originals.get(v, v)

    def _copies(self, eqn: Any) -> bool:
        return all(v in self._originals for v in eqn.outvars)

    def _dependent(self, start: Iterable[Any]) -> set[Any]:
        """The variables that depend on these, or did so in an earlier step."""
        found, size = set(start), 0
        while len(found) > size:
            size = len(found)
            for eqn in self.eqns:
                if not found.isdisjoint(variables(eqn.invars)):
                    found.update(eqn.outvars)
            found.update(before for before, after in self.carry if self._is_in(found, after))
        return found


def _inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    run = lambda *args: evaluate(program, args, _inline)
    return without_unused(jax.make_jaxpr(run)(*program.in_avals))


def _inline(eqn: Any, values: list[Any]) -> Any:
    if isinstance(structure(eqn), Call) and not assigns_shardings(eqn.params):
        return enter(eqn, values, lambda program, xs, _: evaluate(program, xs, _inline))
    return bind(eqn, values)
