"""The values that the outputs of an equation depend on, and in which they have a derivative.

A set is an integer: bit `i` says whether element `i` is in the set.
"""

import functools as ft
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxprs.evaluate import function_of
from .._jaxprs.interpret import Domain, interpret, interpret_equation
from .._jaxprs.primitives import kind_of


# ---------------------------------------------------------------- dependence


def _apply(eqn, ins, _):
    if kind_of(eqn).identity:
        return ins
    return [ft.reduce(int.__or__, ins, 0)] * len(eqn.outvars)


# The inputs that a value depends on in any way.
_DEPENDENCE = Domain[int](
    constant=lambda x: 0,
    join=int.__or__,
    apply=_apply,
    decide=lambda eqn, index, out: index | out,
)


def operands_of_outputs(eqn: Any) -> list[set[int]]:
    """For each output of an equation, the operands, by index, that it depends on."""
    bits = [1 << i for i in range(len(eqn.invars))]
    return list(map(members, interpret_equation(eqn, bits, _DEPENDENCE).outs))


def members(bits: int) -> set[int]:
    """The elements of a set."""
    return {i for i in range(bits.bit_length()) if bits >> i & 1}


# ---------------------------------------------------------------- differentiability


def is_inexact(x: Any) -> bool:
    """Whether an array, a variable of a program or a dtype is of floats or complex numbers."""
    x = getattr(x, "aval", x)
    dtype = x if isinstance(x, type | np.dtype) else getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, float | complex)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def differentiable_pairs(eqn: Any, operands: Set[int]) -> list[set[int]] | None:
    """For each output of an equation, which of some operands, by index, it has a derivative in.

    JAX is asked: the derivative of the equation is traced, and a cotangent that depends on no
    cotangent is zero for any values. `None` if JAX can't differentiate the equation.
    """
    moving = [i for i in sorted(operands) if is_inexact(eqn.invars[i])]
    outs = [j for j, v in enumerate(eqn.outvars) if is_inexact(v)]
    if kind_of(eqn).linear == "jointly" and len(eqn.outvars) == 1:
        # JAX can't be asked about a collective: the axis is not known here.
        return [set(moving) if outs else set()]
    pairs: list[set[int]] = [set() for _ in eqn.outvars]
    for is_reverse in (True, False):
        try:
            found = _pairs_of_mode(eqn, moving, outs, is_reverse)
        except Exception:  # whatever a rule raises where it does not have this mode
            continue
        for j, i in found:
            pairs[outs[j]].add(moving[i])
        return pairs
    return None


def _pairs_of_mode(eqn, moving, outs, is_reverse: bool) -> set[tuple[int, int]]:
    def derivative(operands, along):
        function = function_of(eqn, operands, moving, outs)
        at = [operands[i] for i in moving]
        if is_reverse:
            return jax.vjp(function, *at)[1](along)
        return jax.jvp(function, at, along)[1]

    types = _types(eqn.invars)
    along = _types([eqn.outvars[j] for j in outs]) if is_reverse else [types[i] for i in moving]
    program = jax.make_jaxpr(derivative)(types, along)
    bits = [0] * len(types) + [1 << j for j in range(len(along))]
    results = interpret(program, bits, _DEPENDENCE).outs
    found = {(j, i) for i, result in enumerate(results) for j in members(result)}
    return found if is_reverse else {(i, j) for j, i in found}


def _types(variables) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
