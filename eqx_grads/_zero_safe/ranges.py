"""Which values an operation returns, and whether its derivative may not be finite.

Each value has a `Range`, found by interval arithmetic without running anything. The inputs of
the function are taken to be finite, and so are sums, products and positive integer powers of
finite numbers: overflow is expected of `exp` and its like only.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._jaxprs.interpret import Domain
from .._jaxprs.primitives import INF, kind_of
from .._jaxprs.structure import CallWithRule, structure, While


class Range(NamedTuple):
    """Known facts about the elements of an array.

    - `low`, `high`: bounds for the finite elements.
    - `finite`: whether all are.
    - `active`: whether some may depend on what is being differentiated.
    - `mixed`: whether others may not.

    This is interval analysis: a range holds for all runs of an equation in a loop.
    """

    low: float = -INF
    high: float = INF
    finite: bool = True
    active: bool = True
    mixed: bool = False

    def join(self, other: "Range") -> "Range":
        return Range(
            min(self.low, other.low),
            max(self.high, other.high),
            self.finite and other.finite,
            self.active or other.active,
            self.mixed or other.mixed or self.active != other.active,
        )

    def widened_to(self, other: "Range") -> "Range":
        """The join, in which a bound that moves is given up, so that loops come to an end."""
        both = self.join(other)
        low = self.low if both.low == self.low else -INF
        high = self.high if both.high == self.high else INF
        return Range(low, high, both.finite, both.active, both.mixed)


def inexact_indices(variables: Sequence[Any]) -> list[int]:
    """Which variables of a program hold floating or complex numbers."""
    return [i for i, v in enumerate(variables) if is_inexact(v.aval)]


def is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.bool_), jnp.inexact)


def range_of_constant(x: Any) -> Range:
    """The range of a constant of the program; a tracer may be differentiated."""
    if isinstance(x, Tracer):
        return Range()
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, np.bool_) and not jnp.issubdtype(dtype, jnp.number):  # a key
        return Range(active=False)
    if jnp.iscomplexobj(x):
        return Range(finite=bool(np.all(np.isfinite(np.asarray(x)))), active=False)
    values = np.asarray(x, np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (-INF, INF)
    return Range(low, high, finite.size == values.size, active=False)


def _outputs(eqn: Any, ins: Sequence[Range], _) -> list[Range]:
    """The ranges of the outputs of an equation that is not entered."""
    if kind_of(eqn).identity:
        return list(ins)
    active, mixed = _dependence(eqn, ins)
    if isinstance(structure(eqn), While):
        return [Range(finite=False, active=active, mixed=True)] * len(eqn.outvars)
    outs = _ranges_of_outputs(eqn, ins)
    return [r._replace(active=active, mixed=mixed) for r in outs]


def _finish(eqn: Any, ins: Sequence[Range], outs: Sequence[Range]) -> Sequence[Range]:
    if not any(ins[i].active for i in inexact_indices(eqn.invars)):
        return [r._replace(active=False) for r in outs]
    if isinstance(structure(eqn), CallWithRule):  # which may multiply a tangent by zero
        return [r._replace(active=True, mixed=True) for r in outs]
    return outs


def _dependence(eqn: Any, ins: Sequence[Range]) -> tuple[bool, bool]:
    """Whether the outputs are `active`, and whether they are `mixed`."""
    kind, case = kind_of(eqn), decided_case(eqn, ins)
    if case is not None:
        return ins[case].active, ins[case].mixed
    moving = [ins[i] for i in inexact_indices(eqn.invars)]
    if kind.derivative == "zero" or not any(r.active for r in moving):
        return False, False
    any_mixed = any(r.mixed for r in moving)
    if kind.linear != "each" and (kind.selects or kind.bounds == "operands"):
        return True, any_mixed or not all(r.active for r in moving)
    if any(r.active and not r.mixed for r in moving):
        return True, any_mixed and not kind.elementwise and kind.linear != "each"
    return True, True


def decided_case(eqn: Any, ins: Sequence[Range]) -> int | None:
    """The operand that a selection takes, if that is known, as in `jnp.var`."""
    if eqn.primitive.name != "select_n" or ins[0].low != ins[0].high:
        return None
    return 1 + int(ins[0].low)


def has_risk(eqn: Any, ins: Sequence[Range]) -> bool:
    """Whether a factor of the derivative, of any order, may be infinite or NaN."""
    kind = kind_of(eqn)
    if not inexact_indices(eqn.outvars) or kind.derivative in ("zero", "constant"):
        return False
    if not all(ins[i].finite for i in inexact_indices(eqn.invars)):
        return True
    if kind.derivative == "smooth":
        # The derivative of the absolute value of a complex zero is 0 / 0.
        return eqn.primitive.name == "abs" and _is_complex(eqn.invars[0])
    return _is_singular(eqn, ins)


def _is_singular(eqn, ins: Sequence[Range]) -> bool:
    """Whether a primitive that has singularities, or an unknown one, may be at one."""
    name, x = eqn.primitive.name, ins[0]
    small, near_one, large = _limits(eqn.outvars[0].aval.dtype)
    y = ins[1] if len(ins) > 1 else x
    match name:
        case "sqrt" | "rsqrt" | "log" | "log2":
            return not x.low >= small
        case "log1p":
            return not x.low >= near_one - 1
        case "div":
            return not (y.low >= small or y.high <= -small)
        case "exp" | "exp2" | "expm1":
            return not x.high <= large
        case "sinh" | "cosh":
            return not (x.high <= large and x.low >= -large)
        case "integer_pow":
            return eqn.params["y"] < 0 and not (x.low >= small or x.high <= -small)
        case "pow":
            is_integer = y.low == y.high and float(y.low).is_integer() and y.low >= 0
            bounded = x.high < INF and y.low > -INF and y.high < INF
            return y.active or not (is_integer or (x.low >= small and bounded))
        case "asin" | "acos" | "atanh" | "erf_inv":
            return not (x.low >= near_one - 1 and x.high <= 1 - near_one)
    return True


def _limits(dtype) -> tuple[float, float, float]:
    """How far from zero a number has to be so that high powers of its inverse are finite; how
    far from one the next smaller number is; and up to where `exp` is finite."""
    info = jnp.finfo(dtype)
    # The bounds are numbers of double precision, in which `1 - small` may be one.
    small, near_one = float(info.tiny) ** 0.25, 0.5 * float(info.eps)
    return small, near_one, 0.8 * math.log(float(info.max))


def _ranges_of_outputs(eqn: Any, ins: Sequence[Range]) -> list[Range]:
    """The ranges of the outputs of a primitive, but for whether they are active."""
    case = decided_case(eqn, ins)
    if case is not None:
        return [ins[case]]
    if not inexact_indices(eqn.outvars):
        return [_truth(eqn, ins)] * len(eqn.outvars)
    moving = [ins[i] for i in inexact_indices(eqn.invars)]
    finite = all(r.finite for r in moving) and _is_finite(eqn, ins)
    bounds = _bounds(eqn, ins, moving or ins)
    # The positions that `sort` returns are not within the bounds of the values.
    return [
        Range(*(_rounded(b, v.aval.dtype) for b in bounds), finite=finite)
        if is_inexact(v.aval)
        else Range()
        for v in eqn.outvars
    ]


def _rounded(bound: float, dtype: Any) -> float:
    """A bound of exact results as a bound of rounded ones: rounding is monotonic."""
    info = jnp.finfo(dtype)
    if abs(bound) < float(info.tiny):  # the device may round these to zero
        return 0.0
    with np.errstate(over="ignore"):
        return float(np.asarray(bound).astype(info.dtype))


def _is_finite(eqn, ins: Sequence[Range]) -> bool:
    """Whether the values at finite operands are finite."""
    if _may_fill(eqn, ins):
        return False
    if eqn.primitive.name == "sqrt":  # NaN for negative numbers
        return ins[0].low >= 0
    if eqn.primitive.name in ("cbrt", "atan2"):  # only their derivatives are not
        return True
    derivative = kind_of(eqn).derivative
    return not _is_singular(eqn, ins) if derivative == "singular" else derivative is not None


def _truth(eqn, ins: Sequence[Range]) -> Range:
    """The range of a comparison, if its result is known, and of integers that are moved. Others
    may wrap around."""
    if eqn.primitive.name in ("gt", "ge", "lt", "le") and all(r.finite for r in ins):
        x, y = ins if eqn.primitive.name in ("gt", "ge") else ins[::-1]
        is_strict = eqn.primitive.name in ("gt", "lt")
        if x.low > y.high or (x.low == y.high and not is_strict):
            return Range(1.0, 1.0)
        if x.high < y.low or (x.high == y.low and is_strict):
            return Range(0.0, 0.0)
    is_moved = kind_of(eqn).bounds == "operand" and eqn.primitive.name != "convert_element_type"
    return Range(*_bounds(eqn, ins, ins)) if is_moved else Range()


def _may_fill(eqn, ins: Sequence[Range]) -> bool:
    """Whether a `gather` returns NaN, usually, for an index that may be out of bounds."""
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    if eqn.primitive.name != "gather" or eqn.params["mode"] != mode:
        return False
    axes = eqn.params["dimension_numbers"].start_index_map
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    return ins[1].low < 0 or any(ins[1].high > shape[i] - sizes[i] for i in axes)


def _bounds(eqn, ins: Sequence[Range], moving: Sequence[Range]) -> tuple[float, float]:
    name = eqn.primitive.name
    if not moving or _is_complex(eqn.outvars[0]) or _may_fill(eqn, ins):
        return -INF, INF
    x, y = moving[0], moving[-1]
    match name:
        case "add" | "add_any":
            return x.low + y.low, x.high + y.high
        case "sub":
            return x.low - y.high, x.high - y.low
        case "neg":
            return -x.high, -x.low
        case "mul":
            same = eqn.invars[0] is eqn.invars[1]
            return (0.0, INF) if same else _product(x, y)
        case "div":
            positive = y.low > 0
            return _product(x, Range(0.0, 1 / y.low)) if positive else (-INF, INF)
        case "max":
            return max(x.low, y.low), max(x.high, y.high)
        case "min":
            return min(x.low, y.low), min(x.high, y.high)
        case "clamp" if len(moving) == 3:
            low, high = moving[0], moving[2]  # which need not be in this order
            return min(low.low, high.low), high.high
        case "reduce_sum" | "cumsum":
            return (0.0 if x.low >= 0 else -INF), (0.0 if x.high <= 0 else INF)
        case "integer_pow":
            return (0.0 if x.low >= 0 or eqn.params["y"] % 2 == 0 else -INF), INF
        case "exp":
            return 0.0, math.exp(x.high) if x.high < 700 else INF
        case "sqrt":
            return math.sqrt(max(x.low, 0.0)), math.sqrt(max(x.high, 0.0))
    bounds = kind_of(eqn).bounds
    if bounds == "operand":
        return x.low, x.high
    if bounds == "operands":
        return min(r.low for r in moving), max(r.high for r in moving)
    return bounds or (-INF, INF)


def _is_complex(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.complexfloating)


def _product(x: Range, y: Range) -> tuple[float, float]:
    corners = [
        0.0 if 0.0 in (a, b) else a * b for a in (x.low, x.high) for b in (y.low, y.high)
    ]
    return min(corners), max(corners)


RANGES = Domain(
    constant=range_of_constant,
    join=Range.join,
    apply=_outputs,
    enters=lambda known: not isinstance(known, While),
    finish=_finish,
    widen=Range.widened_to,
)
