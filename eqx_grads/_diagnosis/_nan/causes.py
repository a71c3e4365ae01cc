"""What is to blame for a loss or a gradient that is not finite: births, and their kinds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._jaxprs.structure import CallWithRule, structure
from .births import Births
from .derivative import line_in_rule
from .kinds import Kind, kind_of
from .values import Birth, is_nonfinite, Value
from .zeros import ALIVE, FACTOR, HEALED, NOT_SELECTED, UNUSED, Zero


@dataclasses.dataclass
class Cause:
    """`source` is to blame, and `birth` is where it is met. For a cotangent that is zero there,
    `zero` says why. `n_steps`: in at least how many steps of the loops around it. `is_value`:
    it makes the loss not finite."""

    birth: Birth
    source: Birth
    kind: Kind
    zero: Zero
    n_steps: int = 1
    is_value: bool = False

    @property
    def bad(self) -> Any:
        """Which elements are bad because of `source`, where it is met if that can be told."""
        if self.birth.bad.shape == self.source.bad.shape:
            both = self.birth.bad & self.source.bad
            return both if both.any() else self.birth.bad
        return self.source.bad


def causes_of(births: Births, outs: Sequence[Value] | None) -> list[Cause]:
    """The causes, those of the loss first.

    - `outs`: the loss and the derivatives. `None` if the evaluation was stopped: each birth of
        a NaN up to there is a cause.
    """
    every = births.births
    if outs is None:
        of_loss = {i for i, b in enumerate(every) if b.is_nan and not b.is_ct}
        of_gradient = {i for i, b in enumerate(every) if b.is_ct}
    else:
        reached = [v.infs.union(*(births.sets[i] for i in np.unique(v.nans))) for v in outs]
        of_loss, of_gradient = set(reached[0]), set().union(*reached[1:])
    of_value = {id(source): source for i in sorted(of_loss) for source in _sources(births, i)}
    pairs = [(source, source) for source in of_value.values()]
    for i in sorted(of_gradient):
        of = every[i].of
        if of and all(id(every[j]) in of_value for j in of):
            continue
        sources = [s for s in _sources(births, i) if id(s) not in of_value]
        pairs += [(every[i], source) for source in sources]
    found: dict[Any, Cause] = {}
    steps: dict[Any, set[Any]] = {}
    numbers: set[Any] = set()
    for birth, source in pairs:
        number, is_value = _number(births, birth, source), id(source) in of_value
        zero = births.zeros.found[birth.zero]
        if zero.why == HEALED and number in numbers:
            continue
        kind = _kind(births, birth, source, zero)
        key = number, kind
        steps.setdefault(key, set()).add(births.derivative.steps_of(birth.place))
        found.setdefault(key, Cause(birth, source, kind, zero, is_value=is_value))
        numbers.add(number)
    for key, cause in found.items():
        cause.n_steps = len(steps[key])
    return list(found.values())


def _sources(births: Births, i: int) -> list[Birth]:
    """The births that one is to be blamed on: itself, if it is the first, or if all others are
    infinities that are meant."""
    birth = births.births[i]
    found = [source for j in sorted(birth.of) for source in _sources(births, j)]
    found = [source for source in found if not source.is_meant]
    is_difference = birth.is_nan and not birth.is_ct and kind_of(birth) == Kind.DIFFERENCE
    if is_difference and all(source.is_low for source in found):
        # Each logarithm of zero may be meant, as that of a probability.
        return [birth, *found]
    return found or [birth]


def _number(births: Births, birth: Birth, source: Birth) -> Any:
    """Equal for what is one cause to the user: the number of an equation of the loss, or of an
    input. Of the equations of a rule, which have one number, the line tells them apart."""
    if source.is_outside:
        return "outside", id(source)
    place = source.place or birth.place
    origin = births.derivative.origin(place)
    if origin is None:
        return id(place)
    inside = isinstance(structure(origin.eqn), CallWithRule) and line_in_rule(place)
    return origin.number, inside and (inside.calls, inside.span)


def _kind(births: Births, birth: Birth, source: Birth, zero: Zero) -> Kind:
    if not (birth.is_nan and birth.is_ct) or zero.why in (ALIVE, HEALED):
        return kind_of(source)
    if zero.why in (UNUSED, NOT_SELECTED):
        return Kind.DEAD_BRANCH
    if zero.why == FACTOR:
        return Kind.MASKED_PRODUCT
    origin = births.derivative.origin
    same = [
        p and (o := origin(p)) and o.number for p in (zero.place, source.place or birth.place)
    ]
    if same[0] is not None and same[0] == same[1]:
        return kind_of(source)  # the operation makes both the zero and the infinity
    is_quotient = source is birth and not any(map(is_nonfinite, birth.xs))
    return Kind.INDETERMINATE if is_quotient else Kind.ZERO_TIMES_INFINITY
