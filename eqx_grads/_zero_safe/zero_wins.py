"""The policy "zero": an exact zero wins over any factor, also an infinite one.

The tangent of an elementwise operation is a sum of products of a factor and a tangent. Here
such a product is zero where either is, in both modes: forward, the tangent may be the zero, and
backward, the cotangent.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.operands import fill
from .._jaxprs.primitives import kind_of
from .._rules.linear_primitive import linear_call, LinearMap
from .analysis import Analysis, analyze, AnalyzedEquation
from .ranges import inexact_indices, Range


def evaluate_zero_wins(analysis: Analysis, values: Sequence[Any]) -> list[Any]:
    """The outputs of a program."""
    by_id = {id(e.eqn): e for e in analysis.eqns}

    def hook(eqn, values):
        e = by_id[id(eqn)]
        if not e.is_entered:
            return [_bind_zero_wins(eqn, values)] if _has_factors(e) else bind(eqn, values)
        inner = {id(a.program.jaxpr): a for a in e.inner}
        run = lambda program, values, _: evaluate_zero_wins(inner[id(program.jaxpr)], values)
        return list(enter(eqn, values, run))

    return evaluate(analysis.program, values, hook)


def _has_factors(e: AnalyzedEquation) -> bool:
    eqn = e.eqn
    if not e.zero_wins or not e.moving or not e.inexact_outs:
        return False
    # Other factors are constants, or known to JAX to be zero.
    is_constant = kind_of(eqn).derivative in ("zero", "constant")
    return _is_inner_product(eqn) or (kind_of(eqn).elementwise and not is_constant)


def _is_inner_product(eqn) -> bool:
    return eqn.primitive.name == "dot_general" and not any(v.aval.ndim != 1 for v in eqn.invars)


def _bind_zero_wins(eqn: Any, values: Sequence[Any]) -> Any:
    """An equation with one output. Each product in its derivative is zero where one of the
    factors is zero."""
    values = [jnp.asarray(x) for x in values]
    moving = inexact_indices(eqn.invars)
    shape = eqn.outvars[0].aval.shape

    @jax.custom_jvp
    def call(*values):
        return bind(eqn, values)[0]

    @call.defjvp
    def call_jvp(values, tangents):
        out = call(*values)
        total = jnp.zeros(shape, out.dtype)
        for i in moving:
            total = total + _term(eqn, values, i, tangents[i], shape)
        return out, total

    return call(*values)


def _term(eqn, values, i, tangent, shape):
    if _is_inner_product(eqn):
        return jnp.sum(_linear_product(values[1 - i], tangent))
    tangent = jnp.broadcast_to(tangent, shape)
    if jnp.iscomplexobj(tangent) and not jnp.iscomplexobj(eqn.outvars[0].aval):
        # As of `abs`: no complex factor, but one for each part.
        by_real = _linear_product(_factor(eqn, values, i, 1), jnp.real(tangent))
        return by_real + _linear_product(_factor(eqn, values, i, 1j), jnp.imag(tangent))
    return _linear_product(_factor(eqn, values, i, 1), tangent)


def _factor(eqn, values, i, unit):
    """The derivative with respect to operand `i` along `unit`, elementwise. It has the
    derivative of this policy as well."""

    def derivative(*values):
        of_operand = lambda x: bind(eqn, fill(values, [i], [x]))[0]
        return jax.jvp(of_operand, [values[i]], [jnp.full_like(values[i], unit)])[1]

    program = jax.make_jaxpr(derivative)(*values)
    (out,) = evaluate_zero_wins(analyze(program, [Range()] * len(values)), values)
    return out


@jax.custom_jvp
def _product(factor: Any, tangent: Any) -> Any:
    """The product of two numbers that is zero if one of them is."""
    is_zero, product = (factor == 0) | (tangent == 0), factor * tangent
    return jax.lax.select(is_zero, jnp.zeros_like(product), product)


@_product.defjvp
def _product_jvp(primals, tangents):
    one, other = map(_linear_product, primals, tangents[::-1])
    return _product(*primals), one + other


def _linear_product(factor, tangent):
    """`_product`, for JAX to transpose: the cotangent may be the zero just as well."""
    multiply = lambda factors, ts: [t if t is None else _product(factors[0], t) for t in ts]
    linear_map = LinearMap("zero_wins", multiply, multiply, [jax.typeof(tangent)])
    (out,) = linear_call(linear_map, [factor], [tangent])
    return out
