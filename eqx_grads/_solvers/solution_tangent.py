"""The derivative of the solution of an equation, by any approximate or exact linear solve."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._jaxprs.current_trace import outside_of_linearization
from .._rules.custom_jvp import custom_jvp
from .._rules.rule import Rule
from .._rules.tree_split import TreeSplit


def constant(tree: Any) -> Any:
    """`jax.lax.stop_gradient` of the arrays of any PyTree."""
    # With `jax.disable_jit`, a differentiated value may be a Python number inside.
    stop = lambda x: jnp.asarray(jax.lax.stop_gradient(x))
    return jax.tree.map(lambda x: stop(x) if eqx.is_inexact_array(x) else x, tree)


def differentiable_solution(
    y: Any,
    inputs: Sequence[Any],
    *,
    residual: Callable[..., Any],
    solver: Callable[..., Any],
) -> Any:
    """Return `y`, with the derivative of a solution of `residual(y, inputs) = 0` with respect
    to the arrays `inputs`.

    `solver(linear_map, unknowns, value)` returns a linear function from `b` to `t_y`, or to an
    approximation of `t_y`. `linear_map` is `R`, a function; `unknowns` are the inexact arrays
    of `y`, and `value` is the residual there.
    """
    leaves, treedef = jax.tree.flatten(y)
    leaves = _differentiable_solution(
        leaves, inputs, treedef=treedef, residual=residual, solver=solver
    )
    return jax.tree.unflatten(treedef, leaves)


# With R = ∂residual/∂y at the solution, the derivative of `residual(y(inputs), inputs) = 0` is
#
#     R t_y + b = 0,   b = ∂residual/∂inputs t_inputs.
#
# Reverse mode is its transpose. The solution was computed with constant inputs, and has no
# tangent of its own.
@custom_jvp
def _differentiable_solution(y, inputs, *, treedef, residual, solver):
    del inputs, treedef, residual, solver
    return y


def _differentiable_solution_jvp(primals, tangents, *, treedef, residual, solver):
    inputs, t_inputs = primals[1], tangents[1]
    live = [i for i, t in enumerate(t_inputs) if t is not None]
    with outside_of_linearization(jax.tree.leaves(primals)):
        # At a solution that depends on the inputs: the second derivative needs it.
        options = {"treedef": treedef, "residual": residual, "solver": solver}
        y = _differentiable_solution(*primals, **options)
        split, unknowns = TreeSplit.split(jax.tree.unflatten(treedef, y), eqx.is_inexact_array)
        if not (live and unknowns):
            return y, [None] * len(y)

        def equation(unknowns, varying):
            full = list(inputs)
            for i, x in zip(live, varying, strict=True):
                full[i] = x
            return residual(split.tree(jax.tree.leaves(unknowns)), full)

        unknowns, varying = split.without_static().tree(unknowns), [inputs[i] for i in live]
        value, linear_map = jax.linearize(lambda x: equation(x, varying), unknowns)
        _, of_inputs = jax.linearize(lambda x: equation(unknowns, x), varying)
        solve = solver(linear_map, unknowns, value)
    t_y = solve(of_inputs([t_inputs[i] for i in live]))
    return y, split.without_static().leaves(jax.tree.leaves(t_y))


# Linear, as the solve is: there is nothing to check.
_rule = Rule(_differentiable_solution_jvp, symbolic_zeros=True, surely_linear=True)
_differentiable_solution._rules.set_jvp(_rule)
# The residual may have been traced already, for operands that vary as they do.
_differentiable_solution._rules.varies_alike = False
