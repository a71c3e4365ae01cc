"""Where a loss stops being differentiable in a leaf of its model, found without running it."""

import copy
import dataclasses
import functools as ft
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from ..._jaxprs.primitives import ELEMENTARY
from ..._jaxprs.structure import CallWithRule, structure, While
from .._programs.propagate import (
    AbstractPropagation,
    differentiable_pairs,
    is_inexact,
    members,
    NOTHING,
    operands_of_outputs,
    propagate,
    Sources,
)
from ..origins import NumberedLoss, Origin


# The bits of `Sources.cut`: the first is set if the value comes from random bits. Two follow
# for each cut: whether the value depends on it, and whether otherwise than by a decision.
_RANDOM, _REACHES, _IS_VALUE = 1, 2, 4
_RANDOM_BITS = ("random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32")


@dataclasses.dataclass(frozen=True)
class Cut:
    """An equation that the derivative does not pass.

    - `use`: what its output decides first: `"while"`, `"cond"`, `"select"`, `"index"`. Empty if
        nothing, or if the loss depends on it otherwise as well.
    - `in_while`: whether the equation is in a `while_loop`.
    - `is_random`: whether random bits decide as well.
    """

    origin: Origin
    use: str
    in_while: bool
    is_random: bool


@dataclasses.dataclass(frozen=True)
class LossStructure:
    """How a loss depends on the leaves of its model, by index.

    - `live`: leaves that it is differentiable in, as far as the program tells.
    - `cuts`: for every leaf that is not live, the equations where a value that is
        differentiable in the leaf is last used. Empty if the loss does not depend on the leaf.
    - `opaque`: equations that JAX can't differentiate. They are taken to be differentiable.
    - `decided_by`: for the number of a `select_n`, the leaves that its predicate depends on.
    """

    live: set[int]
    cuts: dict[int, list[Cut]]
    opaque: list[Origin]
    decided_by: dict[int, set[int]]


def loss_structure(numbered: NumberedLoss) -> LossStructure:
    traced = numbered.traced
    n = len(traced.leaves)
    finder = _CutFinder(numbered)
    ins = [Sources(1 << i) if i < n else NOTHING for i in range(len(traced.values))]
    (loss,) = propagate(traced.program, ins, finder)
    live = members(loss.live)
    reached = _tokens(loss.cut)
    cuts = {
        i: [finder.cut(token, loss) for token in reached if finder.lost[token] >> i & 1]
        for i in range(n)
        if i not in live
    }
    return LossStructure(live, cuts, list(finder.opaque.values()), finder.decided_by())


class _CutFinder(AbstractPropagation):
    """`live` are leaves. `cut` are tokens: one for each equation with an operand that is
    differentiable in a leaf, and an output that depends on it but is not."""

    def __init__(self, numbered: NumberedLoss):
        self._origins = {_key(numbered.origins, o): o for o in numbered.origins}
        self._pairs: dict[Any, list[set[int]]] = {}
        self._forget()

    def _forget(self):
        self.lost: list[int] = []  # for each token, the leaves
        self.opaque: dict[Any, Origin] = {}
        self._tokens: dict[Any, int] = {}
        self._places: list[tuple[Origin, bool]] = []
        self._random: set[int] = set()
        self._uses: dict[int, str] = {}
        self._predicates: dict[int, int] = {}

    def cut(self, token: int, loss: Sources) -> Cut:
        origin, in_while = self._places[token]
        only_decides = not loss.cut & _IS_VALUE << 2 * token
        use = self._uses.get(token, "") if only_decides else ""
        return Cut(origin, use, in_while, token in self._random)

    def decided_by(self) -> dict[int, set[int]]:
        result = {}
        for number, bits in self._predicates.items():
            leaves = 0
            for token in _tokens(bits):
                leaves |= self.lost[token]
            result[number] = members(leaves)
        return result

    def decide(self, eqn, value):
        return self._use("while" if isinstance(structure(eqn), While) else "cond", value)

    def apply(self, eqn, ins, path):
        name = eqn.primitive.name
        key = (*map(id, path), id(eqn))
        if name == "select_n":
            ins = [self._use("select", ins[0]), *ins[1:]]
            number = self._origins[key].number
            self._predicates[number] = self._predicates.get(number, 0) | ins[0].cut
        indices = _indices_of(eqn)
        ins = [self._use("index", x) if k in indices else x for k, x in enumerate(ins)]
        live_operands = frozenset(i for i, value in enumerate(ins) if value.live)
        pairs = self._differentiable_pairs(eqn, key, live_operands)
        reads = operands_of_outputs(eqn)
        lost = []
        for pairs_of_out, reads_of_out in zip(pairs, reads, strict=True):
            live = _union(ins[i].live for i in pairs_of_out)
            lost.append(_union(ins[i].live for i in reads_of_out) & ~live)
        inside = [NOTHING] * len(lost)
        if any(lost) and isinstance(known := structure(eqn), CallWithRule):
            # The function itself may lose a derivative where its rule has none.
            lost_by_rule = self._live_inside(known, ins, path, eqn, lost)
            rest = [Sources(x.live & ~lost_by_rule, x.cut) for x in ins]
            inside = propagate(*known.programs, rest, self, (*path, eqn))
            lost = [bits & lost_by_rule for bits in lost]
        outs = []
        for k, lost_of_out in enumerate(lost):
            cut = _union(ins[i].cut for i in reads[k] | pairs[k]) | inside[k].cut
            if lost_of_out:
                cut &= ~self._superseded(cut, lost_of_out)
                token = self._token(key, path, lost_of_out, bool(cut & _RANDOM))
                cut |= (_REACHES | _IS_VALUE) << 2 * token
            live = _union(ins[i].live for i in pairs[k])
            outs.append(Sources(live, cut | (name in _RANDOM_BITS)))
        return outs

    def _superseded(self, cut: int, lost: int) -> int:
        """The tokens of which all leaves are lost here once more. Without this equation, the
        leaves would reach the loss in spite of them: as those of a `softmax` do, which has a
        `stop_gradient` in it."""
        same = (t for t in _tokens(cut) if not self.lost[t] & ~lost)
        return _union((_REACHES | _IS_VALUE) << 2 * t for t in same)

    def _live_inside(self, call: CallWithRule, ins, path, eqn, lost: list[int]) -> int:
        """Which leaves, lost by the rule of a call, its function is differentiable in."""
        finder = copy.copy(self)
        finder._forget()
        outs = propagate(*call.programs, ins, finder, (*path, eqn))
        return _union(bits & out.live for bits, out in zip(lost, outs, strict=True))

    def _use(self, use: str, value: Sources) -> Sources:
        """Note that a value decides something. What depends on that has no more than this."""
        tokens = _tokens(value.cut)
        for token in tokens:
            # Before an index is used, JAX selects between it and what is counted from the end.
            if self._uses.get(token) in (None, "select" if use == "index" else None):
                self._uses[token] = use
        return Sources(value.live, value.cut & ~_union(_IS_VALUE << 2 * t for t in tokens))

    def _token(self, key, path, lost: int, is_random: bool) -> int:
        token = self._tokens.setdefault(key, len(self._tokens))
        if token == len(self.lost):
            self.lost.append(0)
            in_while = any(isinstance(structure(eqn), While) for eqn in path)
            self._places.append((self._origins[key], in_while))
        self.lost[token] |= lost
        if is_random:
            self._random.add(token)
        return token

    def _differentiable_pairs(self, eqn, key, operands: frozenset[int]) -> list[set[int]]:
        if not operands:
            return [set() for _ in eqn.outvars]
        # A rule may look at which operands are differentiated.
        kind = (key, operands)
        if eqn.primitive.name in ELEMENTARY:
            kind = _types_of(eqn)
            operands = frozenset(range(len(eqn.invars)))
        if kind not in self._pairs:
            pairs = differentiable_pairs(eqn, operands)
            if pairs is None:
                self.opaque[key] = self._origins[key]
                pairs = [set(operands) if is_inexact(v) else set() for v in eqn.outvars]
            self._pairs[kind] = pairs
        return self._pairs[kind]


def _indices_of(eqn) -> range:
    """Which operands of an equation are indices."""
    name = eqn.primitive.name
    if name == "gather" or name.startswith("scatter"):
        return range(1, 2)
    if name in ("dynamic_slice", "dynamic_update_slice"):
        return range(1 if name == "dynamic_slice" else 2, len(eqn.invars))
    return range(0)


def _tokens(cut: int) -> list[int]:
    """The cuts that a value depends on, in the order in which they were found."""
    return [bit // 2 for bit in sorted(members(cut)) if bit % 2]


def _union(sets: Iterable[int]) -> int:
    return ft.reduce(operator.or_, sets, 0)


def _types_of(eqn):
    variables = (*eqn.invars, *eqn.outvars)
    return eqn.primitive.name, tuple(str(v.aval.dtype) for v in variables)


def _key(origins: Sequence[Origin], origin: Origin) -> tuple[int, ...]:
    """Identifies an equation by the equations that it is in: a program may be called twice."""
    eqns = [origins[number].eqn for number in origin.enclosing]
    return (*map(id, eqns), id(origin.eqn))
