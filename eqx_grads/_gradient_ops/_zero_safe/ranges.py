"""Which values an operation returns, and whether its derivative may not be finite.

Each value has a `Range`, found by interval arithmetic without running anything. The inputs of
the function are taken to be finite, and so are sums, products and positive integer powers of
finite numbers: overflow is expected of `exp` and its like only.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._jaxprs.primitives import ELEMENTWISE, JOINTLY_LINEAR, linear_operands, MULTILINEAR


INF = math.inf


@dataclasses.dataclass(frozen=True)
class Range:
    """What is known of the elements of an array.

    - `low`, `high`: bounds for those that are finite.
    - `finite`: whether all are.
    - `active`: whether some may depend on what is being differentiated.
    - `mixed`: whether others may not.
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
    return [i for i, v in enumerate(variables) if is_inexact_type(v.aval)]


def is_inexact_type(aval: Any) -> bool:
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
    if not values.size:
        return Range(0.0, 0.0, active=False)
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    if not finite.size:
        return Range(finite=False, active=False)
    return Range(
        float(finite.min()), float(finite.max()), bool(np.all(is_finite)), active=False
    )


# Their derivative is zero, and JAX knows it.
CONSTANT = frozenset(("sign", "floor", "ceil", "round", "stop_gradient", "nextafter"))
# An element of the output depends on some of the operands.
_CHOOSES = frozenset(
    """
    select_n max min clamp concatenate pad dynamic_update_slice scatter scatter-add scatter-sub
    scatter-max scatter-min sort stack top_k approx_top_k
    """.split()  # noqa: SIM905
)


def dependence(eqn: Any, ins: Sequence[Range]) -> tuple[bool, bool]:
    """Whether the outputs are `active`, and whether they are `mixed`."""
    name = eqn.primitive.name
    moving = [ins[i] for i in inexact_indices(eqn.invars)]
    case = decided_case(eqn, ins)
    if case is not None:
        return ins[case].active, ins[case].mixed
    if name in CONSTANT or not any(r.active for r in moving):
        return False, False
    if name in _CHOOSES:
        return True, any(r.mixed or not r.active for r in moving)
    if any(r.active and not r.mixed for r in moving):
        return True, name not in ELEMENTWISE and name not in MULTILINEAR and _any_mixed(moving)
    return True, True


def decided_case(eqn: Any, ins: Sequence[Range]) -> int | None:
    """The operand that a selection takes, if that is known."""
    if eqn.primitive.name != "select_n" or ins[0].low != ins[0].high:
        return None
    return 1 + int(ins[0].low)


def _any_mixed(moving) -> bool:
    return any(r.mixed for r in moving)


# Derivatives of all orders are finite where the operand is.
_SMOOTH = frozenset(
    """
    sin cos tanh logistic erf erfc asinh atan square sign floor ceil round abs max min
    reduce_max reduce_min cummax cummin reduce_window_max argmax argmin sort tan
    select_and_gather_add cumprod reduce_prod nextafter bessel_i0e bessel_i1e top_k approx_top_k
    scatter-max scatter-min
    """.split()  # noqa: SIM905
)
# Selections: each derivative is zero or one.
_SELECTING = frozenset(("select_n", "clamp", "gather", "stop_gradient"))
# May be infinite or NaN where the operand is finite. Others are, but have finite values.
_FINITE_VALUES = frozenset(("cbrt", "atan2"))


def has_risk(eqn: Any, ins: Sequence[Range]) -> bool:
    """Whether a factor of the derivative, of any order, may be infinite or NaN."""
    name = eqn.primitive.name
    if not inexact_indices(eqn.outvars) or name in _SELECTING:
        return False
    moving = inexact_indices(eqn.invars)
    if name in JOINTLY_LINEAR or name == "convert_element_type":
        return False
    if name != "div" and linear_operands(eqn) is not None and name in _LINEAR_BY_INDEX:
        return False
    if not all(ins[i].finite for i in moving):
        return name not in ("sign", "floor", "ceil", "round")
    if name in MULTILINEAR:
        return False
    if name in _SMOOTH:
        # The derivative of the absolute value of a complex zero is 0 / 0.
        return name in ("abs", "sign") and _is_complex(eqn.invars[0])
    return _is_singular(eqn, ins)


_LINEAR_BY_INDEX = frozenset(
    "dynamic_slice dynamic_update_slice scatter scatter-add scatter-sub".split()  # noqa: SIM905
)


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
        case "acosh":
            return not x.low >= 1 + 2 * near_one
    return True


def _limits(dtype) -> tuple[float, float, float]:
    """How far from zero a number has to be so that high powers of its inverse are finite; how
    far from one the next smaller number is; and up to where `exp` is finite."""
    info = jnp.finfo(dtype)
    # The bounds are numbers of double precision, in which `1 - small` may be one.
    small, near_one = float(info.tiny) ** 0.25, 0.5 * float(info.eps)
    return small, near_one, 0.8 * math.log(float(info.max))


_KEEPS_RANGE = frozenset(
    """
    reshape broadcast_in_dim squeeze transpose slice rev copy dynamic_slice gather real
    convert_element_type reduce_max reduce_min cummax cummin sharding_constraint split unstack
    optimization_barrier stop_gradient expand_dims reduce_precision device_put top_k
    approx_top_k
    """.split()  # noqa: SIM905
)
_JOINS = frozenset(
    "concatenate stack pad dynamic_update_slice sort scatter-max scatter-min".split()  # noqa: SIM905
)
_BOUNDS = {
    "tanh": (-1.0, 1.0),
    "logistic": (0.0, 1.0),
    "erf": (-1.0, 1.0),
    "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0),
    "sign": (-1.0, 1.0),
    "square": (0.0, INF),
    "abs": (0.0, INF),
    "exp": (0.0, INF),
    "exp2": (0.0, INF),
    "cosh": (1.0, INF),
    "sqrt": (0.0, INF),
    "rsqrt": (0.0, INF),
    "expm1": (-1.0, INF),
    "erfc": (0.0, 2.0),
    "atan": (-1.6, 1.6),
}


def ranges_of_outputs(eqn: Any, ins: Sequence[Range]) -> list[Range]:
    """The ranges of the outputs of a primitive, but for what `dependence` tells."""
    name = eqn.primitive.name
    case = decided_case(eqn, ins)
    if case is not None:
        return [ins[case]]
    if not inexact_indices(eqn.outvars):
        return [_range_of_integers(eqn, ins)] * len(eqn.outvars)
    moving = [ins[i] for i in inexact_indices(eqn.invars)]
    finite = all(r.finite for r in moving)
    if name in _FINITE_VALUES or not _is_from_table(name):
        finite = finite and name in _FINITE_VALUES
    elif name not in _SMOOTH and name not in _KEEPS_RANGE and not _is_linear(name):
        finite = finite and not _value_may_overflow(eqn, ins)
    low, high = _bounds(eqn, ins, moving or ins)
    return [Range(low, high, finite)] * len(eqn.outvars)


def _range_of_integers(eqn, ins: Sequence[Range]) -> Range:
    name = eqn.primitive.name
    if name in _COMPARISONS and all(r.finite for r in ins):
        x, y = ins if name in ("gt", "ge") else ins[::-1]
        if x.low > y.high or (x.low == y.high and name in ("ge", "le")):
            return Range(1.0, 1.0)
        if x.high < y.low or (x.high == y.low and name in ("gt", "lt")):
            return Range(0.0, 0.0)
    if name not in ("add", "sub", "mul", "neg", *_KEEPS_RANGE):
        return Range()
    low, high = _bounds(eqn, ins, ins)
    # Integers may wrap around.
    return Range(low, high) if -INF < low <= high < INF else Range()


_COMPARISONS = ("gt", "ge", "lt", "le")


def _is_linear(name) -> bool:
    return name in JOINTLY_LINEAR or name in MULTILINEAR or name in _LINEAR_BY_INDEX


_SINGULAR = frozenset(
    """
    sqrt rsqrt log log1p log2 div exp exp2 expm1 sinh cosh integer_pow pow asin acos atanh
    erf_inv acosh
    """.split()  # noqa: SIM905
)


def _is_from_table(name) -> bool:
    tables = (_SMOOTH, _SELECTING, _KEEPS_RANGE, _JOINS, _FINITE_VALUES, _SINGULAR)
    return _is_linear(name) or any(name in table for table in tables)


def _value_may_overflow(eqn, ins) -> bool:
    if eqn.primitive.name == "sqrt":  # NaN for negative numbers
        return not ins[0].low >= 0
    return eqn.primitive.name not in _SELECTING | _JOINS and _is_singular(eqn, ins)


def _bounds(eqn, ins: Sequence[Range], moving: Sequence[Range]) -> tuple[float, float]:
    name = eqn.primitive.name
    if not moving or _is_complex(eqn.outvars[0]):
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
            return moving[0].low, moving[2].high
        case "reduce_sum" | "cumsum":
            return (0.0 if x.low >= 0 else -INF), (0.0 if x.high <= 0 else INF)
        case "integer_pow":
            return (0.0 if x.low >= 0 or eqn.params["y"] % 2 == 0 else -INF), INF
        case "pow":
            return (0.0 if x.low >= 0 else -INF), INF
        case "log1p":
            return (0.0 if x.low >= 0 else -INF), INF
        case "exp":
            return 0.0, math.exp(min(x.high, 700.0)) if x.high < 700 else INF
        case "sqrt":
            return math.sqrt(max(x.low, 0.0)), INF if x.high == INF else math.sqrt(
                max(x.high, 0.0)
            )
    if name in _BOUNDS:
        return _BOUNDS[name]
    if name in _KEEPS_RANGE:
        return x.low, x.high
    if name in _JOINS or name == "select_n":
        return min(r.low for r in moving), max(r.high for r in moving)
    return -INF, INF


def _is_complex(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.complexfloating)


def _product(x: Range, y: Range) -> tuple[float, float]:
    corners = [
        0.0 if 0.0 in (a, b) else a * b for a in (x.low, x.high) for b in (y.low, y.high)
    ]
    return min(corners), max(corners)
