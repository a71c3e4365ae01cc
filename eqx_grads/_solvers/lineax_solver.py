"""A `lineax` solver whose tolerance is relative, and whose failures are errors in the names of
the user. Imports `lineax`: to be imported where it is used."""

import equinox as eqx
import jax.numpy as jnp
import lineax as lx

from .run_time_error import branched_error_if


class CheckedSolver(lx.AbstractLinearSolver):
    """`solver`, with an error at run time if it fails.

    The solver raises the error itself: `lineax` runs the solver again for derivatives and
    transposes of a solve, and nobody else sees the results of these runs.

    - `tolerance`: the tolerance of an iteration. A gradient may have any size, and an absolute
        tolerance accepts the solution zero for a small gradient. So the right-hand side is
        divided by its size, and `max|b - A x| <= tolerance * max|b|` is success, whatever made
        the iteration stop.
    - `messages`: if the solution is not finite; if the solver says that it failed.
    """

    solver: lx.AbstractLinearSolver
    tolerance: float | None = eqx.field(static=True)
    messages: tuple[str, str] = eqx.field(static=True)

    def init(self, operator, options):
        kept = None if self.tolerance is None else operator
        return kept, self.solver.init(operator, options)

    def compute(self, state, vector, options):
        operator, inner = state
        if self.tolerance is None:
            x, result, stats = self.solver.compute(inner, vector, options)
            has_failed = result != lx.RESULTS.successful
        else:
            scale = jnp.max(jnp.abs(vector))
            scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
            unit = vector / scale
            x, _, stats = self.solver.compute(inner, unit, options)
            has_failed = ~(jnp.max(jnp.abs(unit - operator.mv(x))) <= self.tolerance)
            x, result = x * scale, lx.RESULTS.successful
        # If the right-hand side is not finite, Lineax says so.
        is_known = ~_is_bad(vector)
        is_singular = is_known & _is_bad(x)
        has_failed = is_singular | (is_known & has_failed)
        index = jnp.where(is_singular, 0, 1)
        return branched_error_if(x, has_failed, index, self.messages), result, stats

    def transpose(self, state, options):
        operator, inner = state
        inner, options = self.solver.transpose(inner, options)
        return (operator and operator.transpose(), inner), options

    def conj(self, state, options):
        operator, inner = state
        inner, options = self.solver.conj(inner, options)
        return (operator and lx.conj(operator), inner), options

    def assume_full_rank(self):
        return self.solver.assume_full_rank()


def _is_bad(x):
    return jnp.any(~jnp.isfinite(x))
