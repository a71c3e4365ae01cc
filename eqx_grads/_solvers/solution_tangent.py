"""The derivative of the solution of an equation, by any approximate or exact linear solve."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._rules.custom_jvp import custom_jvp
from .._rules.rule import Rule


def constant(tree: Any) -> Any:
    """`jax.lax.stop_gradient` of the arrays of any PyTree."""
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    # With `jax.disable_jit`, what is differentiated may be a Python number inside.
    stop = lambda x: jnp.asarray(jax.lax.stop_gradient(x))
    return eqx.combine(jax.tree.map(stop, arrays), rest)


# With R = ∂residual/∂y at the solution, the derivative of `residual(y(inputs), inputs) = 0` is
#
#     R t_y + b = 0,   b = ∂residual/∂inputs t_inputs.
#
# Reverse mode is its transpose. The solution was computed with constant inputs, and has no
# tangent of its own.
@custom_jvp
def differentiable_solution(
    y: Any, inputs: Any, *, residual: Callable[..., Any], solve: Callable[..., Any]
) -> Any:
    """`y`, whose derivative in `inputs` is that of a solution of `residual(y, inputs) = 0`.

    `solve(linear_map, b, unknowns, value)` returns `t_y`, or what it takes for it, and has to
    be linear in `b`. `linear_map` is `R`, a function; `unknowns` are the inexact arrays of `y`,
    and `value` is the residual there.
    """
    del inputs, residual, solve
    return y


def _differentiable_solution_jvp(primals, tangents, *, residual, solve):
    _, inputs = primals
    _, t_inputs = tangents
    # At a solution that depends on the inputs: the second derivative needs it.
    y = differentiable_solution(*primals, residual=residual, solve=solve)
    unknowns, rest = eqx.partition(y, eqx.is_inexact_array)
    if not (jax.tree.leaves(t_inputs) and jax.tree.leaves(unknowns)):
        return y, jax.tree.map(lambda _: None, y)
    is_none = lambda x: x is None
    perturbed = jax.tree.map(lambda t: t is not None, t_inputs, is_leaf=is_none)
    varying, fixed = eqx.partition(inputs, perturbed)

    def equation(unknowns, varying):
        return residual(eqx.combine(unknowns, rest), eqx.combine(varying, fixed))

    _, b = jax.jvp(lambda varying: equation(unknowns, varying), (varying,), (t_inputs,))
    value, linear_map = jax.linearize(lambda unknowns: equation(unknowns, varying), unknowns)
    return y, solve(linear_map, b, unknowns, value)


# Linear, as `solve` is: there is nothing to check.
_rule = Rule(_differentiable_solution_jvp, symbolic_zeros=True, surely_linear=True)
differentiable_solution._rules.set_jvp(_rule)
# The residual may have been traced already, for operands that vary as they do.
differentiable_solution._rules.varies_alike = False
