"""Solve a linear system that is given as a function, by `lineax`."""

import functools as ft
from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import bad_argument, optional_import, rule_error
from .._jaxprs.diagonal import has_diagonal_jacobian
from .._jaxprs.varying import vary_alike, varying_axes
from .._rules.explicit_sharding import explicit_spec
from .dense_solve import divide, factorize
from .real_view import RealView, working_dtype


# A dense factorization is more robust, and up to here not slower than an iteration.
DENSE_UP_TO = 256


def as_tags(tags: Any, user: str) -> frozenset[object]:
    """The `lineax` tags that `user` was given: one, or a collection of them."""
    given = list(tags) if isinstance(tags, tuple | list | set | frozenset) else [tags]
    for tag in given:
        if not isinstance(tag, type(optional_import("lineax", user).symmetric_tag)):
            do = "Give one, such as `lineax.symmetric_tag`, or a tuple of them."
            raise bad_argument(user, "tags", "a tag of Lineax, or several", tag, do)
    return frozenset(given)


def check_linear_solver(solver: Any, argument: str, user: str) -> None:
    """Raise if a solver is given that is not one of Lineax."""
    if solver is None:
        return
    if not isinstance(solver, optional_import("lineax", user).AbstractLinearSolver):
        do = "Give one of Lineax, such as `lineax.GMRES(rtol=1e-5, atol=1e-5)`, or `None`."
        raise bad_argument(user, argument, "a linear solver", solver, do)


def linear_solver(
    matvec: Callable[[PyTree[Array]], PyTree[Array]],
    rhs_like: PyTree[Any],
    like: PyTree[Any],
    *,
    solver: Any = None,
    tags: Collection[object] = (),
    user: str,
    of: str = "",
    matrix: str = "The matrix",
) -> Callable[[PyTree[Array]], PyTree[Array]]:
    """The function that returns `x` with `matvec(x) = rhs`.

    - `matvec`: a linear function of trees like `like`. It may close over what is being
        differentiated.
    - `rhs_like`, `like`: trees with arrays of floats for leaves, and `None`. Only shapes
        and dtypes matter, and how the arrays are distributed over a mesh.
    - `solver`: a `lineax` solver. By default the solver that the tags call for. Without tags, a
        division if the function is seen to be elementwise, LU up to `DENSE_UP_TO` unknowns,
        and GMRES beyond.
    - `tags`: `lineax` tags of the matrix.
    - `user`: what the user called, for errors; `of`, `matrix`: whose derivative this is for,
        and what the matrix is to the user, for the error of a solve that fails.

    Differentiable in all modes and orders with respect to `rhs` and to what `matvec` closes
    over. A solve that fails raises when it runs.
    """
    dtype = working_dtype(rhs_like, like)
    domain, codomain = RealView(like, dtype), RealView(rhs_like, dtype)
    n, tags, messages = domain.size, frozenset(tags), _messages(of or user, matrix)
    if n == 0:
        return lambda rhs: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    if solver is None and not tags:
        if _is_elementwise(matvec, domain, codomain):
            return divide(matvec, domain, codomain, messages[0])
        if n <= DENSE_UP_TO:
            return factorize(matvec, domain, codomain, messages[0])
    lx = optional_import("lineax", user)
    of_entries = {lx.diagonal_tag, lx.tridiagonal_tag}
    of_entries |= {lx.lower_triangular_tag, lx.upper_triangular_tag}
    if domain.has_complex:  # is two real unknowns, and the matrix has other entries
        tags -= of_entries
    if type(solver) is lx.LU and n == codomain.size:
        return factorize(matvec, domain, codomain, messages[0])
    if solver is None and lx.diagonal_tag in tags:
        return divide(matvec, domain, codomain, messages[0])
    from .lineax_solver import CheckedSolver  # which imports it

    if any(varying_axes(x) or any(explicit_spec(x)) for x in jax.tree.leaves((rhs_like, like))):
        raise rule_error(
            f"`{user}` can't solve a linear system with `lineax` where the types of arrays say "
            "how they differ between the devices of a mesh.",
            f"there are {n} unknowns, the solver is {solver!r:.60}",
            do="Pass `check_vma=False` to `jax.shard_map`, or use `jax.sharding.auto_axes` for "
            f"explicit axes; or, for up to {DENSE_UP_TO} unknowns, leave the solver out.",
        )
    of_vector = lambda x: codomain.to_vector(matvec(domain.from_vector(x)))
    type_of_vector = jax.ShapeDtypeStruct((n,), dtype)
    operator = lx.FunctionLinearOperator(of_vector, type_of_vector, tags=tags)
    tolerance = None
    if solver is None:
        solver, tolerance = _choose(lx, n, tags, of_entries, dtype)
    solver = CheckedSolver(solver, tolerance, messages)

    def solve(rhs: PyTree[Array]) -> PyTree[Array]:
        vector = _batched_like(operator, codomain.to_vector(rhs))
        return domain.from_vector(lx.linear_solve(operator, vector, solver).value)

    return solve


def _messages(user, matrix) -> tuple[str, str]:
    """For a singular matrix, and for an iteration that stopped before its tolerance."""
    what = f"The linear solve for the derivative of `{user}` failed.\n"
    return (
        f"{what}  {matrix} is singular at the solution to within rounding, or not finite.\n"
        "Look for a solution with others arbitrarily near, and for equations that repeat one "
        "another; or pass the solver `lineax.SVD()` for the smallest of the least-squares "
        "solutions.",
        f"{what}  {matrix} is singular at the solution, or so nearly singular that the solver "
        "did not reach its tolerance.\n"
        "Pass the solver `lineax.LU()`, which takes the memory of the whole matrix, an "
        "iterative solver with more steps, or the `tags` of the matrix. If it is singular, "
        "pass `lineax.SVD()`, for the smallest of the least-squares solutions.",
    )


def _is_elementwise(matvec, domain, codomain) -> bool:
    if domain.size == 1 == codomain.size:
        return True
    of_arrays = lambda arrays: codomain.to_arrays(matvec(domain.from_arrays(arrays)))
    arrays = vary_alike(domain.to_arrays(domain.like), codomain.like)
    return has_diagonal_jacobian(jax.make_jaxpr(of_arrays)(arrays))


def _batched_like(operator, vector):
    """`vector`, with a batch axis if the operator has one.

    Without it, `grad(vmap(...))` of `lineax.linear_solve` raises: Equinox does not sum the
    cotangents of an unbatched operand of `vmap` (Equinox 0.13.8, Lineax 0.1.1; no upstream
    issue was found). The compiler removes the selection.
    """
    arrays = filter(eqx.is_array, jax.tree.leaves(operator))
    predicate = ft.reduce(jnp.logical_and, [jnp.all(x == x) for x in arrays], jnp.array(True))
    return jax.lax.select(jnp.broadcast_to(predicate, vector.shape), vector, vector)


def _choose(lx, n: int, tags: frozenset[object], of_entries: set[object], dtype: Any) -> Any:
    """A solver, and the tolerance of an iteration."""
    if n <= DENSE_UP_TO or tags & of_entries:
        return lx.AutoLinearSolver(well_posed=True), None
    tolerance = float(jnp.finfo(dtype).eps) ** 0.6
    options = {"rtol": 0.1 * tolerance, "atol": 0.1 * tolerance}
    if tags & {lx.positive_semidefinite_tag, lx.negative_semidefinite_tag}:
        return lx.CG(**options), tolerance
    # It stops where the residual no longer falls, and not after 20 more cycles.
    return lx.GMRES(**options, stagnation_iters=3), tolerance
