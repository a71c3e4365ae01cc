"""Which variables of a traced program depend on which, and which equations are needed."""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import partial_eval as pe


def depends(program: ClosedJaxpr, flags: Sequence[bool]) -> set[Any]:
    """The variables that depend on a flagged input. Each output of an equation counts as
    depending on all of its inputs."""
    flagged = {v for v, f in zip(program.jaxpr.invars, flags, strict=True) if f}
    for eqn in program.eqns:
        if any(v in flagged for v in variables(eqn.invars)):
            flagged.update(eqn.outvars)
    return flagged


def needed(
    eqns: Sequence[Any], outputs: Iterable[Any], given: Set[Any] = frozenset()
) -> tuple[list[Any], set[Any]]:
    """The equations, in order, that compute these outputs from the variables `given`; and all
    variables that are used."""
    used, kept = set(variables(outputs)), []
    for eqn in reversed(eqns):
        if any(v in used and v not in given for v in eqn.outvars):
            kept.append(eqn)
            used.update(variables(eqn.invars))
    return kept[::-1], used


def free_variables(eqns: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
    """The variables that these equations and outputs use and the equations do not define, in
    the order of their first use."""
    bound: set[Any] = set()
    free: dict[Any, None] = {}  # as an ordered set
    for eqn in eqns:
        free.update((v, None) for v in variables(eqn.invars) if v not in bound)
        bound.update(eqn.outvars)
    free.update((v, None) for v in variables(outputs) if v not in bound)
    return list(free)


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def are_in(atoms: Iterable[Any], found: Set[Any]) -> list[bool]:
    """Which atoms are variables of a set. A constant is none."""
    return [not isinstance(v, Literal) and v in found for v in atoms]


def consts_as_inputs(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program of its constants and its inputs. A constant of a function may vary in the
    program around it, and is stored there once."""
    if not program.consts:
        return program
    inputs = [*program.jaxpr.constvars, *program.jaxpr.invars]
    return ClosedJaxpr(program.jaxpr.replace(constvars=(), invars=inputs), ())


def without_unused(program: ClosedJaxpr, used: Sequence[bool] | None = None) -> ClosedJaxpr:
    """The program without the equations that no output needs, and without the outputs that are
    not `used`; by default, they all are."""
    used = [True] * len(program.out_avals) if used is None else used
    jaxpr, _ = pe.dce_jaxpr(program.jaxpr, used, True)
    return ClosedJaxpr(jaxpr, program.consts)
