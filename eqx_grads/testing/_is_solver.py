"""Whether a function is the solution of an equation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._diagnosis.source_lines import source_line
from .._jaxprs.structure import equations


# The calls that `eqg.implicit`, around a host function or another solver, makes.
_OF_SOLVERS = {"_differentiable_solution", "host_call"}


def is_solver(fn: Callable[..., Any], leaves: Sequence[Any]) -> bool:
    """Whether its only rules are those of solutions of equations, and those of the packages
    that solve them, such as Optimistix."""
    try:
        found = list(equations(jax.make_jaxpr(fn)(*leaves)))
    except Exception:  # it can't be traced
        return False
    calls = {str(eqn.params["call"]) for eqn in found if eqn.primitive.name == "eqg_call"}
    is_solution = "_differentiable_solution" in calls and calls <= _OF_SOLVERS
    return is_solution and not any(map(_is_users, found))


def _is_users(eqn: Any) -> bool:
    """Whether it has a rule of JAX that was called in the user's code."""
    has_rule = eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
    return has_rule and not source_line(eqn).library
