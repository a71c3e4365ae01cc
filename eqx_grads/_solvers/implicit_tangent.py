"""The derivative of the solution of an equation, by the implicit function theorem."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import name_of
from .._rules.closure_convert import ClosureTemplate, Opaque
from .._rules.custom_jvp import custom_jvp
from .._rules.rule import Rule
from .linear_solve import linear_solve
from .residual_check import one_if_small
from .residual_structure import residual_leaves


class Equation(Opaque):
    """`residual(y, *args, **config) = 0`. Holds no tracer.

    - `template`: of `[residual, args, config]`, with placeholders where there were tracers.
    - `solver`, `tags`: of the linear system.
    - `tolerance`: how large the residual may be; `None` for any.
    - `solve`: what the user calls the function that solves the equation.
    """

    def __init__(
        self,
        template: ClosureTemplate,
        solver: Any,
        tags: frozenset[object],
        tolerance: float | None,
        solve: str,
    ):
        self.solver = solver
        self.tags = tags
        self.tolerance = tolerance
        self.solve = solve
        self.residual_name = name_of(template.items[0])
        self._template = template

    def residual(self, y: PyTree, operands: Sequence[Any]) -> PyTree:
        """The inexact arrays of the residual, `operands` being the tracers."""
        (residual, args, config), _ = self._template.substitute(operands)
        out = residual(y, *args, **config)
        return residual_leaves(out, y, residual=residual, solve=self.solve, solver=self.solver)


@custom_jvp
def with_implicit_tangent(y, operands, *, equation):
    """`y`, with the derivative that it has as a solution of the equation with these operands.

    `y` itself must not be perturbed.
    """
    del operands, equation
    return y


def _with_implicit_tangent_jvp(primals, tangents, *, equation):
    # F(y(a), a) = 0, so ∂F/∂y ẏ = -∂F/∂a ȧ. The second derivative differentiates this formula,
    # in which `y` has to have the same derivative again: it is the output of the function.
    y, operands = primals
    _, t_operands = tangents
    y = with_implicit_tangent(y, operands, equation=equation)
    unknowns, rest = eqx.partition(y, eqx.is_inexact_array)
    moving = [i for i, t in enumerate(t_operands) if t is not None]
    if not (moving and jax.tree.leaves(unknowns)):
        return y, jax.tree.map(lambda _: None, y)

    def residual(unknowns, *some, indices=moving):
        all_operands = list(operands)
        for i, x in zip(indices, some, strict=True):
            all_operands[i] = x
        return equation.residual(eqx.combine(unknowns, rest), all_operands)

    _, t_residual = jax.jvp(
        lambda *some: residual(unknowns, *some),
        tuple(operands[i] for i in moving),
        tuple(t_operands[i] for i in moving),
    )
    value, matvec = jax.linearize(lambda unknowns: residual(unknowns, indices=()), unknowns)
    one = jnp.ones(())
    if equation.tolerance is not None:
        names = equation.residual_name, equation.solve
        one = one_if_small(value, matvec, unknowns, equation.tolerance, *names)
    rhs = jax.tree.map(lambda t: -t * one.astype(t.dtype), t_residual)
    t_y = linear_solve(
        matvec, rhs, unknowns, solver=equation.solver, tags=equation.tags, user="implicit"
    )
    return y, t_y


# The rule is linear because `lineax` transposes a solve: there is nothing to check.
_rule = Rule(_with_implicit_tangent_jvp, symbolic_zeros=True, surely_linear=True)
with_implicit_tangent._rules.set_jvp(_rule)
