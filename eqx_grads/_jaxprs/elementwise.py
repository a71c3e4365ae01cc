"""Which primitives are elementwise, and which equations are cheap to compute once more."""

from typing import Any

from .structure import Call, CallWithRule, structure


# An element of the output depends on the elements of the operands with the same index. An
# operand may be a scalar (a predicate, the bounds of `clamp`), or have axes of length one.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mul_add mulhi ne neg
    nextafter not one_minus_square or pbroadcast polygamma polynomial population_count pow pvary
    random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh xor zeta
    """.split()  # noqa: SIM905
)
# Computed by a series or a loop.
_ITERATIVE = frozenset(
    """
    igamma igamma_grad_a igammac polygamma random_gamma_grad regularized_incomplete_beta zeta
    """.split()  # noqa: SIM905
)
_LAYOUT = frozenset(
    """
    broadcast_in_dim reshape squeeze expand_dims transpose rev slice split concatenate pad iota
    empty empty2 dynamic_slice stack unstack tile optimization_barrier full bitcast_convert_type
    """.split()  # noqa: SIM905
)


_CHEAP = (ELEMENTWISE - _ITERATIVE) | _LAYOUT


def is_cheap(eqn: Any) -> bool:
    """Whether an equation costs no more than to read its operands and write its outputs."""
    known = structure(eqn)
    if isinstance(known, Call | CallWithRule):
        return all(map(is_cheap, known.programs[0].eqns))
    return eqn.primitive.name in _CHEAP


def is_bitcast(eqn: Any) -> bool:
    """Whether the output is the memory of the operand."""
    return eqn.primitive.name in ("reshape", "squeeze", "expand_dims", "copy_p", "copy")


def is_product(eqn: Any) -> bool:
    """Whether this is a matrix product or a convolution."""
    return eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general")


def is_view_in_product(eqn: Any) -> bool:
    """Whether a matrix product can read the operand in place of the output."""
    return eqn.primitive.name == "transpose" or is_bitcast(eqn)


_EXPENSIVE = frozenset(
    """
    div pow sqrt rsqrt cbrt exp exp2 expm1 log log1p log2 sin cos tan asin acos atan atan2 sinh
    cosh tanh asinh acosh atanh logistic erf erfc erf_inv rem
    """.split()  # noqa: SIM905
)


def is_expensive(eqn: Any) -> bool:
    """Whether XLA computes an elementwise operation once only, and writes its result."""
    return eqn.primitive.name in _EXPENSIVE
