"""Linear systems that JAX solves: by a division or by LU, with a check of the pivots."""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._jaxprs.varying import vary_alike
from .._rules.explicit_sharding import distribute_like, explicit_spec, gathered
from .real_view import RealView
from .run_time_error import branched_error_if


# Each function returns a function of the right-hand side, which JAX may transpose. What does
# not depend on the right-hand side, which may be a tangent, is computed before.


def divide(matvec, domain: RealView, codomain: RealView, message: str):
    """Solve a system whose matrix is diagonal."""
    arrays = vary_alike(domain.to_arrays(domain.like), codomain.like)
    diagonal = codomain.to_arrays(matvec(domain.from_arrays(list(map(jnp.ones_like, arrays)))))
    one = _one_if_regular(diagonal, False, message)

    def solve(rhs: PyTree[Array]) -> PyTree[Array]:
        right = vary_alike(codomain.to_arrays(rhs), domain.like)
        return domain.from_arrays([one * b / d for b, d in zip(right, diagonal, strict=True)])

    return solve


def factorize(matvec, domain: RealView, codomain: RealView, message: str):
    """Solve a system by LU of its matrix.

    This also works on a mesh, where Lineax does not. In the types of its operators, Equinox
    keeps neither the mesh nor which values vary over it. The gradient of a value that does not
    vary would be wrong (Equinox 0.13.8, Lineax 0.1.1; no upstream issue was found).
    """
    like = domain.like
    gather = lambda tree: codomain.to_vector(jax.tree.map(gathered, tree))
    flat = lambda rhs: vary_alike([gather(rhs)], like)[0]

    def column(x):
        x = jax.tree.map(_sharded_like, domain.from_vector(x), like)
        leaves, treedef = jax.tree.flatten(x)
        return flat(matvec(treedef.unflatten(vary_alike(leaves, codomain.like, like))))

    matrix = jax.vmap(column, out_axes=1)(jnp.eye(domain.size, dtype=domain.dtype))
    factors, order, is_lost = _factors(jax.lax.stop_gradient(matrix))
    one = _one_if_regular([jnp.diagonal(factors)], is_lost, message)

    def solve(rhs: PyTree[Array]) -> PyTree[Array]:
        x = _solve(matrix, factors, order, one * flat(rhs))
        return jax.tree.map(_sharded_like, domain.from_vector(x), like)

    return solve


@jax.jit
def _factors(matrix):
    factors, order = jax.scipy.linalg.lu_factor(matrix)
    return factors, order, has_lost_pivot(factors)


@jax.jit
def _solve(matrix, factors, order, b):
    by_factors = lambda trans: (
        lambda _, b: jax.scipy.linalg.lu_solve((factors, order), b, trans)
    )
    matvec = lambda x: jnp.matmul(matrix, x, precision=jax.lax.Precision.HIGHEST)
    return jax.lax.custom_linear_solve(matvec, b, by_factors(0), by_factors(1))


# In machine epsilons of the terms that a pivot is the difference of. Measured on random
# matrices of 2 to 200 rows in float32, also with rows and columns scaled by factors of 1e-6 to
# 1e6: of singular ones, 88 to 100 % are found; of regular ones, none with a condition number of
# up to 1e6 is taken for singular, and some with 1e7, whose solutions have one or two correct
# digits.
_LOST = 16


def has_lost_pivot(factors: Array) -> Array:
    """Whether a pivot is within the rounding error of its computation. A pivot of a
    singular matrix is seldom exactly zero.

    - `factors`: both triangular factors in one matrix, as `jax.scipy.linalg.lu_factor` returns
        them.

    A pivot is an entry of the matrix minus multiples of the rows above. It is compared with the
    sizes of the terms, so the scale of an equation or of an unknown does not matter.
    """
    size = jnp.abs(factors)
    terms = jnp.sum(jnp.tril(size, -1) * jnp.triu(size, 1).T, axis=1)
    return jnp.any(jnp.diagonal(size) <= _LOST * jnp.finfo(size.dtype).eps * terms)


def _one_if_regular(pivots: Sequence[Array], is_lost: Any, message: str) -> Array:
    """One, to multiply the right-hand side by; raises when it is computed if a pivot of the
    matrix is zero, not finite or lost."""
    are_good = map(_are_good, jax.lax.stop_gradient(pivots))
    is_singular = ~ft.reduce(jnp.logical_and, are_good) | is_lost
    return branched_error_if(jnp.ones((), pivots[0].dtype), is_singular, 0, [message])


@jax.jit
def _are_good(pivots):
    return jnp.all(jnp.isfinite(pivots) & (pivots != 0))


def _sharded_like(x, like):
    return distribute_like(x, like, explicit_spec(like))
