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
# `solve(R, b)` returns t_y, or what it takes for it; it has to be linear in b. Reverse mode is
# its transpose. The solution was computed with constant inputs, and has no tangent of its own.
@custom_jvp
def differentiable_solution(
    y: Any, inputs: Any, *, residual: Callable[..., Any], solve: Callable[..., Any]
) -> Any:
    """`y`, whose derivative in `inputs` is that of a solution of `residual(y, inputs) = 0`."""
    del inputs, residual, solve
    return y


def _differentiable_solution_jvp(primals, tangents, *, residual, solve):
    _, inputs = primals
    _, t_inputs = tangents
    # At a solution that depends on the inputs: the second derivative needs it.
    y = differentiable_solution(*primals, residual=residual, solve=solve)
    is_none = lambda x: x is None
    perturbed = jax.tree.map(lambda t: t is not None, t_inputs, is_leaf=is_none)
    varying, fixed = eqx.partition(inputs, perturbed)
    of_varying = lambda varying: residual(y, eqx.combine(varying, fixed))
    _, b = jax.jvp(of_varying, (varying,), (t_inputs,))
    _, linear_map = jax.linearize(lambda y: residual(y, inputs), y)
    return y, solve(linear_map, b)


# Linear, as `solve` is: there is nothing to check.
_rule = Rule(_differentiable_solution_jvp, symbolic_zeros=True, surely_linear=True)
differentiable_solution._rules.set_jvp(_rule)
