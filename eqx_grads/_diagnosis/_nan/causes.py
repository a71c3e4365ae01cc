"""The causes of a loss or a gradient that is not finite: births, and their kinds.

The kind of a birth is the experiment that would have made it finite.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import bind
from ..._jaxprs.structure import CallWithRule, structure
from ..pairs import is_inexact
from .births import Birth, Births, is_nonfinite, Value
from .derivative import differentiated, line_in_rule
from .zeros import ALIVE, FACTOR, HEALED, labels_of, NOT_SELECTED, UNUSED, Zero


class Kind(enum.StrEnum):
    DEAD_BRANCH = "dead branch"
    MASKED_PRODUCT = "zero mask"
    ZERO_TIMES_INFINITY = "zero times infinity"
    SINGULARITY = "true singularity"
    INDETERMINATE = "0/0"
    DIFFERENCE = "inf - inf"
    QUOTIENT = "inf / inf"
    DOMAIN = "outside of the domain"
    OVERFLOW = "overflow"
    LARGE = "exceeds the threshold"
    INPUT = "NaN in the input"
    INFINITE_INPUT = "inf in the input"
    INFINITE_CONSTANT = "constant infinity"


@dataclasses.dataclass
class Cause:
    """`source` is to blame, and `birth` is where it is met. For a cotangent that is zero there,
    `zero` says why. `steps`: the known steps of the loops around it. `is_value`: it makes the
    loss not finite."""

    birth: Birth
    source: Birth
    kind: Kind
    zero: Zero
    is_value: bool
    steps: set[Any] = dataclasses.field(default_factory=set)

    @property
    def bad(self) -> Any:
        """Which elements are bad because of `source`, where it is met if that can be told."""
        if self.birth.bad.shape == self.source.bad.shape:
            both = self.birth.bad & self.source.bad
            return both if both.any() else self.birth.bad
        return self.source.bad


def causes_of(births: Births, outs: Sequence[Value] | None) -> list[Cause]:
    """The causes; the causes of the loss come first.

    - `outs`: the loss and the derivatives. `None` if the evaluation was stopped: each birth of
        a NaN up to there is a cause.
    """
    every = births.births
    if outs is None:
        of_loss = {i for i, b in enumerate(every) if b.is_nan and not b.is_ct}
        of_gradient = {i for i, b in enumerate(every) if b.is_ct}
    else:
        reached = [v.infs.union(*(births.sets[i] for i in labels_of(v.nan))) for v in outs]
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
    for birth, source in pairs:
        number, zero = _number(births, birth, source), births.zeros.found[birth.zero]
        if zero.why == HEALED and any(number == n for n, _ in found):
            continue
        kind = _kind(births, birth, source, zero)
        cause = Cause(birth, source, kind, zero, id(source) in of_value)
        cause = found.setdefault((number, kind), cause)
        cause.steps.add(births.derivative.steps_of(birth.place))
    return list(found.values())


def _sources(births: Births, i: int) -> list[Birth]:
    """The births that one is to be blamed on: itself, if it is the first, or if all others are
    infinities that are meant."""
    birth = births.births[i]
    found = [source for j in sorted(birth.of) for source in _sources(births, j)]
    found = [source for source in found if not source.is_meant]
    is_difference = birth.is_nan and not birth.is_ct and _kind_of(birth) == Kind.DIFFERENCE
    if is_difference and all(source.is_low for source in found):
        # Each logarithm of zero may be intended, as for a probability.
        return [birth, *found]
    return found or [birth]


def _number(births: Births, birth: Birth, source: Birth) -> Any:
    """Equal for what is one cause to the user: the number of an equation of the loss, or of an
    input. The equations of a rule share one number, and the line tells them apart."""
    if source.is_outside:
        return id(source)
    place = source.place or birth.place
    origin = births.derivative.origin(place)
    if origin is None:
        return id(place)
    inside = isinstance(structure(origin.eqn), CallWithRule) and line_in_rule(place)
    of = differentiated(births.derivative.numbered, origin)
    return of.number, inside and (inside.calls, inside.span)


def _kind(births: Births, birth: Birth, source: Birth, zero: Zero) -> Kind:
    if not (birth.is_nan and birth.is_ct) or zero.why in (ALIVE, HEALED):
        return _kind_of(source)
    if zero.why in (UNUSED, NOT_SELECTED):
        return Kind.DEAD_BRANCH
    if zero.why == FACTOR:
        return Kind.MASKED_PRODUCT
    origin = births.derivative.origin(zero.place)
    if origin is not None and origin is births.derivative.origin(source.place or birth.place):
        return _kind_of(source)  # the operation makes both the zero and the infinity
    is_quotient = source is birth and not any(map(is_nonfinite, birth.xs))
    return Kind.INDETERMINATE if is_quotient else Kind.ZERO_TIMES_INFINITY


# ---------------------------------------------------------------- experiments


def _kind_of(birth: Birth) -> Kind:
    if birth.is_large:
        return Kind.LARGE
    if birth.is_outside:
        is_selected = birth.place and birth.place.eqn.primitive.name == "select_n"
        infinite = Kind.INFINITE_CONSTANT if is_selected else Kind.INFINITE_INPUT
        return Kind.INPUT if birth.is_nan else infinite
    if birth.is_nan and any(map(is_nonfinite, birth.xs)):
        return _of_infinities(birth)
    near = np.stack([_again(birth, lambda x, s=s: _moved(x, s)) for s in (1, -1)])
    sides = np.isfinite(near).any(1)
    if birth.is_nan and not birth.is_ct and not sides.all():
        return Kind.DOMAIN
    if sides.any():
        return Kind.INDETERMINATE if birth.is_nan else Kind.SINGULARITY
    return Kind.DOMAIN if birth.is_nan else Kind.OVERFLOW


def _of_infinities(birth: Birth) -> Kind:
    """Other factors in the place of zeros, and other signs of the infinities."""
    infinite = [k for k, x in enumerate(birth.xs) if is_nonfinite(x)]
    if not np.isnan(_again(birth, lambda x: np.where(x == 0, np.ones_like(x), x))).all():
        return Kind.ZERO_TIMES_INFINITY
    for k in infinite:
        for change in (np.abs, np.negative):
            if not np.isnan(_again(birth, change, k)).all():
                return Kind.DIFFERENCE
    return Kind.QUOTIENT if len(infinite) > 1 else Kind.DOMAIN


def _moved(x, sign):
    # XLA takes a subnormal number for zero, of half precision as one of float32.
    is_zero = np.abs(x) < min(jnp.finfo(dtype).tiny for dtype in (x.dtype, jnp.float32))
    size = np.where(is_zero, 1e-3, 1e-2 * np.abs(x))
    return x + sign * size * np.random.default_rng(0).uniform(0.5, 1, x.shape)


def _again(birth: Birth, change, only: int | None = None):
    """The bad elements, with other operands."""
    with np.errstate(all="ignore"):
        xs = [
            np.asarray(change(np.asarray(x)), x.dtype)
            if is_inexact(x) and only in (None, k)
            else x
            for k, x in enumerate(birth.xs)
        ]
        assert birth.place is not None
        return np.asarray(bind(birth.place.eqn, xs)[birth.output])[birth.bad]
