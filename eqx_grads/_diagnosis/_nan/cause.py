"""Why an element is not finite: the kind of cause, and what to do."""

import collections
import dataclasses
import functools as ft
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxprs.primitives import ELEMENTWISE
from ..origins import Origin
from .corners import is_corner
from .cures import (
    DEAD_BRANCH,
    DOMAIN,
    INDETERMINATE,
    INFINITE_CONSTANT,
    INFINITE_INPUT,
    INPUT,
    LARGE,
    LOG_DETERMINANTS,
    MASKED_PRODUCT,
    OF_INFINITIES,
    OVERFLOW,
    SINGULARITY,
    SOLVES,
    ZERO_TIMES_INFINITY,
)
from .derivative_program import Derivative
from .harmless import harmless_infinities
from .inner_gradients import masks_of_sources
from .lines import place_in_rule
from .replay import Frame, has_nan_factor, Hit, is_inexact, Way, ways_of
from .sources import Found, nonfinite_operands, Part, sources_of_nonfinite
from .trace_back import (
    element,
    Elements,
    elements_of,
    indices,
    Input,
    is_nonfinite,
    is_zero,
    Spot,
)
from .values import pullback, value_at
from .zeros import (
    BOUND,
    CANCELS,
    NOT_SELECTED,
    REPLACED,
    selected_constant,
    sources_of_zero,
    UNDERFLOWS,
    Zero,
)


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why an element is bad.

    - `origin`: the equation of the loss to blame.
    - `spot`: where it shows. `source`: where the value that is to blame is made.
    - `mask`: where a zero of the cotangent is made. `cotangent`: the element that is zero.
    - `forward`: whether a value is not finite, and not a cotangent.
    - `n_made`: how many elements the source makes, if these are not all that are bad, and
        `more_made`: whether there may be more.
    - `n_steps`, `more_steps`: the same of the steps of the loops around it.
    """

    kind: str
    origin: Origin | None
    spot: Spot | None
    source: Spot | Input | None
    mask: Zero | None = None
    forward: bool = False
    cotangent: Any = None
    n_made: int | None = None
    more_made: bool = False
    n_steps: int = 1
    more_steps: bool = False


def causes_of_hits(
    derivative: Derivative,
    number: int,
    hits: Mapping[Way, Hit],
    threshold: float | None,
    known: Collection[int] = (),
) -> list[Cause]:
    """The causes that an equation makes a cotangent bad.

    - `known`: the numbers of equations of the loss that are causes anyway, which are left out.
    """
    found: dict[Any, list[Cause]] = {}
    for way, hit in hits.items():
        for cause in _causes_of_hit(derivative, number, way, hit, threshold, known):
            found.setdefault(key_of_cause(derivative, cause), []).append(cause)
    most = max(hit.count_of_all for hit in hits.values())
    causes = []
    for same in found.values():
        # One cause may make a NaN at one step, and infinity at another, or both at one.
        n_steps = min(sum(cause.n_steps for cause in same), most)
        more_steps = any(cause.more_steps for cause in same)
        numbers = {"n_steps": n_steps, "more_steps": more_steps}
        causes += [dataclasses.replace(cause, **numbers) for cause in same]
    return causes


def _causes_of_hit(
    derivative: Derivative, number: int, way: Way, hit: Hit, threshold, known
) -> list[Cause]:
    _, position = derivative.places[number]

    def at_steps(most):
        frames = hit.frames(most)
        return _causes_at_steps(derivative, position, way, frames, threshold, known)

    return [
        dataclasses.replace(cause, n_steps=n, more_steps=more)
        for cause, n, more in _with_counts(at_steps, hit.count)
    ]


# How many of the bad steps, or elements, are looked at, and how many if their causes differ.
_FEW, _MORE = 3, 16


def _with_counts(
    look_at: Callable[[int], Sequence[dict[Any, Cause]]], total: int
) -> list[tuple[Cause, int, bool]]:
    """The causes of a total of places, each with the number of these. If the causes differ, the
    number among those that are looked at, and whether there may be more.

    - `look_at`: returns, for at most as many places, from the first to the last, the causes
        there by what distinguishes them.
    """
    few = look_at(_FEW)
    if all(causes.keys() == few[0].keys() for causes in few):
        return [(cause, total, False) for causes in few[:1] for cause in causes.values()]
    more = look_at(_MORE)
    n_places = collections.Counter(key for causes in more for key in causes)
    first = {key: cause for causes in reversed([*more, *few]) for key, cause in causes.items()}
    are_more = len(more) < total
    return [(cause, n_places[key] or 1, are_more) for key, cause in first.items()]


def _causes_at_steps(
    derivative: Derivative, position: int, way: Way, frames: Iterable[Frame], threshold, known
) -> list[dict[Any, Cause]]:
    """For each step the causes."""
    found = []
    for frame in frames:
        causes: dict[Any, Cause] = {}
        for elements in _bad_elements(frame, position, way, threshold):
            for cause in _causes_of_elements(derivative, elements, known):
                causes.setdefault(key_of_cause(derivative, cause), cause)
        found.append(causes)
    return found


def causes_of_value(derivative: Derivative, root: Frame) -> tuple[list[Cause], list[Cause]]:
    """The causes of a loss that is not finite, and infinities that meet a NaN, and without it
    would do no harm."""
    loss, value = derivative.root.program.jaxpr.outvars[0], np.asarray(root.results[0])
    part = Part(root, loss, is_nonfinite(value), bool(np.isnan(value)))
    masks = masks_of_sources([part])
    found = sources_of_nonfinite([part])
    harmless = harmless_infinities(root, found)
    causes: tuple[list[Cause], list[Cause]] = [], []
    for key, source in found.items():
        causes[key in harmless].extend(
            dataclasses.replace(
                _cause_of_value(derivative, each, masks.get(key)),
                n_made=n_made,
                more_made=source.is_part,
                n_steps=n_steps,
                more_steps=source.is_part,
            )
            for each, n_made, n_steps in _of_each_kind(source)
        )
    return causes


def _cause_of_value(derivative: Derivative, source: Spot | Input, mask: Spot | None) -> Cause:
    """- `mask`: the selection in a gradient inside of the loss that does not take the value."""
    cause = _cause_of_source(derivative, source, forward=True)
    if mask is None or cause.kind != SINGULARITY:
        return cause
    return dataclasses.replace(cause, kind=DEAD_BRANCH, mask=Zero(mask, NOT_SELECTED))


_MOST_ELEMENTS = 256  # that are looked at one by one


def _of_each_kind(source: Elements | Input) -> list[tuple[Spot | Input, int, int]]:
    """One element for each kind, with how many elements there are of all kinds in its step, and
    in how many steps there are some of its kind: of a logarithm, those at zero and those below
    have other cures."""
    if isinstance(source, Input):
        return [(source, int(source.mask.sum()), 1)]
    most = _MOST_ELEMENTS if source.eqn.primitive.name in ELEMENTWISE else 1
    found: dict[str, list[tuple[Spot, int]]] = {}
    for step in (source, *source.others):
        spots = map(step.at, indices(step.mask)[:most])
        first = {_kind_of_source(spot): spot for spot in reversed([*spots])}
        for kind, spot in first.items():
            found.setdefault(kind, []).append((spot, int(step.mask.sum())))
    return [(*same[0], len(same)) for same in found.values()]


def _bad_elements(frame: Frame, position: int, way: Way, threshold) -> list[Elements]:
    """For each output of an equation the elements that are bad in this way."""
    found = []
    node, operands = frame.node, frame.operands[position]
    eqn = node.eqns[position]
    is_of_nan = has_nan_factor(node, position, operands)
    for k, (v, x) in enumerate(zip(eqn.outvars, frame.outputs[position], strict=True)):
        if not node.is_cotangent(v) or not is_inexact(x):
            continue
        bad = ways_of(np.asarray(x), is_of_nan, threshold)[way]
        if bad.any():
            found.append(Elements(frame, position, k, bad))
    return found


def _causes_of_elements(
    derivative: Derivative, elements: Elements, known: Collection[int]
) -> list[Cause]:
    """A cause for each equation or input that makes some of the elements of a cotangent bad."""
    first = elements.first
    if np.isfinite(first.value):
        origin = derivative.origin(first.frame.node, first.position)
        return [Cause(LARGE, origin, first, first)]
    sources = _sources(derivative, elements)
    if not sources:
        return [_cause_in_derivative(derivative, first, first)]
    at = derivative.origin(first.frame.node, first.position)
    sources = {
        key: source
        for key, source in sources.items()
        if isinstance(source, Input)
        or (blamed := _blamed(derivative, source.first, at)) is None
        or blamed.number not in known
    }
    if not sources:
        return []
    if len(sources) > 1:
        return [_because_of(derivative, elements, *each) for each in sources.items()]
    ((key, source),) = sources.items()

    def at_elements(most):
        spots = [elements.at(index) for index in indices(elements.mask, most)]
        causes = [_cause_at(derivative, spot, key, source) for spot in spots]
        return [{key_of_cause(derivative, cause): cause} for cause in causes]

    return [
        dataclasses.replace(cause, n_made=n, more_made=source.is_part or more)
        for cause, n, more in _with_counts(at_elements, int(source.mask.sum()))
    ]


def key_of_cause(derivative: Derivative, cause: Cause) -> Any:
    """Equal for what is reported once."""
    if isinstance(cause.source, Input):
        return ("input", cause.source.number, cause.kind)
    if cause.origin is None:
        return (None, cause.kind)
    inside = place_in_rule(derivative, cause.origin, cause.source, cause.spot)
    return (cause.origin.number, cause.kind, inside)


def _because_of(derivative: Derivative, elements: Elements, key: Any, source) -> Cause:
    """The cause of those of the elements that one of several sources makes bad."""
    spot = _first_because_of(derivative, elements, key)
    cause = _cause_at(derivative, spot, key, source)
    n_made = int(source.mask.sum())
    return dataclasses.replace(cause, n_made=n_made, more_made=source.is_part)


def _cause_at(derivative: Derivative, spot: Spot, key: Any, source) -> Cause:
    place = _sources(derivative, spot.alone).get(key) or source
    return _cause_in_derivative(derivative, spot, _first_of(place))


def _first_of(source: Elements | Input) -> Spot | Input:
    return source if isinstance(source, Input) else source.first


def _sources(derivative: Derivative, elements: Elements) -> Found:
    """What makes factors of elements of a cotangent non-finite. If they are finite, what makes
    the value of the operation so: a maximum that is NaN is equal to none of its operands, and
    its derivative divides by their number."""
    parts = _bad_factors(elements)
    if not parts:
        value = value_at(derivative, elements.first)
        if value is not None and np.isnan(value.value):
            parts = [Part(value.frame, value.eqn.outvars[0], value.alone.mask, True)]
    return sources_of_nonfinite(parts)


def _bad_factors(elements: Elements) -> list[Part]:
    first = elements.first
    factors = [k for k in range(len(first.operands)) if not first.is_cotangent(k)]
    return nonfinite_operands(elements, factors)


def _first_because_of(derivative: Derivative, elements: Elements, key: Any) -> Spot:
    """The first of the elements that a source makes bad, by bisection."""
    while elements.mask.sum() > 1:
        flat = np.flatnonzero(elements.mask)
        half = np.zeros(elements.mask.size, bool)
        half[flat[: len(flat) // 2]] = True
        half = half.reshape(elements.mask.shape)
        first = elements.among(half)
        is_there = key in _sources(derivative, first)
        elements = first if is_there else elements.among(~half)
    return elements.first


def _cause_in_derivative(derivative: Derivative, spot: Spot, source: Spot | Input) -> Cause:
    origin = derivative.origin(spot.frame.node, spot.position)
    if isinstance(source, Spot):
        origin = _blamed(derivative, source, origin)
    zero = _zero_cotangent(spot, _bad_factors(spot.alone))
    if zero is not None and derivative.is_reverse:
        return _cause_of_zero(derivative, spot, source, origin, zero)
    cause = _cause_of_source(derivative, source)
    bound = _bound_of(derivative, cause, spot, origin)
    if bound is not None:
        return Cause(DEAD_BRANCH, origin, spot, source, Zero(bound, BOUND))
    if zero is not None:  # in forward mode, what comes from a bound is zero as well
        return _cause_of_zero(derivative, spot, source, origin, zero)
    return dataclasses.replace(cause, origin=origin, spot=spot)


def _bound_of(derivative: Derivative, cause: Cause, spot: Spot, origin) -> Spot | None:
    """Of a singularity, the selection of which the operand is a constant, if it is: in
    `sqrt(maximum(x, 0))` for negative `x`, that by `maximum`, of which the derivative is zero.
    """
    if cause.kind != SINGULARITY or origin is None:
        return None
    places = [place for place in (cause.source, spot) if isinstance(place, Spot)]
    value = next(filter(None, (value_at(derivative, p, origin) for p in places)), None)
    if value is None:
        return None
    active = [k for k in range(len(value.operands)) if value.is_active(k)]
    bounds = [selected_constant(value, k) for k in active]
    return bounds[0] if len(bounds) == 1 else None


def _blamed(derivative: Derivative, source: Spot, origin: Origin | None) -> Origin | None:
    """The equation of the loss to blame: that which made a bad factor. An infinity that a
    `where` puts in is meant, and so that which is given it."""
    if origin is not None and _kind_of_source(source) == INFINITE_CONSTANT:
        return origin
    return derivative.origin(source.frame.node, source.position) or origin


def _zero_cotangent(spot: Spot, bad_factors) -> tuple[int, tuple[int, ...]] | None:
    """The element of a cotangent, zero, that an infinity multiplies or a zero divides."""
    name = spot.eqn.primitive.name
    if not np.isnan(spot.value):
        return None
    cotangents = [k for k in range(len(spot.operands)) if spot.is_cotangent(k)]
    if not bad_factors and name != "div":
        return None
    for k in cotangents:
        x = np.asarray(spot.operands[k])
        depends = elements_of(spot, k)
        if name == "dot_general" and bad_factors:
            depends = depends & _paired(spot, k, bad_factors)
        values = x[depends]
        if values.size and is_zero(values).all():
            index = tuple(map(int, np.argwhere(depends)[0])) if x.ndim else ()
            return k, index
    return None


def _paired(spot: Spot, k: int, bad_factors) -> Any:
    """The elements of a cotangent that a bad factor multiplies in a `dot_general`.

    Those for which the product is not finite: with ones for the cotangent, and for the factor
    one where it is bad and zero elsewhere.
    """
    values = [jnp.where(is_nonfinite(x), 1, 0).astype(x.dtype) for x in spot.operands]
    return pullback(spot, values, k) != 0


# Operations of which the derivative is a product with zeros for what they do not select.
_SELECTORS = frozenset(
    """
    select_n max min clamp abs sign sort reduce_max reduce_min reduce_window_max
    reduce_window_min cummax cummin relu relu6 leaky_relu scatter-max scatter-min scatter_max
    scatter_min
    """.split()  # noqa: SIM905
)


_MASKS = {MASKED_PRODUCT: 1, DEAD_BRANCH: 2}


def _cause_of_zero(derivative, spot, source, origin, zero) -> Cause:
    k, index = zero
    is_selection = ft.partial(_is_selection, derivative)
    made = sources_of_zero(spot.frame, spot.eqn.invars[k], index, is_selection)
    causes = [_cause_of_one_zero(derivative, spot, source, origin, each) for each in made]
    if not causes:
        kind = source.kind if isinstance(source, Input) else _kind_of_nan(spot)
        causes = [Cause(kind, origin, spot, source)]
    # A zero may be a sum of zeros, of which not all are those of a mask, and not all masks are
    # dead branches: two slices may select all elements. An index takes what a `where` drops.
    by_value = lambda cause: cause.mask and _is_selection(derivative, cause.mask.spot)
    cause = min(causes, key=lambda cause: (_MASKS.get(cause.kind, 0), not by_value(cause)))
    return dataclasses.replace(cause, cotangent=np.asarray(spot.operands[k])[index])


def _kind_of_nan(spot: Spot) -> str:
    """What an operation computes of a cotangent that is zero, if that is NaN."""
    return INDETERMINATE if spot.eqn.primitive.name == "div" else ZERO_TIMES_INFINITY


def _is_selection(derivative: Derivative, spot: Spot) -> bool:
    """Whether an equation is the derivative of an operation that does not use all elements.

    `abs` and `sign` use all of theirs: at zero, their derivative is zero by convention.
    """
    origin = derivative.origin(spot.frame.node, spot.position)
    return origin is not None and origin.primitive in _SELECTORS - {"abs", "sign"}


def _cause_of_one_zero(derivative, spot, source, origin, made: Zero) -> Cause:
    cause = _cause_of_source(derivative, source)
    if made.why == REPLACED:
        # It is zero only because a bad cotangent was replaced.
        return dataclasses.replace(cause, origin=origin, spot=spot)
    if made.why in (CANCELS, UNDERFLOWS) and cause.kind != OVERFLOW:
        return Cause(ZERO_TIMES_INFINITY, origin, spot, source, made)
    mask = derivative.origin(made.spot.frame.node, made.spot.position)
    if made.why == NOT_SELECTED or (mask is not None and mask.primitive in _SELECTORS):
        return Cause(DEAD_BRANCH, origin, spot, source, made)
    factors = [i for i in range(len(made.spot.operands)) if not made.spot.is_cotangent(i)]
    active = [i for i in factors if made.spot.is_active(i)]
    for i in active:
        mask = selected_constant(made.spot, i)
        if mask is not None:
            return Cause(MASKED_PRODUCT, origin, spot, source, Zero(mask, made.why))
    if active:
        # An infinity by overflow makes zeros elsewhere: 1 / (1 + exp(x)).
        kind = OVERFLOW if cause.kind == OVERFLOW else _kind_of_nan(spot)
        return Cause(kind, origin, spot, source)
    return Cause(MASKED_PRODUCT, origin, spot, source, made)


def _cause_of_source(derivative: Derivative, source: Spot | Input, forward=False) -> Cause:
    if isinstance(source, Input):
        return Cause(source.kind, None, None, source, forward=forward)
    origin = derivative.origin(source.frame.node, source.position)
    is_singular = origin is not None and origin.primitive in LOG_DETERMINANTS
    is_singular = is_singular or is_corner(derivative, source)
    kind = SINGULARITY if is_singular else _kind_of_source(source)
    return Cause(kind, origin, source, source, forward=forward)


# Infinite at a point where the operand is finite.
_POLES = ("div", "log", "rsqrt", "pow", "integer_pow", "log1p", "log2", "atanh", "digamma",
          "lgamma", "erf_inv", "tan", "cbrt")  # fmt: skip


def _kind_of_source(source: Spot) -> str:
    """Why an element is not finite although all that it depends on is."""
    name = source.eqn.primitive.name
    value = source.value
    if name == "select_n" and np.isinf(value):
        return INFINITE_CONSTANT
    if name in SOLVES:
        return SINGULARITY
    if name not in ELEMENTWISE:
        if np.isinf(value):
            return OVERFLOW
        arrays = (x for x in source.operands if is_inexact(x))
        is_of_infinities = any(np.isinf(np.asarray(x)).any() for x in arrays)
        return OF_INFINITIES.get(name, SINGULARITY) if is_of_infinities else SINGULARITY
    xs = [element(x, source.index) for x in source.operands if is_inexact(x)]
    if any(np.isnan(x) for x in xs):
        return INPUT  # a constant
    if any(np.isinf(x) for x in xs):
        return INFINITE_INPUT if np.isinf(value) else OF_INFINITIES.get(name, DOMAIN)
    if name == "div":
        if is_zero(xs[1]):
            return INDETERMINATE if is_zero(xs[0]) else SINGULARITY
        return OVERFLOW
    if np.isnan(value):
        return INDETERMINATE if name in ("pow", "atan2", "rem") and is_zero(xs[0]) else DOMAIN
    if name in ("pow", "integer_pow"):
        return SINGULARITY if is_zero(xs[0]) else OVERFLOW
    return SINGULARITY if name in _POLES else OVERFLOW
