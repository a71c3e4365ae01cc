"""The derivative of the solution of an equation, by any approximate or exact linear solve."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._rules.custom_jvp import custom_jvp
from .._rules.rule import Rule
from .._rules.tree_split import TreeSplit


def constant(tree: Any) -> Any:
    """`jax.lax.stop_gradient` of the arrays of any PyTree."""
    # With `jax.disable_jit`, what is differentiated may be a Python number inside.
    stop = lambda x: jnp.asarray(jax.lax.stop_gradient(x))
    return jax.tree.map(lambda x: stop(x) if eqx.is_inexact_array(x) else x, tree)


def differentiable_solution(
    y: Any,
    inputs: Sequence[Any],
    *,
    residual: Callable[..., Any],
    solve: Callable[..., Any],
) -> Any:
    """`y`, whose derivative in the arrays `inputs` is that of a solution of
    `residual(y, inputs) = 0`.

    `solve(linear_map, b, unknowns, value)` returns `t_y`, or what it takes for it, and has to
    be linear in `b`. `linear_map` is `R`, a function; `unknowns` are the inexact arrays of `y`,
    and `value` is the residual there.
    """
    leaves, treedef = jax.tree.flatten(y)
    leaves = _differentiable_solution(
        leaves, inputs, treedef=treedef, residual=residual, solve=solve
    )
    return jax.tree.unflatten(treedef, leaves)


# With R = ∂residual/∂y at the solution, the derivative of `residual(y(inputs), inputs) = 0` is
#
#     R t_y + b = 0,   b = ∂residual/∂inputs t_inputs.
#
# Reverse mode is its transpose. The solution was computed with constant inputs, and has no
# tangent of its own.
@custom_jvp
def _differentiable_solution(y, inputs, *, treedef, residual, solve):
    del inputs, treedef, residual, solve
    return y


def _differentiable_solution_jvp(primals, tangents, *, treedef, residual, solve):
    _, inputs = primals
    _, t_inputs = tangents
    # At a solution that depends on the inputs: the second derivative needs it.
    y = _differentiable_solution(*primals, treedef=treedef, residual=residual, solve=solve)
    split, unknowns = TreeSplit.split(jax.tree.unflatten(treedef, y), eqx.is_inexact_array)
    live = [i for i, t in enumerate(t_inputs) if t is not None]
    if not (live and unknowns):
        return y, [None] * len(y)

    def equation(unknowns, varying):
        full = list(inputs)
        for i, x in zip(live, varying, strict=True):
            full[i] = x
        return residual(split.tree(jax.tree.leaves(unknowns)), full)

    unknowns = split.dynamic_tree(unknowns)
    varying, ts = [inputs[i] for i in live], [t_inputs[i] for i in live]
    _, b = jax.jvp(lambda varying: equation(unknowns, varying), (varying,), (ts,))
    value, linear_map = jax.linearize(lambda unknowns: equation(unknowns, varying), unknowns)
    t_y = solve(linear_map, b, unknowns, value)
    return y, split.without_static().leaves(jax.tree.leaves(t_y))


# Linear, as `solve` is: there is nothing to check.
_rule = Rule(_differentiable_solution_jvp, symbolic_zeros=True, surely_linear=True)
_differentiable_solution._rules.set_jvp(_rule)
# The residual may have been traced already, for operands that vary as they do.
_differentiable_solution._rules.varies_alike = False
