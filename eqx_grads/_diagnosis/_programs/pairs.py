"""What the outputs of an equation depend on, and in what they have a derivative.

A set is an integer: bit `i` says whether element `i` is in the set.
"""

import functools as ft
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from ..._jaxprs.evaluate import function_of
from ..._jaxprs.interpret import Domain, interpret, interpret_equation
from ..._jaxprs.primitives import JOINTLY_LINEAR, kind_of


# ---------------------------------------------------------------- dependence


def _apply(eqn, ins, _):
    if kind_of(eqn).identity:
        return ins
    return [ft.reduce(int.__or__, ins, 0)] * len(eqn.outvars)


# What a value depends on in any way.
_DEPENDENCE = Domain[int](
    constant=lambda x: 0,
    join=int.__or__,
    apply=_apply,
    decide=lambda eqn, index, out: index | out,
)


def operands_of_outputs(eqn: Any, selected: Sequence[bool] | None = None) -> list[set[int]]:
    """For each output of an equation, the operands, by index, that it depends on.

    - `selected`: of which operands; by default, all of them.
    """
    n = len(eqn.invars)
    bits = [1 << i if selected is None or selected[i] else 0 for i in range(n)]
    return list(map(members, interpret_equation(eqn, bits, _DEPENDENCE).outs))


def members(bits: int) -> set[int]:
    """The elements of a set."""
    return {i for i in range(bits.bit_length()) if bits >> i & 1}


# ---------------------------------------------------------------- differentiability


def is_inexact(variable: Any) -> bool:
    """Whether a variable of a program holds floats or complex numbers."""
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def differentiable_pairs(eqn: Any, operands: Set[int]) -> list[set[int]] | None:
    """For each output of an equation, which of some operands, by index, it has a derivative in.

    JAX is asked: the derivative of the equation is traced, and a cotangent that depends on no
    cotangent is zero for any values. `None` if JAX can't differentiate the equation.
    """
    moving = [i for i in sorted(operands) if is_inexact(eqn.invars[i])]
    outs = [j for j, v in enumerate(eqn.outvars) if is_inexact(v)]
    if eqn.primitive.name in JOINTLY_LINEAR and len(eqn.outvars) == 1:
        # JAX can't be asked about a collective: the axis is not known here.
        return [set(moving) if outs else set()]
    pairs: list[set[int]] = [set() for _ in eqn.outvars]
    if not moving or not outs:
        return pairs
    modes = [_reverse_pairs, _forward_pairs]
    if eqn.primitive.name == "custom_jvp_call":
        modes.reverse()  # as it takes half the time
    for pairs_of_mode in modes:
        try:
            found = pairs_of_mode(eqn, moving, outs)
        except Exception:  # whatever a rule raises where it does not have this mode
            continue
        for j, i in found:
            pairs[outs[j]].add(moving[i])
        return pairs
    return None


def _reverse_pairs(eqn, moving, outs):
    def cotangents(operands, cts):
        function = function_of(eqn, operands, moving, outs)
        return jax.vjp(function, *(operands[i] for i in moving))[1](cts)

    types, out_types = _types(eqn.invars), _types([eqn.outvars[j] for j in outs])
    program = jax.make_jaxpr(cotangents)(types, out_types)
    bits = [0] * len(types) + [1 << j for j in range(len(outs))]
    results = interpret(program, bits, _DEPENDENCE).outs
    return {(j, i) for i, result in enumerate(results) for j in members(result)}


def _forward_pairs(eqn, moving, outs):
    def tangents(operands, ts):
        function = function_of(eqn, operands, moving, outs)
        return jax.jvp(function, [operands[i] for i in moving], ts)[1]

    types = _types(eqn.invars)
    program = jax.make_jaxpr(tangents)(types, [types[i] for i in moving])
    bits = [0] * len(types) + [1 << i for i in range(len(moving))]
    results = interpret(program, bits, _DEPENDENCE).outs
    return {(j, i) for j, result in enumerate(results) for i in members(result)}


def _types(variables) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
