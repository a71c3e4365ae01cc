"""Reorder the matrix products of a traced program for XLA's CPU backend, and inline calls."""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .._jaxprs.dependence import are_in, depends
from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.primitives import ELEMENTWISE
from .._jaxprs.structure import Call, structure
from .._jaxprs.versions import assigns_shardings


def inlined(program: ClosedJaxpr, flags: Sequence[bool]) -> ClosedJaxpr:
    """The program with `jax.jit` and the like inlined.

    In a matrix product, the operand that depends on a flagged argument comes first: `x @ w.T`
    instead of `w @ x`. With a batch of `x`, this is faster on a CPU. The transpose of the
    product is delayed past splits and elementwise operations, until another transpose undoes
    it: `jax.vmap` of `w @ x` has one after the product, or after the gates are split.
    """

    def run(*args):
        return [_materialized(x) for x in _inline(program, flags, args)]

    return jax.make_jaxpr(run)(*program.in_avals)


class _Transposed:
    """`jnp.transpose(x, axes)`, which is not computed before it is needed."""

    def __init__(self, x: Any, axes: tuple[int, ...]):
        self.x = x
        self.axes = axes

    @ft.cached_property
    def value(self) -> Any:
        return jnp.transpose(self.x, self.axes)


def _materialized(x: Any) -> Any:
    return x.value if isinstance(x, _Transposed) else x


def _inline(program: ClosedJaxpr, flags: Sequence[bool], args: Sequence[Any]) -> list[Any]:
    dependent = depends(program, flags)

    def hook(eqn, values):
        flags = are_in(eqn.invars, dependent)
        known = structure(eqn)
        if isinstance(known, Call) and not assigns_shardings(eqn.params):
            return _inline(*known.programs, flags, values)
        if _can_be_swapped(eqn) and flags == [False, True]:
            a, b = map(_materialized, values)
            return [_swapped_product(a, b, eqn.params)]
        delayed = _delayed(eqn, values)
        return bind(eqn, list(map(_materialized, values))) if delayed is None else delayed

    return evaluate(program, args, hook)


def _delayed(eqn: Any, values: Sequence[Any]) -> list[Any] | None:
    """The outputs of an equation that can be computed before the transpose of its operands;
    `None` for any other."""
    transposed = [x for x in values if isinstance(x, _Transposed)]
    if not transposed:
        return None
    axes = transposed[0].axes
    if eqn.primitive is jax.lax.transpose_p:
        axes = tuple(axes[i] for i in eqn.params["permutation"])
        x = transposed[0].x
        return [x if axes == tuple(range(x.ndim)) else _Transposed(x, axes)]
    if eqn.primitive is jax.lax.split_p:
        parts = jax.lax.split(transposed[0].x, eqn.params["sizes"], axes[eqn.params["axis"]])
        return [_Transposed(part, axes) for part in parts]
    is_elementwise = (
        eqn.primitive.name in ELEMENTWISE and eqn.params.get("sharding", None) is None
    )
    others = [x for x in values if not isinstance(x, _Transposed)]
    if (
        is_elementwise
        and all(x.axes == axes for x in transposed)
        and not any(map(jnp.ndim, others))
    ):
        out = bind(eqn, [x.x if isinstance(x, _Transposed) else x for x in values])
        return [_Transposed(x, axes) for x in out]
    return None


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
    axes = (*range(n), *range(n + n_b, out.ndim), *range(n, n + n_b))
    return out if axes == tuple(range(out.ndim)) else _Transposed(out, axes)
