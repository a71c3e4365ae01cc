"""A `lineax` solver whose failures are errors in the names of the user.

The error belongs into the solver, as `lineax` runs it again for derivatives and transposes of a
solve, whose results nobody sees. Imports `lineax`: to be imported where it is used.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx

from .lost_pivot import has_lost_pivot
from .run_time_error import branched_error_if


class CheckedSolver(lx.AbstractLinearSolver):
    """`solver`, with an error at run time if it fails.

    - `singular`: the message if the solution is not finite.
    - `not_converged`: the message if the solver says that it failed.

    Of an LU factorization of a singular matrix, a pivot is seldom exactly zero, but a rounding
    error, and the solution is a number like any other. So the pivots are looked at.
    """

    solver: lx.AbstractLinearSolver
    singular: str = eqx.field(static=True)
    not_converged: str = eqx.field(static=True)

    def init(self, operator, options):
        return self.solver.init(operator, options)

    def compute(self, state, vector, options):
        x, result, stats = self.solver.compute(state, vector, options)
        # If the right-hand side is not finite, Lineax says so.
        is_known = ~_is_bad(vector)
        is_singular = is_known & _is_bad(x)
        if isinstance(self.solver, lx.LU):
            is_singular = is_singular | (is_known & has_lost_pivot(_factors(state)))
        has_failed = (result != lx.RESULTS.successful) & is_known
        index = jnp.where(is_singular, 0, 1)
        messages = [self.singular, self.not_converged]
        return branched_error_if(x, is_singular | has_failed, index, messages), result, stats

    def transpose(self, state, options):
        return self.solver.transpose(state, options)

    def conj(self, state, options):
        return self.solver.conj(state, options)

    def assume_full_rank(self):
        return self.solver.assume_full_rank()


def _factors(state) -> jax.Array:
    """The factors in the state of `lineax.LU`: its one square matrix of floats."""
    arrays = (x for x in jax.tree.leaves(state) if eqx.is_inexact_array(x))
    return next(x for x in arrays if x.ndim == 2 and x.shape[0] == x.shape[1])


def _is_bad(tree):
    # As Lineax does it, so that what is the same is computed, and communicated, once.
    return jnp.any(
        jnp.stack([jnp.any(jnp.invert(jnp.isfinite(x))) for x in jax.tree.leaves(tree)])
    )
