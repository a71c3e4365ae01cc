"""A `jax.lax.custom_linear_solve` in a traced program, run with other inner programs.

It is opaque to `structure`: its programs are a linear map, its transpose, and two solvers; a
call runs one solver.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .._jaxprs.evaluate import enter, Run
from .._jaxprs.versions import as_closed


def is_linear_solve(eqn: Any) -> bool:
    return eqn.primitive.name == "custom_linear_solve"


def enter_also_solve(eqn: Any, values: Sequence[Any], run: Run) -> Sequence[Any]:
    """As `enter`, which raises an error for a linear solve."""
    return (_enter_solve if is_linear_solve(eqn) else enter)(eqn, values, run)


def _enter_solve(eqn: Any, values: Sequence[Any], run: Run) -> list[Any]:
    """Run the equation with `run(program, values, None)` instead of each inner program. Its
    derivative is still the derivative of the linear map."""
    jaxprs, counts = eqn.params["jaxprs"], eqn.params["const_lengths"]
    values, consts = list(values), []
    for count in counts:
        consts.append(values[:count])
        values = values[count:]

    def runs(i):
        return lambda x: list(run(as_closed(jaxprs[i]), [*consts[i], *x], None))

    def solves(i):
        with_aux = lambda out: (out[: len(values)], out[len(values) :])
        return lambda _, x: with_aux(runs(i)(x))

    x, aux = jax.lax.custom_linear_solve(
        runs(0),
        values,
        solves(2),
        None if jaxprs.transpose_solve is None else solves(3),
        symmetric=jaxprs.vecmat is jaxprs.matvec,
        has_aux=True,
    )
    return [*x, *aux]
