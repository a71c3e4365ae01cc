"""Solve a linear system that is given as a function, by `lineax`."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import rule_error, show_tree
from .._jaxprs.diagonal import has_diagonal_jacobian
from .optional_import import optional_import
from .real_view import real_map, RealView, working_dtype


# A dense factorization is more robust, and up to here not slower than an iteration.
DENSE_UP_TO = 256


def linear_solve(
    matvec: Callable[[PyTree[Array]], PyTree[Array]],
    rhs: PyTree[Array],
    like: PyTree[Any],
    *,
    solver: Any = None,
    tags: Collection[object] = (),
    user: str = "linear_solve",
) -> PyTree[Array]:
    """`x` with `matvec(x) = rhs`.

    - `matvec`: a linear function of trees like `like`. It may close over what is being
        differentiated.
    - `rhs`, `like`: trees with arrays of floats for leaves, and `None`. Of `like` only shapes
        and dtypes matter.
    - `solver`: a `lineax` solver. By default the solver that the tags call for. Without tags, a
        division if the function is seen to be elementwise, LU up to `DENSE_UP_TO` unknowns,
        and GMRES beyond.
    - `tags`: `lineax` tags of the matrix.
    - `user`: what the user called, for errors.

    Differentiable in all modes and orders with respect to `rhs` and to what `matvec` closes
    over, by the rules of `lineax`. A solve that fails raises when it runs, as all of `lineax`
    and Equinox does.
    """
    lx = optional_import("lineax", user)
    dtype = working_dtype(rhs, like)
    domain, codomain = RealView(like, dtype), RealView(rhs, dtype)
    tags = frozenset(tags)
    _check_tags(lx, tags, domain, user)
    if domain.size == 0 or codomain.size == 0:
        return domain.from_real(domain.zeros())
    matvec = real_map(matvec, domain, codomain)
    if solver is None:
        if not tags and has_diagonal_jacobian(jax.make_jaxpr(matvec)(domain.types)):
            tags = frozenset([lx.diagonal_tag])
        solver = _choose(lx, domain.size, tags, dtype)
    operator = lx.FunctionLinearOperator(matvec, domain.types, tags=tags)
    solution = lx.linear_solve(operator, codomain.to_real(rhs), solver)
    return domain.from_real(solution.value)


def _choose(lx, n: int, tags: frozenset[object], dtype: Any) -> Any:
    if lx.diagonal_tag in tags:
        return lx.Diagonal(well_posed=True)
    structured = {lx.tridiagonal_tag, lx.lower_triangular_tag, lx.upper_triangular_tag}
    if n <= DENSE_UP_TO or tags & structured:
        return lx.AutoLinearSolver(well_posed=True)
    from .relative_tolerance import RelativeTolerance

    tolerance = float(jnp.finfo(dtype).eps) ** 0.6
    definite = {lx.positive_semidefinite_tag, lx.negative_semidefinite_tag}
    if tags & definite:
        solver = lx.CG(rtol=0.1 * tolerance, atol=0.1 * tolerance)
    else:
        # It stops where the residual no longer falls, and not after 20 more cycles.
        solver = lx.GMRES(rtol=0.1 * tolerance, atol=0.1 * tolerance, stagnation_iters=3)
    return RelativeTolerance(solver, tolerance)


def _check_tags(lx, tags, domain, user):
    shapes = {lx.diagonal_tag, lx.tridiagonal_tag}
    shapes |= {lx.lower_triangular_tag, lx.upper_triangular_tag}
    if domain.has_complex and tags & shapes:
        raise rule_error(
            f"`{user}` was given a tag that says where the entries of a matrix are, of complex "
            "unknowns.",
            f"the unknowns are {show_tree(domain.from_real(domain.zeros()))}",
            do="A complex unknown is solved for as two real ones. Leave the tag out.",
        )
