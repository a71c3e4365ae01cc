"""One evaluation of a derivative, in which each NaN is healed where it is born.

So every birth is found by itself, and nothing is traced back. A value carries the births of its
NaNs and of its infinities; a cotangent also why its elements are zero. A birth that is carried
to the loss or to a gradient is a cause; the rest do no harm.
"""

import dataclasses
import functools as ft
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import evaluate
from ..._jaxprs.interpret import Domain, interpret_equation
from ..._jaxprs.primitives import kind_of
from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    equations,
    holds,
    Scan,
    structure,
    While,
)
from ..carried import AbstractCarrier, enter, indices_of, on_host, Place, walk
from ..eager import compute
from ..origins import equation_tag
from ..pairs import is_inexact
from .derivative import Derivative
from .zeros import HEALED, labels_of, labels_of_all, Stopped, Zeros


# A loop of more operations than these runs compiled first, to see whether something is born.
_MOST_IN_DETAIL = 2000


# More sets of births in the operands of one operation are treated as one.
_MOST_SETS = 6


def _apply_flags(eqn, flags, _):
    together = ft.reduce(int.__or__, flags, 0)
    return [together if is_inexact(v.aval) else 0 for v in eqn.outvars]


_FLAGS = Domain[int](constant=lambda x: 0, join=int.__or__, apply=_apply_flags)


def is_nonfinite(x: Any) -> bool:
    return is_inexact(x) and not np.isfinite(np.asarray(x)).all()


def with_nan(x, nan):
    one = np.asarray(np.nan, jnp.result_type(x))
    return np.where(nan, one * one, np.asarray(x))  # in both parts of a complex number


def union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)


class Value(NamedTuple):
    """An array without NaNs, and what is carried beside it.

    - `nan`: for each element that is NaN in truth the number of the set of births that made it,
        or 0. `None`: no element is.
    - `infs`: the births of its infinities.
    - `decided`: the births of NaNs that a comparison decided it by.
    - `zero`: for each element of a cotangent the number of the `Zero` that it is, or 0.
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
        return self.x if self.nan is None else with_nan(self.x, self.nan != 0)


@dataclasses.dataclass
class Birth:
    """Where elements become NaN, infinite, or larger than a threshold.

    - `xs`: the operands. `output`: which output. `bad`: which of its elements.
    - `of`: the births that it is to be blamed on.
    - `is_low`: it is minus infinity, as the logarithm of a probability may be.
    - `zero`: the number of the `Zero` that the cotangent is which is multiplied there, or 0.
    - `is_meant`: an infinity of the data or of a constant, such as a mask of `-inf`.
    - `is_outside`: it is an input of the loss, with this `number`, or a constant.
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
    is_outside: bool = False

    def use(self, place: Place, out: Any) -> None:
        """A constant has the place where it is used first."""
        if self.place is None and self.number is None:
            self.place = place
            if not self.bad.shape and is_nonfinite(out):
                self.bad = ~np.isfinite(np.asarray(out))


def calmed(x):
    """An operand with ones where it is infinite."""
    return np.where(np.isfinite(x), x, 1) if is_nonfinite(x) else x


# ---------------------------------------------------------------- the evaluation


class Births(AbstractCarrier[Value]):
    """The births in a derivative, in the order in which they happen, and the zeros.

    - `is_bad`: whether the loss is not finite. Then long loops of cotangents run compiled, if
        these are finite: what a NaN of the loss meets there is not a cause.
    """

    def __init__(
        self,
        derivative: Derivative,
        threshold: float | None,
        deadline: float,
        *,
        is_bad: bool = False,
    ):
        self.derivative, self.threshold, self.deadline = derivative, threshold, deadline
        self.is_bad = is_bad
        self.births: list[Birth] = []
        self.zeros = Zeros(derivative, self._bind)
        self.sets: list[frozenset[int]] = [frozenset()]
        self._numbers: dict[Any, int] = {}
        self._constants: dict[int, tuple[Any, Value]] = {}

    def run(self) -> list[Value] | None:
        """The outputs of the derivative; `None` if it was stopped."""
        values = self.derivative.values
        n, n_leaves = len(values), len(self.derivative.numbered.traced.leaves)
        is_ct = lambda i: i >= n - self.derivative.n_seeds
        facts = [self._outside(x, i, is_ct(i), i < n_leaves) for i, x in enumerate(values)]
        try:
            return walk(self.derivative.program, facts, self)
        except Stopped:
            return None

    # ------------------------------------------------------------ what a carrier does

    def constant(self, x):
        if id(x) not in self._constants:  # `x` is kept, so that no other array has its `id`
            self._constants[id(x)] = x, self._outside(x, None)
        return self._constants[id(x)][1]

    def map(self, fn, values):
        is_any = lambda name: any(getattr(v, name) is not None for v in values)
        nan = fn(*(labels_of_all(v.x, v.nan) for v in values)) if is_any("nan") else None
        x, infs = fn(*(v.x for v in values)), union(v.infs for v in values)
        return Value(
            x,
            nan if nan is not None and nan.any() else None,
            infs if infs and np.isinf(np.asarray(x)).any() else frozenset(),
            union(v.decided for v in values),
            fn(*(labels_of_all(v.x, v.zero) for v in values)) if is_any("zero") else None,
            any(v.is_ct for v in values),
            any(v.is_active for v in values),
        )

    def decide(self, by, outs):
        return outs

    def visit(self, place, values):
        if time.monotonic() > self.deadline:
            raise Stopped
        known = structure(place.eqn)
        if isinstance(known, Scan | While):
            return self._loop(place, known, values)
        is_branch = isinstance(known, Cond) and not known.by_platform
        is_entered = is_branch or isinstance(known, Call | CallWithRule | Checkpoint)
        return None if is_entered else self._equation(place, values)

    # ------------------------------------------------------------ loops

    def _loop(self, place, known, values):
        """A carry of zeros may be a cotangent from the first step on."""
        flags = [v.is_ct | 2 * v.is_active for v in values]
        flags = interpret_equation(place.eqn, flags, _FLAGS).outs
        n, m = known.n_before_carry, known.n_before_carry + known.n_carry
        values = [*values[:n], *map(_flagged, values[n:m], flags), *values[m:]]
        done, has_nan = None, any(v.nan is not None for v in values)
        # With a NaN, a `while_loop` may not end.
        is_rest = self.is_bad and not holds(place.eqn, While) and any(f & 1 for f in flags)
        if self._is_long(known) and (is_rest or not has_nan):
            outs = self._bind(place.eqn, [v.x for v in values])
            # Why a cotangent is zero is not known of a loop that runs compiled.
            zeros = (f & 1 and not np.all(x) for x, f in zip(outs, flags, strict=True))
            if (is_rest or not any(zeros)) and not any(map(is_nonfinite, outs)):
                if has_nan:
                    return self._equation(place, values)
                return list(map(_flagged, map(Value, outs), flags))
            is_plain = not any(v.is_ct or has_nan or is_nonfinite(v.x) for v in values)
            done = _good_steps(known, values) if is_plain and isinstance(known, Scan) else None
        return enter(place, values, self, done)

    def _is_long(self, known: Scan | While) -> bool:
        n = sum(1 for program in known.programs for _ in equations(program))
        steps = known.length if isinstance(known, Scan) else 100
        return self.threshold is None and n * steps > _MOST_IN_DETAIL

    # ------------------------------------------------------------ operations

    def _equation(self, place, values):
        eqn = place.eqn
        is_ct, is_active = any(v.is_ct for v in values), any(v.is_active for v in values)
        outs = self._bind(eqn, [v.x for v in values])
        nans = self._propagated(eqn, values, outs, lambda v: v.is_ct == is_ct)
        met = self._propagated(eqn, values, outs, lambda v: is_ct and not v.is_ct)
        by = union(self.sets[i] for v in values for i in labels_of(v.nan))
        is_same = not by or all(map(is_inexact, outs))
        truth = outs if is_same else self._bind(eqn, [v.truth for v in values])
        decided = frozenset() if is_ct or is_active else union(v.decided for v in values)
        row = kind_of(eqn)
        if not (row.layout or row.bounds == "operand" or eqn.primitive.name == "neg"):
            for j in by.union(*(v.infs for v in values)):
                self.births[j].use(place, outs[0])
        made = []
        for k, x in enumerate(outs):
            if is_inexact(x):
                value = self._made(place, values, k, x, nans[k], met[k], is_ct)
                made.append(value._replace(is_active=is_active, decided=decided))
            else:
                made.append(Value(truth[k], decided=decided | by))
        return made

    def _made(self, place, values, k, x, nan, met, is_ct) -> Value:
        """An output of an operation."""
        a = np.asarray(x)
        is_nan, inf = np.isnan(a), np.isinf(a)
        sources = [v for v in values if is_nonfinite(v.x)]
        decided = union(v.decided for v in values)
        zero: Any = self.zeros.of_cotangent(place, values, k, a) if is_ct else None
        infs, new = frozenset(), met
        born = ft.partial(self._born, place, values, k, is_ct=is_ct)
        by_itself = (met if is_ct else nan) == 0  # not of a healed operand
        if is_nan.any():
            of = union(v.infs for v in sources) | decided
            where = is_nan if of else is_nan & by_itself
            new = self._joined(new, where, of)
        labels = np.zeros(a.shape, np.int32)
        if is_ct and new.any():
            self.zeros.met(place, values, k, labels)
            healed = np.where(labels > 0, labels, self.zeros.number(HEALED, None))
            zero = np.where(is_nan, healed, zero)
        for which in labels_of(new):
            where = new == which
            for label in np.unique(labels[where]):
                bad = where & (labels == label)
                birth = born(bad, is_nan=True, of=self.sets[which], zero=int(label))
                nan = self._joined(nan, bad, frozenset([birth]))
        if inf.any():
            if len(sources) > 1:  # an infinity that is not selected makes none
                others = lambda of: [v.x if v is of else calmed(v.x) for v in values]
                alone = lambda of: np.isinf(np.asarray(self._bind(place.eqn, others(of))[k]))
                sources = [v for v in sources if (alone(v) & inf).any()] or sources
            infs, new, of = union(v.infs for v in sources), inf, decided
            by = union(v.infs for v in sources if not v.is_ct)
            if is_ct and by:  # an infinity meets a cotangent
                infs = union(v.infs for v in sources if v.is_ct)
                of = by
            elif sources:
                finite = [calmed(v.x) for v in values]
                new = inf & np.isinf(np.asarray(self._bind(place.eqn, finite)[k]))
            new = new & by_itself
            if new.any():
                infs |= {born(new, of=of, is_low=not np.iscomplexobj(a) and (a[new] < 0).all())}
        bad = is_nan
        if is_ct and self.threshold is not None:
            with np.errstate(invalid="ignore"):
                large = (np.abs(a) > self.threshold) & ~inf
            if large.any() and self._is_used(place, k):
                nan = self._joined(nan, large, frozenset([born(large, is_large=True)]))
                bad = bad | large
        x = np.where(bad, 0 if is_ct else 1, a) if bad.any() else x
        return Value(x, nan if nan.any() else None, infs, zero=zero, is_ct=is_ct)

    def _is_used(self, place, k) -> bool:
        """Whether an output is a cotangent of a value of the loss. Others are used within the
        derivative of one equation only."""
        v, tag = place.eqn.outvars[k], equation_tag(place.eqn)
        users = (e for e in place.program.eqns if any(v is atom for atom in e.invars))
        is_output = any(v is atom for atom in place.program.jaxpr.outvars)
        return not tag or is_output or any(equation_tag(e) != tag for e in users)

    def _propagated(self, eqn, values, outs, is_chosen) -> list[Any]:
        """For each output the sets of births of the NaNs in some operands that reach its
        elements: the operation runs on each set."""
        chosen = [is_chosen(v) and v.nan is not None for v in values]
        found = [np.zeros(np.shape(x), np.int32) for x in outs]
        if not any(chosen):
            return found
        pairs = zip(values, chosen, strict=True)
        labels = sorted({i for v, is_one in pairs if is_one for i in labels_of(v.nan)})
        groups = [labels] if len(labels) > _MOST_SETS else [[i] for i in labels]
        changes = [lambda x: x]
        if any(is_inexact(x) and np.isnan(np.asarray(x)).any() for x in outs):
            # What is NaN anyway may be of a NaN too.
            changes.append(lambda x: np.ones_like(x) if is_inexact(x) else x)
        for change in changes:
            calm = [change(v.x) for v in values]
            base = self._bind(eqn, calm)
            for group in groups:
                births = union(self.sets[label] for label in group)
                xs = [
                    with_nan(x, np.isin(v.nan, group)) if is_one else x
                    for x, v, is_one in zip(calm, values, chosen, strict=True)
                ]
                for k, (x, before) in enumerate(zip(self._bind(eqn, xs), base, strict=True)):
                    if is_inexact(x):
                        reached = np.isnan(np.asarray(x)) & ~np.isnan(np.asarray(before))
                        found[k] = self._joined(found[k], reached, births)
        return found

    def _joined(self, labels, where, births: frozenset[int]):
        """The numbers of sets, with some births more in the sets of some elements. Without
        births, the elements get an empty set, which has a number too."""
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
            return compute(eqn, xs)
        except RuntimeError as error:  # of a check in the program, such as `eqx.error_if`
            raise Stopped from error

    def _born(self, place, values, k, bad, is_nan=False, **kwargs) -> int:
        self.births.append(Birth(place, [v.x for v in values], k, bad, is_nan, **kwargs))
        return len(self.births) - 1

    def _outside(self, x, number, is_ct=False, is_active=False) -> Value:
        """A value of the data or a constant. Its infinities are intended."""
        x = jnp.asarray(x) if isinstance(x, int | float | complex) else x
        if not is_inexact(x):
            return Value(x)
        a, value = np.asarray(x), Value(x, is_ct=is_ct, is_active=is_active)
        born = ft.partial(self._born, None, [Value(a)], 0, number=number, is_outside=True)
        nan, inf = np.isnan(a), np.isinf(a)
        if nan.any():
            labels = self._joined(labels_of_all(a, None), nan, frozenset([born(nan, True)]))
            value = value._replace(x=np.where(nan, 1, a), nan=labels)
        if inf.any():
            value = value._replace(infs=frozenset([born(inf, is_meant=not is_active)]))
        return value


def _flagged(v: Value, flag: int) -> Value:
    return v._replace(is_ct=bool(flag & 1), is_active=bool(flag)) if is_inexact(v.x) else v


def _good_steps(loop: Scan, values):
    """The steps of a scan up to the first one with a value that is not finite, compiled: the
    carry after them, and the other outputs of each."""
    n, m = loop.n_consts, loop.n_consts + loop.n_carry

    @jax.jit
    def all_steps(values):
        def step(carry, x):
            outs = evaluate(*loop.programs, [*values[:n], *carry, *x])
            return outs[: loop.n_carry], outs

        return jax.lax.scan(step, values[n:m], values[m:], loop.length, loop.reverse)[1]

    outs = list(map(on_host, all_steps([v.x for v in values])))
    is_bad = lambda i: any(is_nonfinite(x[i]) for x in outs)
    good = list(itertools.takewhile(lambda i: not is_bad(i), indices_of(loop)))
    carry, active = values[n:m], any(v.is_active for v in values)
    ys = [[Value(x[i], is_active=active) for x in outs[loop.n_carry :]] for i in good]
    if good:
        carry = [v._replace(x=x[good[-1]]) for v, x in zip(carry, outs, strict=False)]
    return carry, ys
