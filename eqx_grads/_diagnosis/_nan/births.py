"""One evaluation of a derivative, in which each NaN is healed where it is born.

So every birth is found by itself, and nothing is traced back. A value carries the births of its
NaNs and of its infinities; a cotangent also why its elements are zero. What is carried to the
loss or to a gradient is a cause; the rest does no harm.
"""

import dataclasses
import functools as ft
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun, Literal

from ..._jaxprs.evaluate import bind
from ..._jaxprs.interpret import Domain, interpret_equation
from ..._jaxprs.primitives import kind_of, linear_operands, MULTILINEAR
from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    equations,
    Scan,
    ShardMap,
    structure,
    While,
)
from ..carried import AbstractCarrier, enter, on_host, Place, walk
from ..origins import equation_tag, Origin
from ..shards import is_across_shards, shards_of
from .derivative import Derivative


# Why a cotangent is zero. If several zeros are added, the last of these is the reason.
ALIVE, HEALED, UNUSED, NOT_SELECTED, FACTOR, VALUE, CANCELS = range(7)

# A loop of more operations than these runs compiled first, to see whether something is born.
_MOST_IN_DETAIL = 2000


@dataclasses.dataclass(frozen=True)
class Zero:
    """Where a cotangent became zero, and why."""

    why: int
    place: Place | None


class Value(NamedTuple):
    """An array without NaNs, and what is carried beside it.

    - `nan`: for each element that is NaN in truth the number of the set of births that made it,
        or 0. `None`: no element is.
    - `infs`: the births of its infinities.
    - `decided`: the births of NaNs that a comparison decided it by.
    - `zero`: for each element of a cotangent the number of the `Zero` that it is, or 0. Or a
        function that computes these.
    - `is_ct`, `is_active`: whether it depends on the seed, and on the model.
    """

    x: Any
    nan: Any = None
    infs: frozenset[int] = frozenset()
    decided: frozenset[int] = frozenset()
    zero: Any = None
    is_ct: bool = False
    is_active: bool = False

    @property
    def truth(self) -> Any:
        return self.x if self.nan is None else _with_nan(self.x, self.nan != 0)

    @property
    def zeros(self) -> Any:
        zero = self.zero() if callable(self.zero) else self.zero
        return np.zeros(np.shape(self.x), np.int32) if zero is None else zero

    @property
    def nans(self) -> Any:
        return np.zeros(np.shape(self.x), np.int32) if self.nan is None else self.nan


@dataclasses.dataclass
class Birth:
    """Where elements become NaN, infinite, or larger than a threshold.

    - `xs`: the operands. `output`: which output. `bad`: which of its elements.
    - `of`: the births that it is to be blamed on.
    - `is_low`: it is minus infinity, as the logarithm of a probability may be.
    - `zero`: the number of the `Zero` that the cotangent is which is multiplied there, or 0.
    - `is_meant`: an infinity of the data or of a constant, such as a mask of `-inf`.
    - `number`: of an input of the loss.
    - `cotangents`: which operands are cotangents.
    """

    place: Place | None
    xs: Sequence[Any]
    output: int
    bad: Any
    is_nan: bool
    of: frozenset[int] = frozenset()
    is_ct: bool = False
    is_large: bool = False
    is_low: bool = False
    zero: int = 0
    is_meant: bool = False
    number: int | None = None
    cotangents: Sequence[bool] = ()

    @property
    def is_outside(self) -> bool:
        """Whether it is an input of the loss, or a constant."""
        return not self.cotangents

    @property
    def floats(self) -> list[Any]:
        return [np.asarray(x) for x in self.xs if is_inexact(x)]


# More sets of births in the operands of one operation are treated as one.
_MOST_SETS = 6


class Stopped(Exception):
    """The evaluation ends here: the time is over, or a check in the program raised an error."""


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_nonfinite(x: Any) -> bool:
    return is_inexact(x) and not np.isfinite(np.asarray(x)).all()


def _with_nan(x, nan):
    return np.where(nan, np.asarray(np.nan, jnp.result_type(x)), np.asarray(x))


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)


# What depends on the seed (1), and on the model (2). A comparison has no derivative.
def _apply_flags(eqn, flags, _):
    together = ft.reduce(int.__or__, flags, 0)
    return [together if is_inexact(v.aval) else 0 for v in eqn.outvars]


_FLAGS = Domain[int](constant=lambda x: 0, join=int.__or__, apply=_apply_flags)


class Births(AbstractCarrier[Value]):
    """The births in a derivative, in the order in which they happen, and the zeros."""

    def __init__(self, derivative: Derivative, threshold: float | None, deadline: float):
        self.derivative, self.threshold, self.deadline = derivative, threshold, deadline
        self.births: list[Birth] = []
        self.zeros: list[Zero] = [Zero(ALIVE, None)]
        self.sets: list[frozenset[int]] = [frozenset()]
        self._seen: list[tuple[Place, Sequence[Any]]] = []
        self._numbers: dict[Any, int] = {}
        self._of_constants: dict[int, Value] = {}
        self._compiled: dict[int, Any] = {}
        self._users: dict[int, Any] = {}

    def run(self) -> list[Value] | None:
        """The outputs of the derivative; `None` if it was stopped."""
        derivative = self.derivative
        n_seeds, n = derivative.n_seeds, len(derivative.values)
        n_leaves = len(derivative.numbered.traced.leaves)
        values = [
            self._outside(x, i, is_ct=i >= n - n_seeds, is_active=i < n_leaves)
            for i, x in enumerate(derivative.values)
        ]
        try:
            return walk(derivative.program, values, self)
        except Stopped:
            return None

    def operands_of(self, origin: Origin | None, *places: Place | None) -> Sequence[Any] | None:
        """The operands of an operation of the loss, in the step in which a birth is."""
        around = [p for place in places if place is not None for p in place.outward()]
        if any(isinstance(structure(p.eqn), ShardMap) for p in around):
            return []  # it is not known of which shard
        if origin is None:
            return None
        steps_of = self.derivative.steps_of
        is_it = lambda place: place.eqn.primitive.name == origin.eqn.primitive.name
        for steps in map(steps_of, places):
            for place, xs in filter(lambda seen: is_it(seen[0]), self._seen):
                if self.derivative.origin(place) is origin and steps_of(place) == steps:
                    return xs
        return None

    def value(self, outs: Sequence[Value] | None) -> float:
        return float("nan") if outs is None else float(outs[0].truth)

    # ------------------------------------------------------------ what a carrier does

    def constant(self, x):
        return self._outside(x, None)

    def array(self, value):
        return value.truth

    def map(self, fn, values):
        nan, zero = None, None
        if any(v.nan is not None for v in values):
            nan = fn(*(v.nans for v in values))
        if any(v.zero is not None for v in values):
            zero = lambda: fn(*(v.zeros for v in values))
            zero = zero if any(callable(v.zero) for v in values) else zero()
        x = fn(*(v.x for v in values))
        return Value(
            x,
            nan if nan is not None and nan.any() else None,
            _infs_of(x, values),
            _union(v.decided for v in values),
            zero,
            any(v.is_ct for v in values),
            any(v.is_active for v in values),
        )

    def decide(self, place, by, outs):
        return outs

    def visit(self, place, values):
        if time.monotonic() > self.deadline:
            raise Stopped
        known = structure(place.eqn)
        if place.eqn.primitive.name == "pvary":  # of a shard by itself
            return values
        if isinstance(known, Scan | While):
            return self._loop(place, known, values)
        if isinstance(known, Call | CallWithRule | Checkpoint):
            return None
        if isinstance(known, Cond) and not known.by_platform:
            return None
        if isinstance(known, ShardMap) and not is_across_shards(place.eqn):
            return self._by_shards(place, known, values)
        return self._equation(place, values)

    def _by_shards(self, place, known, values):
        """The outputs of a `jax.shard_map`, one shard after the other."""
        parts, indices = [], []
        for ins, outs in shards_of(place.eqn):
            part = lambda v, index: self.map(lambda x: on_host(x)[index], [v])
            shard = [part(v, index) for v, index in zip(values, ins, strict=True)]
            parts.append(walk(known.programs[0], shard, self, place))
            indices.append(outs)

        def joined(k):
            def join(*xs):
                whole = np.zeros(place.eqn.outvars[k].aval.shape, xs[0].dtype)
                for x, index in zip(xs, indices, strict=True):
                    whole[index[k]] = x
                return whole

            return self.map(join, [part[k] for part in parts])

        return [joined(k) for k in range(len(place.eqn.outvars))]

    # ------------------------------------------------------------ loops

    def _loop(self, place, known, values):
        """A carry of zeros may be a cotangent from the first step on."""
        flags = interpret_equation(
            place.eqn, [v.is_ct | 2 * v.is_active for v in values], _FLAGS
        )
        n = known.n_before_carry
        flagged = [
            _flagged(v, flag) if is_inexact(v.x) else v
            for v, flag in zip(values[n : n + known.n_carry], flags.outs, strict=False)
        ]
        values = [*values[:n], *flagged, *values[n + known.n_carry :]]
        if not self._is_long(place.eqn, known) or any(v.nan is not None for v in values):
            return enter(place, values, self)
        outs = self._bind(place.eqn, [v.x for v in values])
        if any(is_nonfinite(x) for x in outs):
            return enter(place, values, self)
        zeros = _Later(lambda: self._zeros_of_loop(place, values))
        return [
            _flagged(Value(x, zero=zeros.of(k) if flag & 1 else None), flag)
            for k, (x, flag) in enumerate(zip(outs, flags.outs, strict=True))
        ]

    def _is_long(self, eqn, known) -> bool:
        n = sum(1 for program in known.programs for _ in equations(program))
        is_scan = isinstance(known, Scan)
        return (
            self.threshold is None and n * (known.length if is_scan else 100) > _MOST_IN_DETAIL
        )

    def _zeros_of_loop(self, place, values) -> list[Any]:
        """Of a loop that ran compiled, if they are asked for."""
        n_births = len(self.births)
        outs = enter(place, values, self)
        del self.births[n_births:]
        return [v.zeros for v in outs]

    def skip(self, place, step, consts, carry, xs):
        known = structure(place.eqn)
        values = [*consts, *carry, *xs]
        if any(v.is_ct for v in values) or not self._is_long(place.eqn, known):
            return carry, []
        if any(v.nan is not None or is_nonfinite(v.x) for v in values):
            return carry, []
        assert isinstance(known, Scan)
        if id(place.eqn) not in self._compiled:
            self._compiled[id(place.eqn)] = _until_not_finite(known)
        new, ys, end = self._compiled[id(place.eqn)](
            step, [v.x for v in consts], [v.x for v in carry], [v.x for v in xs]
        )
        n = int(end) - step
        if not n:
            return carry, []
        active = any(v.is_active for v in values)
        kept = [v._replace(x=x) for v, x in zip(carry, new, strict=True)]
        at = lambda y, k: Value(on_host(y)[k], is_active=active)
        return kept, [[at(y, step + k) for y in ys] for k in range(n)]

    # ------------------------------------------------------------ operations

    def _equation(self, place, values):
        eqn = place.eqn
        is_ct, is_active = any(v.is_ct for v in values), any(v.is_active for v in values)
        if not is_ct:
            self._seen.append((place, [v.truth for v in values]))
        outs = self._bind(eqn, [v.x for v in values])
        nans = self._propagated(eqn, values, outs, lambda v: v.is_ct == is_ct)
        met = [None] * len(outs)  # of NaNs that meet a cotangent
        if is_ct:
            met = self._propagated(eqn, values, outs, lambda v: not v.is_ct)
        truth = outs
        if any(v.nan is not None for v in values) and not all(map(is_inexact, outs)):
            truth = self._bind(eqn, [v.truth for v in values])
        decided = frozenset() if is_ct or is_active else _union(v.decided for v in values)
        for v in values:
            for j in v.infs | _union(self.sets[i] for i in _labels_of(v.nan)):
                birth = self.births[j]
                row = kind_of(eqn)
                is_moved = (row.layout or row.bounds == "operand") and not birth.is_nan
                if birth.place is None and birth.number is None and not is_moved:
                    birth.place = place  # of a constant, where it is used first
                    if not birth.bad.shape and is_inexact(outs[0]):
                        bad = ~np.isfinite(np.asarray(outs[0]))
                        birth.bad = bad if bad.any() else birth.bad
        made = []
        for k, x in enumerate(outs):
            if is_inexact(x):
                value = self._made(place, values, k, x, nans[k], met[k], is_ct)
                made.append(value._replace(is_active=is_active, decided=decided))
            else:
                by = _union(self.sets[i] for v in values for i in _labels_of(v.nan))
                made.append(Value(truth[k], decided=decided | by))
        return made

    def _made(self, place, values, k, x, nan, met, is_ct) -> Value:
        """An output of an operation."""
        a = np.asarray(x)
        is_nan, inf = np.isnan(a), np.isinf(a)
        sources = [v for v in values if is_nonfinite(v.x)]
        decided = _union(v.decided for v in values)
        zero: Any = self._zeros(place, values, k, a) if is_ct else None
        infs = frozenset()
        nan = np.zeros(a.shape, np.int32) if nan is None else nan
        born = ft.partial(self._born, place, values, k, is_ct=is_ct)
        new = np.zeros(a.shape, np.int32) if met is None else met
        by_itself = np.ones(a.shape, bool) if is_ct else nan == 0  # not of a healed operand
        if is_nan.any():
            of = _union(v.infs for v in sources) | decided
            where = is_nan if of else is_nan & by_itself
            new = self._joined(new, where, of, at_least=True)
        for which in _labels_of(new):
            where = new == which
            labels = np.zeros(a.shape, np.int32)
            if is_ct:
                labels = self._zeros_met(place, values, k, where)
                healed = where & is_nan
                zero = np.where(
                    healed, np.where(labels > 0, labels, self._zero(HEALED, None)), zero
                )
            for label in np.unique(labels[where]):
                bad = where & (labels == label)
                birth = born(bad, is_nan=True, of=self.sets[which] - {-1}, zero=int(label))
                nan = self._joined(nan, bad, frozenset([birth]))
        if inf.any():
            if len(sources) > 1:  # an infinity that is not selected makes none
                makes = lambda v: self._differs(place, values, k, inf, calm=v)
                sources = [v for v in sources if makes(v)] or sources
            infs, new, of = _union(v.infs for v in sources), inf, decided
            by = _union(v.infs for v in sources if not v.is_ct)
            if is_ct and by:  # an infinity meets a cotangent
                infs = _union(v.infs for v in sources if v.is_ct)
                of = by
            elif sources:
                calm = [_calm(v.x) for v in values]
                new = inf & np.isinf(np.asarray(self._bind(place.eqn, calm)[k]))
            new = new & by_itself
            if new.any():
                infs |= {born(new, of=of, is_low=not np.iscomplexobj(a) and (a[new] < 0).all())}
        bad = is_nan
        if is_ct and self.threshold is not None:
            with np.errstate(invalid="ignore"):
                large = (np.abs(a) > self.threshold) & ~inf & ~is_nan
            if large.any() and self._is_used(place, k):
                nan = self._joined(nan, large, frozenset([born(large, is_large=True)]))
                bad = bad | large
        x = np.where(bad, np.asarray(0 if is_ct else 1, a.dtype), a) if bad.any() else x
        return Value(x, nan if nan.any() else None, infs, zero=zero, is_ct=is_ct)

    def _is_used(self, place, k) -> bool:
        """Whether an output is a cotangent of a value of the loss. Others are used within the
        derivative of one equation only."""
        program = place.program
        if id(program) not in self._users:
            users: dict[Any, set[str]] = {v: {""} for v in program.jaxpr.outvars if _is_var(v)}
            for eqn in program.eqns:
                for v in filter(_is_var, eqn.invars):
                    users.setdefault(v, set()).add(equation_tag(eqn))
            self._users[id(program)] = users
        tag = equation_tag(place.eqn)
        users = self._users[id(program)].get(place.eqn.outvars[k], set())
        return not tag or users != {tag}

    def _differs(self, place, values, k, inf, calm: Value) -> bool:
        """Whether other elements are infinite without the infinities of one operand."""
        xs = [_calm(v.x) if v is calm else v.x for v in values]
        return bool((np.isinf(np.asarray(self._bind(place.eqn, xs)[k])) != inf).any())

    def _propagated(self, eqn, values, outs, is_chosen) -> list[Any]:
        """For each output the sets of births of the NaNs in some operands that reach its
        elements: the operation runs on each of these sets."""
        chosen = [is_chosen(v) and v.nan is not None for v in values]
        labels = {
            i for v, c in zip(values, chosen, strict=True) if c for i in _labels_of(v.nan)
        }
        groups = [[label] for label in sorted(labels)]
        if len(labels) > _MOST_SETS:
            groups = [sorted(labels)]
        found: list[Any] = [None] * len(outs)
        ways = [lambda x: x]
        if groups and any(is_inexact(x) and np.isnan(np.asarray(x)).any() for x in outs):
            ways.append(_ones)  # what is NaN anyway may be of a NaN too
        for change in ways if groups else ():
            calm = [change(v.x) for v in values]
            base = self._bind(eqn, calm)
            for group in groups:
                births = _union(self.sets[label] for label in group)
                xs = [
                    _with_nan(x, np.isin(v.nan, group)) if c else x
                    for x, v, c in zip(calm, values, chosen, strict=True)
                ]
                for k, (x, before) in enumerate(zip(self._bind(eqn, xs), base, strict=True)):
                    if is_inexact(x):
                        reached = np.isnan(np.asarray(x)) & ~np.isnan(np.asarray(before))
                        start = found[k]
                        start = np.zeros(np.shape(x), np.int32) if start is None else start
                        found[k] = self._joined(start, reached, births)
        return found

    def _joined(self, labels, where, births: frozenset[int], at_least: bool = False):
        """The numbers of sets, with some births more in the sets of some elements.

        - `at_least`: without births, the elements get a set too.
        """
        births = births or (frozenset([-1]) if at_least else births)
        labels = labels.copy()
        for label in np.unique(labels[where]):
            joined = self.sets[label] | births
            if joined not in self._numbers:
                self._numbers[joined] = len(self.sets)
                self.sets.append(joined)
            labels[where & (labels == label)] = self._numbers[joined]
        return labels

    def _bind(self, eqn, xs):
        try:
            with np.errstate(all="ignore"):
                return bind(eqn, xs)
        except RuntimeError as error:  # of a check in the program, such as `eqx.error_if`
            raise Stopped from error

    def _born(self, place, values, k, bad, is_nan=False, **kwargs) -> int:
        xs, cotangents = [v.x for v in values], [v.is_ct for v in values]
        return self._add(Birth(place, xs, k, bad, is_nan, cotangents=cotangents, **kwargs))

    def _add(self, birth: Birth) -> int:
        self.births.append(birth)
        return len(self.births) - 1

    def _outside(self, x, number, is_ct=False, is_active=False) -> Value:
        """A value of the data or a constant. Infinities of these are meant."""
        x = jnp.asarray(x) if isinstance(x, int | float | complex) else x
        if not is_inexact(x):
            return Value(x)
        value = Value(x, is_ct=is_ct, is_active=is_active)
        if not is_nonfinite(x):
            return value
        if number is None and id(x) in self._of_constants:
            return self._of_constants[id(x)]
        a, key = np.asarray(x), id(x)
        for bad, is_nan in ((np.isnan(a), True), (np.isinf(a), False)):
            if bad.any():
                is_meant = not is_nan and not is_active
                birth = Birth(None, [a], 0, bad, is_nan, number=number, is_meant=is_meant)
                born = frozenset([self._add(birth)])
                if is_nan:
                    x = np.where(bad, np.ones_like(a), a)
                    nan = self._joined(np.zeros(a.shape, np.int32), bad, born)
                    value = value._replace(x=x, nan=nan)
                else:
                    value = value._replace(infs=born)
        if number is None:
            self._of_constants[key] = value
        return value

    # ------------------------------------------------------------ why a cotangent is zero

    def _zero(self, why: int, place: Place | None) -> int:
        around = place.outward() if place is not None else ()
        key = (why, *((id(p.eqn), p.step) for p in around))
        if key not in self._numbers:
            self._numbers[key] = len(self.zeros)
            self.zeros.append(Zero(why, place))
        return self._numbers[key]

    def _zeros(self, place, values, k, a):
        """For each element of a cotangent that is zero the number of its `Zero`: by running the
        same linear operation on indicators."""
        if np.all(a != 0):
            return np.zeros(a.shape, np.int32)
        eqn = place.eqn
        reached = lambda of, factors: _reached(eqn, values, k, of, self._bind, factors)
        alive = lambda v: np.asarray(v.x) != 0
        used = reached(lambda v: np.ones(np.shape(v.x), bool), _ONES)
        met = reached(alive, _ONES)
        multiplied = reached(alive, _SIZES)
        numbers = np.zeros(a.shape, np.int32)
        # A slice takes the others in any case, and a selection decides it by a value.
        unused = UNUSED if linear_operands(eqn) is not None else NOT_SELECTED
        why_of_factor = self._why_of_factor(place, values)
        if why_of_factor == NOT_SELECTED:  # whatever comes here
            used = used & reached(lambda v: np.ones(np.shape(v.x), bool), _SIZES)
        rest = used & ~met & (a == 0)  # only zeros come here
        if rest.any():
            self._by_label(values, rest, numbers, lambda of: reached(of, _ONES))
        reasons = (
            (~used | (rest & (numbers == 0)), unused),
            (used & met & ~multiplied, why_of_factor),
            (multiplied, CANCELS),
        )
        for where, why in reasons:
            if (where & (a == 0)).any():
                numbers[where] = self._zero(why, place)
        return np.where(a == 0, numbers, 0)

    def _by_label(self, values, where, into, reached):
        """Write, for each of some elements, the number of the zero that reaches it."""
        labels = {int(i) for v in values if v.is_ct for i in np.unique(v.zeros)} - {0}
        for label in sorted(labels, key=lambda i: (self.zeros[i].why, -i)):
            into[where & reached(lambda v, i=label: v.zeros == i)] = label

    def _zeros_met(self, place, values, k, new):
        """For each new NaN the number of the zero that met an infinity or a NaN there."""
        labels = np.zeros(new.shape, np.int32)
        reached = lambda of: _reached(place.eqn, values, k, of, self._bind, _BAD)
        self._by_label(values, new, labels, reached)
        if (new & (labels == 0)).any() and place.eqn.primitive.name in MULTILINEAR:
            why = self._why_of_factor(place, values)
            if why == NOT_SELECTED:  # an infinity meets a zero
                labels[new & (labels == 0)] = self._zero(why, place)
        return labels

    def _why_of_factor(self, place, values) -> int:
        """A factor is zero: it depends on the model, or the user multiplies by a mask, or it is
        how JAX selects an element."""
        if any(v.is_active for v in values if not v.is_ct):
            return VALUE
        origin = self.derivative.origin(place)
        is_users = origin is None or origin.primitive in MULTILINEAR
        return FACTOR if is_users else NOT_SELECTED


def _infs_of(x, values: Sequence[Value]) -> frozenset[int]:
    infs = _union(v.infs for v in values)
    return infs if infs and np.isinf(np.asarray(x)).any() else frozenset()


def _flagged(v: Value, flag: int) -> Value:
    if not is_inexact(v.x):
        return v
    return v._replace(is_ct=v.is_ct or bool(flag & 1), is_active=v.is_active or bool(flag & 2))


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _labels_of(labels: Any) -> list[int]:
    return [] if labels is None else [int(i) for i in np.unique(labels) if i]


def _ones(x):
    return np.ones_like(np.asarray(x)) if is_inexact(x) else x


def _calm(x):
    """An operand with ones where it is infinite."""
    return np.where(np.isfinite(x), x, np.ones_like(x)) if is_nonfinite(x) else x


# The factors, if it is asked what the cotangents reach: ones, their sizes, or ones where they
# are not finite.
_ONES, _SIZES, _BAD = range(3)


def _reached(eqn, values, k, of, bind, factors):
    """Which elements of an output are reached by elements of the cotangents: the operation is
    run on ones for these.

    - `of`: which elements of a cotangent.
    """
    is_product = eqn.primitive.name in MULTILINEAR
    linear = linear_operands(eqn)

    def factor(i, v):
        if not is_product and (linear is None or i in linear):
            return np.zeros(np.shape(v.x))  # a term
        size = np.abs(np.asarray(v.truth))
        is_finite = np.isfinite(size)
        if is_product and factors == _BAD and not is_finite.all():
            return ~is_finite
        if is_product and factors != _SIZES:
            return np.ones(np.shape(v.x))
        return np.where(is_finite, size, np.ones_like(size))

    xs = [
        v.x
        if not is_inexact(v.x)
        else np.asarray(of(v) if v.is_ct else factor(i, v), v.x.dtype)
        for i, v in enumerate(values)
    ]
    try:
        return np.asarray(bind(eqn, xs)[k]) != 0
    except (TypeError, ValueError, Stopped):
        return np.ones(eqn.outvars[k].aval.shape, bool)


@dataclasses.dataclass
class _Later:
    """Outputs that are computed when one of them is asked for."""

    compute: Callable[[], Sequence[Any]]
    outs: Sequence[Any] | None = None

    def of(self, k: int) -> Callable[[], Any]:
        def one():
            if self.outs is None:
                self.outs = self.compute()
            return self.outs[k]

        return one


def _until_not_finite(loop: Scan):
    """A compiled function that runs the steps of a scan from one on, up to the first step of
    which an output is not finite. It returns the carry, the outputs of all steps, and the
    number of the step."""
    (program,) = loop.programs
    types = program.out_avals[loop.n_carry :]

    def run(start, consts, carry, xs):
        def body(state):
            step, carry, ys, _ = state
            i = loop.length - 1 - step if loop.reverse else step
            outs = jaxpr_as_fun(program)(*consts, *carry, *(x[i] for x in xs))
            finite = [jnp.all(jnp.isfinite(x)) for x in outs if is_inexact(x)]
            good = jnp.all(jnp.stack(finite)) if finite else jnp.bool_(True)
            keep = lambda new, old: jnp.where(good, new, old)
            new = [keep(n, o) for n, o in zip(outs, carry, strict=False)]
            ys = [y.at[step].set(new) for y, new in zip(ys, outs[loop.n_carry :], strict=True)]
            return step + good, new, ys, ~good

        ys = [jnp.zeros((loop.length, *t.shape), t.dtype) for t in types]
        is_on = lambda state: (state[0] < loop.length) & ~state[3]
        step, carry, ys, _ = jax.lax.while_loop(
            is_on, body, (jnp.int32(start), carry, ys, jnp.bool_(False))
        )
        return carry, ys, step

    return jax.jit(run)
