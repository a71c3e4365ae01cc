"""Whether a function is the solution of an equation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import inner_programs


def is_solver(fn: Callable[..., Any], leaves: Sequence[Any]) -> bool:
    """Whether its only rules are those of solutions of equations, and those in the solvers."""
    try:
        found = list(_outside_of_solvers(jax.make_jaxpr(fn)(*leaves)))
    except Exception:  # it can't be traced
        return False
    calls = [eqn for eqn in found if eqn.primitive.name == "eqg_call"]
    names = [eqn.primitive.name for eqn in found]
    is_other = any(name.startswith(("custom_jvp", "custom_vjp")) for name in names)
    return bool(calls) and all(map(_is_solution, calls)) and not is_other


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
