"""Which equations are cheap to compute once more: elementwise, or a change of layout."""

from typing import Any

from .structure import Call, CallWithRule, structure


_ELEMENTWISE = frozenset(
    """
    add sub mul div neg sign abs max min rem pow integer_pow square sqrt rsqrt cbrt exp exp2
    expm1 log log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh logistic
    erf erfc erf_inv one_minus_square floor ceil round clamp nextafter is_finite eq ne lt le gt
    ge and or not xor shift_left shift_right_logical shift_right_arithmetic select_n
    convert_element_type bitcast_convert_type real imag conj complex add_any stop_gradient
    reduce_precision mul_add
    """.split()  # noqa: SIM905
)
_LAYOUT = frozenset(
    """
    broadcast_in_dim reshape squeeze expand_dims transpose rev slice split concatenate pad copy
    copy_p iota empty empty2 dynamic_slice stack unstack tile pvary pbroadcast
    optimization_barrier full
    """.split()  # noqa: SIM905
)


def is_cheap(eqn: Any) -> bool:
    """Whether an equation costs no more than to read its operands and write its outputs."""
    known = structure(eqn)
    if isinstance(known, Call | CallWithRule):
        return all(map(is_cheap, known.programs[0].eqns))
    return eqn.primitive.name in _ELEMENTWISE | _LAYOUT


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
    div pow sqrt rsqrt cbrt exp exp2 expm1 log log1p sin cos tan asin acos atan atan2 sinh cosh
    tanh asinh acosh atanh logistic erf erfc erf_inv rem
    """.split()  # noqa: SIM905
)


def is_expensive(eqn: Any) -> bool:
    """Whether XLA computes an elementwise operation once only, and writes its result."""
    return eqn.primitive.name in _EXPENSIVE
