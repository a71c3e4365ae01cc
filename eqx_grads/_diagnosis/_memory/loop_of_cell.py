"""Whether a traced loop does what a recurrent layer does: run one cell over a sequence."""

import dataclasses
import functools as ft
from collections.abc import Iterable, Set
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from ..._jaxprs.dependence import variables, without_unused
from ..._jaxprs.evaluate import bind, enter, evaluate
from ..._jaxprs.structure import Call, inner_programs, Scan, structure
from ..._jaxprs.versions import assigns_shardings
from .._programs.propagate import is_inexact
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


def loop_of_cell(scan: Scan, cell: int, n_states: int) -> LoopOfCell | None:
    """What a loop does with a cell, the layer of this index; `None` if no layer does the same.

    In each step, the cell is called once, with its state, which nothing else uses. The next
    state is what the cell returns, or the old state where a mask says so. A mask has one
    element for each example. Neither it nor another input of the cell depends on an earlier
    state: they can be computed for all steps before the layer. Only one input is another one in
    each step: the weights are the same.

    - `n_states`: the number of arrays of the state of the cell.
    """
    return _Step(scan, cell).as_loop(n_states)


# Of a `select_n`, all cases are then the same.
_COPIES = ("select_n", "stop_gradient", "copy")
_LAYOUT = ("broadcast_in_dim", "convert_element_type")
_NO_MASK = "none"  # of a derivative that is stopped everywhere


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

    def as_loop(self, n_states: int) -> LoopOfCell | None:
        masks = {}
        for i, (before, after) in enumerate(self.carry):
            mask = self._mask(before, after)
            if mask is not None or self._is_in(self.made, after):
                masks[i] = mask
        # Of the state of an LSTM, both arrays have the same mask, or none.
        has_mask = None not in masks.values()
        if len(self.calls) != 1 or len(masks) != n_states or not self._are_same(masks.values()):
            return None
        old = {self.carry[i][0] for i in masks}
        ends = {id(self.producers[self.carry[i][1]]) for i in masks}
        of_cell = {id(eqn) for eqn in self.in_cell}
        others = [e for e in self.eqns if id(e) not in of_cell | ends and not self._copies(e)]
        if any(self._original(v) in old for eqn in others for v in variables(eqn.invars)):
            return None
        later = self._dependent(old)
        inputs = {self._original(v) for eqn in self.in_cell for v in variables(eqn.invars)}
        if later & (inputs - old - self.made) or later & {m[0] for m in masks.values() if m}:
            return None
        if not old <= inputs or len((inputs & self._varying()) - old - self.made) > 1:
            return None
        if not self._has_order(list(masks)) or not self._passes_derivative(masks):
            return None
        used = self._dependent([*old, *filter(is_inexact, self.xs)])
        does_more = any(v in used and is_inexact(v) for eqn in others for v in eqn.outvars)
        size = self.carry[next(iter(masks))][0].aval.size
        return LoopOfCell(tuple(masks), size, has_mask, does_more)

    def _is_in(self, known: Set[Any], x: Any) -> bool:
        return not isinstance(x, Literal) and self._original(x) in known

    def _mask(self, before: Any, after: Any) -> tuple[Any, int] | None:
        """The mask of a state that is either new or old, and at which of its values that is
        new; `None` if it is anything else."""
        eqn = None if isinstance(after, Literal) else self.producers.get(after)
        if eqn is None or eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
            return None
        mask, *cases = eqn.invars
        for value in (0, 1):
            if self._is_in(self.made, cases[value]) and self._is_in({before}, cases[1 - value]):
                return (mask, value) if self._is_same_for_units(mask) else None
        return None

    def _are_same(self, masks: Iterable[tuple[Any, int] | None]) -> bool:
        return len({m and (self._representative(m[0]), m[1]) for m in masks}) == 1

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
    def _originals(self) -> dict[Any, tuple[Any, frozenset[Any]]]:
        """Of each variable with the value of an earlier one, that one, and the masks without
        which it has no derivative: `jax.vmap` of a `cond` makes such copies of its operands."""
        found: dict[Any, tuple[Any, frozenset[Any]]] = {}
        for eqn in self.eqns:
            name = eqn.primitive.name
            values = eqn.invars[1:] if name == "select_n" else eqn.invars
            if name not in _COPIES or any(isinstance(v, Literal) for v in values):
                continue
            cases = [found.get(v, (v, frozenset())) for v in values]
            if len({original for original, _ in cases}) > 1:
                continue
            passing = [masks for _, masks in cases if _NO_MASK not in masks]
            if name == "stop_gradient" or not passing:
                masks = frozenset([_NO_MASK])
            else:
                masks = frozenset().union(*passing)
                if len(passing) < len(cases):
                    masks |= {self._index_in(eqn.invars[0])}
            found[eqn.outvars[0]] = cases[0][0], masks
        return found

    def _original(self, v: Any) -> Any:
        return self._originals[v][0] if v in self._originals else v

    @ft.cached_property
    def _representatives(self) -> dict[Any, Any]:
        """Of each variable, the first one that is computed in the same way, or is the same in
        another shape or dtype."""
        found: dict[Any, Any] = {}
        known: dict[Any, Any] = {}
        for eqn in self.eqns:
            inputs = [str(v) if isinstance(v, Literal) else found.get(v, v) for v in eqn.invars]
            name = eqn.primitive.name
            if name in _LAYOUT and not isinstance(eqn.invars[0], Literal):
                found[eqn.outvars[0]] = inputs[0]
            elif not eqn.effects and not inner_programs(eqn):
                same = known.setdefault((name, str(eqn.params), *inputs), eqn.outvars)
                found.update(zip(eqn.outvars, same, strict=True))
        return found

    def _representative(self, v: Any) -> Any:
        return self._representatives.get(v, v)

    def _index_in(self, mask: Any) -> Any:
        """What a mask is made of: under `jax.vmap`, the index of the branch of a `cond` is
        compared with a number."""
        index = self._representative(mask)
        eqn = self.producers.get(index)
        if eqn is None or eqn.primitive.name != "eq" or not isinstance(eqn.invars[1], Literal):
            return index
        return self._representative(eqn.invars[0])

    def _passes_derivative(self, masks: dict[int, tuple[Any, int] | None]) -> bool:
        """Whether no derivative of the state is stopped, but where a mask selects the other."""
        known = {self._index_in(m[0]) for m in masks.values() if m}
        afters = [self.carry[i][1] for i in masks]
        ends = [self.producers[v] for v in afters]
        users = [e for e in [*self.in_cell, *ends] if not self._copies(e)]
        used = {v for eqn in users for v in variables(eqn.invars)}.union(afters)
        return all(self._originals[v][1] <= known for v in used if v in self._originals)

    def _has_order(self, states: list[int]) -> bool:
        """Whether the two states of an LSTM stay what they are: a matrix multiplies the first
        one, and the new first one is computed from the new second one."""
        if len(states) == 1:
            return True
        products = [e for e in self.in_cell if e.primitive.name == "dot_general"]
        in_products = {self._original(v) for e in products for v in variables(e.invars)}
        is_first = [self.carry[i][0] in in_products for i in states]
        if len(states) != 2 or is_first[0] == is_first[1]:
            return False
        first, second = (self._new(states[is_first.index(b)]) for b in (True, False))
        found = {second}
        for eqn in self.eqns:
            if not found.isdisjoint(variables(eqn.invars)):
                found.update(eqn.outvars)
        return first in found

    def _new(self, state: int) -> Any:
        """What the cell returns for a state."""
        before, after = self.carry[state]
        mask = self._mask(before, after)
        return self._original(self.producers[after].invars[1 + mask[1]] if mask else after)

    def _varying(self) -> set[Any]:
        """What may be another one in each step."""
        found = {*self.xs, *(before for before, _ in self.carry)}
        for eqn in self.eqns:
            if not self._copies(eqn) and any(
                self._original(v) in found for v in variables(eqn.invars)
            ):
                found.update(eqn.outvars)
        return found

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
