"""Propagate sets through a program, without running it: what each value comes from.

A set is an integer, of which bit `i` says whether element `i` is in the set. A value has two,
see `Sources`. The sets of a loop are those of all of its steps together.
"""

import abc
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .evaluate import bind, evaluate
from .linearity import JOINTLY_LINEAR
from .structure import CallWithRule, Cond, Scan, structure, While


class Sources(NamedTuple):
    """What a value comes from: `live` is for what it is differentiable in, and `cut` for
    anything else. What these are sets of is up to the `AbstractPropagation`."""

    live: int = 0
    cut: int = 0

    def __or__(self, other: "Sources") -> "Sources":
        return Sources(self.live | other.live, self.cut | other.cut)


NOTHING = Sources()


class AbstractPropagation(abc.ABC):
    """What an equation does to the sets of its operands.

    `path` holds the enclosing equations, outermost first.
    """

    @abc.abstractmethod
    def apply(self, eqn: Any, ins: Sequence[Sources], path: tuple) -> Sequence[Sources]:
        """The sets of the outputs of an equation that has no inner programs, is opaque, or has
        a rule."""

    @abc.abstractmethod
    def decide(self, eqn: Any, value: Sources) -> Sources:
        """What the outputs take over from the index of a `cond` or the predicate of a
        `while_loop`."""


def propagate(
    program: ClosedJaxpr,
    ins: Sequence[Sources],
    propagation: AbstractPropagation,
    path: tuple = (),
) -> list[Sources]:
    """The sets of the outputs of a program."""

    def hook(eqn, ins):
        return propagate_equation(eqn, ins, propagation, path)

    return evaluate(program, ins, hook, constant=_nothing)


def _nothing(constant) -> Sources:
    del constant
    return NOTHING


def propagate_equation(
    eqn: Any, ins: Sequence[Sources], propagation: AbstractPropagation, path: tuple = ()
) -> Sequence[Sources]:
    """The sets of the outputs of an equation."""
    known = structure(eqn)
    inside = (*path, eqn)
    match known:
        case None | CallWithRule():
            return propagation.apply(eqn, ins, path)
        case Scan():
            return _scan(known, ins, propagation, inside)
        case While():
            return _while(eqn, known, ins, propagation, inside)
        case Cond():
            decision = propagation.decide(eqn, ins[0])
            outs = [propagate(b, ins[1:], propagation, inside) for b in known.programs]
            return [_union([decision, *parts]) for parts in zip(*outs, strict=True)]
    return propagate(*known.programs, ins, propagation, inside)


def _union(parts: Sequence[Sources]) -> Sources:
    result = NOTHING
    for part in parts:
        result |= part
    return result


def _scan(scan: Scan, ins, propagation, inside) -> list[Sources]:
    first, last = scan.n_consts, scan.n_consts + scan.n_carry
    carry = ins[first:last]
    while True:  # sets only grow, so this ends
        outs = propagate(
            *scan.programs, [*ins[:first], *carry, *ins[last:]], propagation, inside
        )
        grown = [a | b for a, b in zip(carry, outs, strict=False)]
        if grown == carry:
            return [*carry, *outs[scan.n_carry :]]
        carry = grown


def _while(eqn, loop: While, ins, propagation, inside) -> list[Sources]:
    cond, body = loop.programs
    n, first = loop.n_cond_consts, loop.n_cond_consts + loop.n_body_consts
    carry = list(ins[first:])
    while True:
        (predicate,) = propagate(cond, [*ins[:n], *carry], propagation, inside)
        decision = propagation.decide(eqn, predicate)
        outs = propagate(body, [*ins[n:first], *carry], propagation, inside)
        grown = [a | b | decision for a, b in zip(carry, outs, strict=True)]
        if grown == carry:
            return carry
        carry = grown


# ---------------------------------------------------------------- dependence


class _Dependence(AbstractPropagation):
    """`live` is what a value depends on in any way."""

    def apply(self, eqn, ins, path):
        if isinstance(known := structure(eqn), CallWithRule):
            return propagate(*known.programs, ins, self, (*path, eqn))
        if eqn.primitive.name in ("optimization_barrier", "device_put"):
            return ins
        return [_union(ins)] * len(eqn.outvars)

    def decide(self, eqn, value):
        return value


def operands_of_outputs(eqn: Any, selected: Sequence[bool] | None = None) -> list[set[int]]:
    """For each output of an equation, the operands, by index, that it depends on.

    - `selected`: of which operands; by default, all of them.
    """
    n = len(eqn.invars)
    bits = [Sources(1 << i) if selected is None or selected[i] else NOTHING for i in range(n)]
    outs = propagate_equation(eqn, bits, _Dependence())
    return [members(out.live) for out in outs]


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
        function = _function_of(eqn, operands, moving, outs)
        return jax.vjp(function, *(operands[i] for i in moving))[1](cts)

    types, out_types = _types(eqn.invars), _types([eqn.outvars[j] for j in outs])
    program = jax.make_jaxpr(cotangents)(types, out_types)
    bits = [NOTHING] * len(types) + [Sources(1 << j) for j in range(len(outs))]
    results = propagate(program, bits, _Dependence())
    return {(j, i) for i, result in enumerate(results) for j in members(result.live)}


def _forward_pairs(eqn, moving, outs):
    def tangents(operands, ts):
        function = _function_of(eqn, operands, moving, outs)
        return jax.jvp(function, [operands[i] for i in moving], ts)[1]

    types = _types(eqn.invars)
    program = jax.make_jaxpr(tangents)(types, [types[i] for i in moving])
    bits = [NOTHING] * len(types) + [Sources(1 << i) for i in range(len(moving))]
    results = propagate(program, bits, _Dependence())
    return {(j, i) for j, result in enumerate(results) for i in members(result.live)}


def _function_of(eqn, operands, moving, outs):
    def function(*xs):
        full = list(operands)
        for i, x in zip(moving, xs, strict=True):
            full[i] = x
        results = bind(eqn, full)
        return [results[j] for j in outs]

    return function


def _types(variables) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
