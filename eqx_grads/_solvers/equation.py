"""The equation of a function with `implicit`, and the tangent of its solution."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import name_of, place_of
from .._rules.closure_convert import ClosureTemplate, Opaque
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
        self.residual_place = place_of(template.items[0])
        self._template = template

    def residual(self, y: PyTree, operands: Sequence[Any]) -> PyTree:
        """The inexact arrays of the residual, `operands` being the tracers."""
        (residual, args, config), _ = self._template.substitute(operands)
        try:
            out = residual(y, *args, **config)
        except Exception as error:
            if isinstance(error, jax.errors.TracerArrayConversionError):
                error.add_note(
                    f"NumPy can't compute with a traced array. The residual "
                    f"`{self.residual_name}` ({self.residual_place}) is differentiated by JAX: "
                    "write it in `jnp`."
                )
                raise
            error.add_note(
                f"The residual `{self.residual_name}` is called with the solution of "
                f"`{self.solve}` first, and then with its arguments. Of a method, these begin "
                "with `self`."
            )
            raise
        return residual_leaves(out, y, residual=residual, solve=self.solve, solver=self.solver)

    def solve_tangent(self, matvec, b, unknowns, value):
        """The tangent of the solution, an error if the residual there is not small."""
        one = jnp.ones(())
        if self.tolerance is not None:
            one = one_if_small(
                value,
                matvec,
                unknowns,
                self.tolerance,
                self.residual_name,
                self.residual_place,
                self.solve,
            )
        rhs = jax.tree.map(lambda t: -t * one.astype(t.dtype), b)
        matrix = f"The Jacobian of the residual `{self.residual_name}` ({self.residual_place})"
        return linear_solve(
            matvec,
            rhs,
            unknowns,
            solver=self.solver,
            tags=self.tags,
            user="implicit",
            of=self.solve,
            matrix=matrix,
        )
