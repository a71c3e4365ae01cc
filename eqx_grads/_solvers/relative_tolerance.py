"""An iterative `lineax` solver whose tolerance is relative to the right-hand side.

A gradient may be of any size, and an absolute tolerance accepts zero for a small one. So the
right-hand side is divided by its size, and afterwards the residual decides if the solve was
successful, whatever made the iteration stop. Imports `lineax`: to be imported where it is used.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx


class RelativeTolerance(lx.AbstractLinearSolver):
    """`solver`, with success if `max|b - A x| <= tolerance * max|b|`."""

    solver: lx.AbstractLinearSolver
    tolerance: float = eqx.field(static=True)

    def init(self, operator, options):
        return operator, self.solver.init(operator, options)

    def compute(self, state, vector, options):
        operator, inner = state
        scale = _size(vector)
        scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
        unit = jax.tree.map(lambda b: b / scale, vector)
        x, _, stats = self.solver.compute(inner, unit, options)
        error = _size(jax.tree.map(jnp.subtract, unit, operator.mv(x)))
        result = lx.RESULTS.where(
            error <= self.tolerance, lx.RESULTS.successful, lx.RESULTS.stagnation
        )
        return jax.tree.map(lambda x: x * scale, x), result, stats

    def transpose(self, state, options):
        operator, inner = state
        inner, options = self.solver.transpose(inner, options)
        return (operator.transpose(), inner), options

    def conj(self, state, options):
        operator, inner = state
        inner, options = self.solver.conj(inner, options)
        return (lx.conj(operator), inner), options

    def assume_full_rank(self):
        return self.solver.assume_full_rank()


def _size(tree):
    parts = [jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree) if x.size]
    return jnp.max(jnp.stack(parts))
