"""One table of primitives: what clients ask of each primitive of JAX.

A primitive without a row is unknown, and each client assumes the worst case.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from .structure import LinearCall, structure


class Primitive(NamedTuple):
    """The properties of a primitive.

    - `elementwise`: an element of the output depends on the elements of the operands with the
        same index. An operand may be a scalar (a predicate, the bounds of `clamp`), or have
        axes of length one.
    - `layout`: moves elements, or makes constants.
    - `sums`: an element of an output is an element of the operands, or a sum of some. So a
        cotangent of ones is pulled back to a positive number wherever an element is used. A
        product along an axis does this where all factors are one.
    - `identity`: output `i` is operand `i`.
    - `selects`: some elements of the operands are not used.
    - `linear`: in all operands together, in each operand while the others are fixed, in the
        operands with these indices together, or in none (`"no"`). `None` if unknown.
    - `derivative`: `"zero"`, as JAX knows; `"constant"` (no factor depends on a value);
        `"smooth"` (all orders are finite at finite operands); or `"singular"` somewhere.
    - `bounds`: of the values, in any case; or they are among the values of the first operand
        (`"operand"`), or of all of them (`"operands"`).
    - `along`: a function of whole matrices, or of all elements along an axis.
    """

    elementwise: bool = False
    layout: bool = False
    sums: bool = False
    identity: bool = False
    selects: bool = False
    linear: Literal["jointly", "each", "no"] | tuple[int, ...] | None = None
    derivative: Literal["zero", "constant", "smooth", "singular"] | None = None
    bounds: Literal["operand", "operands"] | tuple[float, float] | None = None
    along: Literal["matrices", "axis"] | None = None


INF = math.inf
_TABLE: dict[str, Primitive] = {}


def _rows(names: str, row: Primitive, **changes: Any) -> None:
    """Give each name a row."""
    _TABLE.update((name, row._replace(**changes)) for name in names.split())


# ---------------------------------------------------------------- elementwise

_f = Primitive(elementwise=True)
_rows("and clz eq_to le_to lt_to mulhi not or population_count shift_left xor", _f)
_rows("shift_right_arithmetic shift_right_logical mul_add one_minus_square polynomial", _f)
_rows("copy_p", _f, bounds="operand")
_rows("stop_gradient", _f, derivative="zero", bounds="operand")
_rows("convert_element_type", _f, derivative="constant", bounds="operand")
_rows("select_n", _f, selects=True, derivative="constant", bounds="operands")
_rows("mul", _f, linear="each", derivative="smooth")
_rows("div", _f, linear=(0,), derivative="singular")
_rows("integer_pow log2", _f, derivative="singular")
_rows("bessel_i0e bessel_i1e", _f, derivative="smooth")
_rows("igamma_grad_a random_gamma_grad regularized_incomplete_beta zeta", _f)

_linear = _f._replace(linear="jointly", derivative="constant")
_rows("add add_any complex conj imag neg reduce_precision sub", _linear)
_rows("copy pbroadcast pvary real reshard sharding_constraint", _linear, bounds="operand")

_other = _f._replace(linear="no")
_rows("digamma eq ge gt igamma igammac is_finite le lgamma lt ne polygamma rem", _other)
_rows("ceil floor nextafter round", _other, derivative="zero")
_rows("sign", _other, derivative="zero", bounds=(-1.0, 1.0))
_rows("abs square", _other, derivative="smooth", bounds=(0.0, INF))
_rows("max min", _other, derivative="smooth", selects=True)
_rows("clamp", _other, derivative="constant", selects=True)

_smooth = _other._replace(derivative="smooth")
_rows("asinh tan", _smooth)
_rows("cos erf sin tanh", _smooth, bounds=(-1.0, 1.0))
_rows("atan", _smooth, bounds=(-1.6, 1.6))
_rows("logistic", _smooth, bounds=(0.0, 1.0))
_rows("erfc", _smooth, bounds=(0.0, 2.0))

_singular = _other._replace(derivative="singular")
_rows("acos acosh asin atan2 atanh cbrt erf_inv log log1p pow sinh", _singular)
_rows("exp exp2 rsqrt sqrt", _singular, bounds=(0.0, INF))
_rows("expm1", _singular, bounds=(-1.0, INF))
_rows("cosh", _singular, bounds=(1.0, INF))

# ---------------------------------------------------------------- layout

_rows("bitcast_convert_type empty empty2 full iota", Primitive(layout=True))
_moves = Primitive(layout=True, sums=True, derivative="constant", bounds="operand")
_rows("expand_dims", _moves)
_rows("broadcast_in_dim reshape rev squeeze tile transpose", _moves, linear="jointly")
_rows("slice split unstack", _moves, linear="jointly", selects=True)
_rows("dynamic_slice", _moves, linear=(0,), selects=True)
_rows("gather", _moves, layout=False, linear=(0,), selects=True)
_rows("concatenate stack", _moves, linear="jointly", bounds="operands")
_rows("pad", _moves, linear="jointly", bounds="operands", selects=True)
_rows("optimization_barrier", _moves, linear="jointly", identity=True)

# ---------------------------------------------------------------- updates, sums, products

# A scatter drops what has an index out of bounds, by which ragged data are padded.
_updates = Primitive(sums=True, selects=True, derivative="constant")
_rows("dynamic_update_slice", _updates, linear=(0, 1), bounds="operands")
_rows("scatter", _updates, linear=(0, 2), bounds="operands")
_rows("scatter-add scatter-sub", _updates, linear=(0, 2))
_rows("scatter-max scatter-min", _updates, derivative="smooth", bounds="operands")
_rows("select_and_scatter_add", Primitive(linear=(0,)))

_sums = Primitive(sums=True, linear="jointly", derivative="constant")
_rows("cumsum reduce_sum", _sums)
_rows("reduce_window_sum", _sums, selects=True)
_rows("device_put", _sums, identity=True)
_rows("layout_constraint", _sums, sums=False, bounds="operand")
_rows("fft all_gather all_gather_invariant all_gather_reduced all_to_all", _sums, sums=False)
_rows("ppermute preduced psum psum_invariant reduce_scatter", _sums, sums=False)
_rows("unreduced_psum unreduced_reduce_scatter", _sums, sums=False)

_rows("dot_general ragged_dot_general", Primitive(linear="each", derivative="smooth"))
_rows("conv_general_dilated", _updates, linear="each", derivative="smooth")

# ---------------------------------------------------------------- extrema, order, others

_order = Primitive(sums=True, selects=True, derivative="constant", linear="no")
_rows("sort", _order, selects=False, bounds="operands")
_rows("top_k approx_top_k", _order, linear=None, bounds="operands")
_rows("reduce_window_max reduce_window_min", _order)
_rows("cummax cummin reduce_max reduce_min", _order, derivative="smooth", bounds="operand")
_rows("select_and_gather_add", Primitive(derivative="smooth"))

_rows("argmax argmin", Primitive(linear="no", derivative="zero"))
_products = Primitive(sums=True, linear="no", along="axis")
_rows("cumprod reduce_prod", _products, derivative="smooth")
_rows("cumlogsumexp", _products)
_matrices = Primitive(along="matrices")
_rows("cholesky cholesky_update eig eigh geqrf hessenberg householder_product", _matrices)
_rows("lu qr schur svd", _matrices)
_rows("triangular_solve", _matrices, linear=(1,))
_rows("tridiagonal_solve", Primitive(linear=(3,)))


_UNKNOWN = Primitive()


def kind_of(eqn: Any) -> Primitive:
    """The row of the primitive of an equation."""
    return _TABLE.get(eqn.primitive.name, _UNKNOWN)


def linear_operands(eqn: Any) -> Sequence[int] | None:
    """The operands in which an equation is jointly linear, by index; `None` if unknown."""
    linear, n = kind_of(eqn).linear, len(eqn.invars)
    if linear == "jointly":
        return range(n)
    if isinstance(known := structure(eqn), LinearCall):
        return range(known.n_residuals, n)
    if eqn.primitive.name == "custom_linear_solve":  # the right-hand sides come last
        return range(n - len(eqn.outvars), n)
    return linear if isinstance(linear, tuple) else None


ELEMENTWISE = frozenset(name for name, row in _TABLE.items() if row.elementwise)
MULTILINEAR = frozenset(name for name, row in _TABLE.items() if row.linear == "each")
