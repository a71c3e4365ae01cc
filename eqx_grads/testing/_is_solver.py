"""Whether a function is the solution of an equation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._diagnosis.source_lines import source_line
from .._jaxprs.structure import inner_programs


def is_solver(fn: Callable[..., Any], leaves: Sequence[Any]) -> bool:
    """Whether its only rules are those of solutions of equations, and those of the packages
    that solve them, such as Optimistix."""
    try:
        found = list(_outside_of_solvers(jax.make_jaxpr(fn)(*leaves)))
    except Exception:  # it can't be traced
        return False
    calls = [eqn for eqn in found if eqn.primitive.name == "eqg_call"]
    return bool(calls) and all(map(_is_solution, calls)) and not any(map(_is_users, found))


def _is_users(eqn: Any) -> bool:
    """Whether it has a rule of JAX that was called in the user's code."""
    has_rule = eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
    return has_rule and not source_line(eqn).library


def _outside_of_solvers(program: ClosedJaxpr) -> Iterator[Any]:
    """All equations, but those in the solvers that `eqg.implicit` decorates."""
    for eqn in program.eqns:
        yield eqn
        if not _is_solution(eqn):
            for inner in inner_programs(eqn):
                yield from _outside_of_solvers(inner)


def _is_solution(eqn: Any) -> bool:
    is_call = eqn.primitive.name == "eqg_call"
    return is_call and str(eqn.params["call"]) == "differentiable_solution"
