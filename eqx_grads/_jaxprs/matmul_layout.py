"""Reorder the matrix products of a traced program for XLA's CPU backend, and inline calls."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from .dependence import depends
from .evaluate import bind, evaluate
from .structure import Call, structure
from .versions import assigns_shardings


def inlined(program: ClosedJaxpr, flags: Sequence[bool]) -> ClosedJaxpr:
    """The program with `jax.jit` and the like inlined.

    Of two operands of a matrix product, the one that depends on a flagged argument comes first:
    `x @ w.T` instead of `w @ x`. With a batch of `x`, that is faster on a CPU.
    """
    return jax.make_jaxpr(lambda *args: _inline(program, flags, args))(*program.in_avals)


def _inline(program: ClosedJaxpr, flags: Sequence[bool], args: Sequence[Any]) -> list[Any]:
    dependent = depends(program, flags)

    def hook(eqn, values):
        flags = [not isinstance(v, Literal) and v in dependent for v in eqn.invars]
        known = structure(eqn)
        if isinstance(known, Call) and not assigns_shardings(eqn.params):
            return _inline(*known.programs, flags, values)
        if _can_be_swapped(eqn) and flags == [False, True]:
            a, b = values
            return [_swapped_product(a, b, eqn.params)]
        return bind(eqn, values)

    return evaluate(program, args, hook)


def with_materialized_transposes(fn: Callable[..., Sequence[Any]], *types: Any) -> ClosedJaxpr:
    """The program of a function of arrays, in which the `x.T` of a product `x.T @ y` is written
    to memory.

    XLA's matrix product for CPUs is slow where the left operand is contracted along its first
    axes. Without a barrier, XLA turns a transpose into such a product.
    """
    program = jax.make_jaxpr(lambda *args: list(fn(*args)))(*types)
    transposes = {e.outvars[0] for e in program.eqns if e.primitive is jax.lax.transpose_p}

    def hook(eqn, values):
        if eqn.primitive is jax.lax.dot_general_p and eqn.invars[0] in transposes:
            values = [jax.lax.optimization_barrier(values[0]), values[1]]
        return bind(eqn, values)

    return jax.make_jaxpr(lambda *args: evaluate(program, args, hook))(*program.in_avals)


def _can_be_swapped(eqn: Any) -> bool:
    """Whether an equation is a matrix product that treats its operands alike."""
    if eqn.primitive is not jax.lax.dot_general_p:
        return False
    precision = eqn.params["precision"]
    differs = isinstance(precision, tuple) and len(set(precision)) > 1
    return not differs and eqn.params.get("out_sharding") is None


def _swapped_product(a, b, params):
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    numbers = ((contract_b, contract_a), (batch_b, batch_a))
    out = jax.lax.dot_general_p.bind(b, a, **{**params, "dimension_numbers": numbers})
    n = len(batch_a)
    n_b = b.ndim - len(contract_b) - n
    return jnp.transpose(out, (*range(n), *range(n + n_b, out.ndim), *range(n, n + n_b)))
