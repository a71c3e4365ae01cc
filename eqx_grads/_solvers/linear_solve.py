"""Solve a linear system that is given as a function, by `lineax`."""

import functools as ft
from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import optional_import, rule_error, show_tree
from .._jaxprs.current_trace import staging_trace
from .._jaxprs.diagonal import has_diagonal_jacobian
from .._jaxprs.varying import vary_alike, varying_axes
from .._rules.explicit_sharding import distribute_like, explicit_spec, gathered
from .lost_pivot import has_lost_pivot
from .real_view import RealView, working_dtype
from .run_time_error import branched_error_if


# A dense factorization is more robust, and up to here not slower than an iteration.
DENSE_UP_TO = 256


def as_tags(tags: Any, user: str) -> frozenset[object]:
    """The `lineax` tags that `user` was given: one, or a collection of them."""
    several = isinstance(tags, tuple | list | set | frozenset)
    given = list(tags) if several else [tags]
    if not given:
        return frozenset()
    lx = optional_import("lineax", user)
    for tag in given:
        if not isinstance(tag, type(lx.symmetric_tag)):
            raise rule_error(
                f"The `tags` of `{user}` are not tags of Lineax.",
                f"one of them is {tag!r:.60}",
                do="Give one, such as `lineax.symmetric_tag`, or a tuple of them.",
            )
    return frozenset(given)


def check_linear_solver(solver: Any, argument: str, user: str) -> None:
    """Raise if a solver is given that is not one of Lineax."""
    if solver is None:
        return
    lx = optional_import("lineax", user)
    if not isinstance(solver, lx.AbstractLinearSolver):
        raise rule_error(
            f"The `{argument}` of `{user}` is not a linear solver.",
            f"it is {solver!r:.60}",
            do="Give one of Lineax, such as `lineax.GMRES(rtol=1e-5, atol=1e-5)`, or `None`.",
        )


def linear_solve(
    matvec: Callable[[PyTree[Array]], PyTree[Array]],
    rhs: PyTree[Array],
    like: PyTree[Any],
    *,
    solver: Any = None,
    tags: Collection[object] = (),
    user: str = "linear_solve",
    of: str = "",
    matrix: str = "The matrix",
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
    - `user`: what the user called, for errors; `of`, `matrix`: whose derivative this is for,
        and what the matrix is to the user, for those of a solve that fails.

    Differentiable in all modes and orders with respect to `rhs` and to what `matvec` closes
    over, by the rules of `lineax`. A solve that fails raises when it runs.
    """
    lx = optional_import("lineax", user)
    from .checked_solver import CheckedSolver  # which imports it

    dtype = working_dtype(rhs, like)
    domain, codomain = RealView(like, dtype), RealView(rhs, dtype)
    tags = frozenset(tags)
    _check_tags(lx, tags, like, domain, user)
    if domain.vector_type.size == 0 or codomain.vector_type.size == 0:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    leaves = jax.tree.leaves((rhs, like))
    messages = _messages(of or user, matrix)
    on_mesh = any(varying_axes(x) or any(explicit_spec(x)) for x in leaves)
    is_small = solver is None and domain.vector_type.size <= DENSE_UP_TO
    if on_mesh or (is_small and _types_have_meshes()):
        return _solve_on_mesh(matvec, rhs, like, domain, codomain, solver, user, messages)
    if solver is None and not tags and _is_elementwise(matvec, domain, codomain):
        ones = domain.from_arrays([jnp.ones(x.shape, x.dtype) for x in domain.types])
        operator = lx.DiagonalLinearOperator(codomain.to_vector(matvec(ones)))
        solver = lx.Diagonal(well_posed=True)
    elif is_small and not tags and staging_trace() is None:
        # An array and not a function: `lineax` compiles once more for each new function.
        column = lambda x: codomain.to_vector(matvec(domain.from_vector(x)))
        columns = jax.vmap(column, out_axes=1)(jnp.eye(domain.vector_type.size, dtype=dtype))
        operator, solver = lx.MatrixLinearOperator(columns), lx.LU()
    else:
        operator = lx.FunctionLinearOperator(
            lambda x: codomain.to_vector(matvec(domain.from_vector(x))),
            domain.vector_type,
            tags=tags,
        )
        if solver is None:
            solver = _choose(lx, domain.vector_type.size, tags, dtype)
    solver = CheckedSolver(solver, *messages)
    vector = _batched_like(operator, codomain.to_vector(rhs))
    return domain.from_vector(lx.linear_solve(operator, vector, solver).value)


def _types_have_meshes() -> bool:
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return any(kind != jax.sharding.AxisType.Auto for kind in kinds)


def _solve_on_mesh(matvec, rhs, like, domain, codomain, solver, user, messages):
    """Division or LU, by JAX itself. In the types of its operators, Equinox keeps neither the
    mesh nor which values vary over it, and the gradient of one that does not would be wrong
    (Equinox 0.13.8, Lineax 0.1.1; no upstream issue was found)."""
    n = domain.vector_type.size
    if solver is None:
        arrays = vary_alike(domain.to_arrays(like), rhs, like)
        of_arrays = lambda arrays: codomain.to_arrays(matvec(domain.from_arrays(arrays)))
        if has_diagonal_jacobian(jax.make_jaxpr(of_arrays)(arrays)):
            diagonal = of_arrays([jnp.ones_like(x) for x in arrays])
            one = _one_if_regular(diagonal, messages)
            right = vary_alike(codomain.to_arrays(rhs), rhs, like)
            quotients = [one * b / d for b, d in zip(right, diagonal, strict=True)]
            return domain.from_arrays(quotients)
    if solver is not None or n > DENSE_UP_TO:
        raise rule_error(
            f"`{user}` can't solve a linear system by `lineax` where the types of arrays say "
            "how they differ between the devices of a mesh.",
            f"there are {n} unknowns, the solver is {solver!r:.60}",
            do="Pass `check_vma=False` to `jax.shard_map`, or use `jax.sharding.auto_axes` for "
            f"explicit axes; or, for up to {DENSE_UP_TO} unknowns, leave the solver out.",
        )
    flat = lambda tree: vary_alike([codomain.to_vector(_gathered(tree))], rhs, like)[0]

    def column(x):
        x = jax.tree.map(_sharded_like, domain.from_vector(x), like)
        leaves, treedef = jax.tree.flatten(x)
        return flat(matvec(treedef.unflatten(vary_alike(leaves, rhs, like))))

    columns = jax.vmap(column, out_axes=1)(jnp.eye(n, dtype=domain.vector_type.dtype))
    factors, order = jax.scipy.linalg.lu_factor(columns)
    one = _one_if_regular([jnp.diagonal(factors)], messages, has_lost_pivot(factors))
    solution = jax.scipy.linalg.lu_solve((factors, order), one * flat(rhs))
    return jax.tree.map(_sharded_like, domain.from_vector(solution), like)


def _one_if_regular(pivots, messages, is_lost: Any = False):
    """One, to multiply the right-hand side by, which may be a tangent; raises when it is
    computed if a pivot of the matrix is zero, not finite or lost."""
    pivots = jax.lax.stop_gradient(pivots)
    are_good = [jnp.all(jnp.isfinite(x) & (x != 0)) for x in pivots]
    is_singular = ~ft.reduce(jnp.logical_and, are_good) | is_lost
    return branched_error_if(jnp.ones((), pivots[0].dtype), is_singular, 0, messages[:1])


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


def _gathered(tree):
    return jax.tree.map(gathered, tree)


def _sharded_like(x, like):
    return distribute_like(x, like, explicit_spec(like))


def _is_elementwise(matvec, domain, codomain) -> bool:
    if domain.vector_type.size == 1 == codomain.vector_type.size:
        return True

    def of_arrays(arrays):
        return codomain.to_arrays(matvec(domain.from_arrays(arrays)))

    return has_diagonal_jacobian(jax.make_jaxpr(of_arrays)(domain.types))


def _batched_like(operator, vector):
    """`vector`, with a batch axis if the operator has one.

    Without it, `grad(vmap(...))` of `lineax.linear_solve` raises: Equinox does not sum the
    cotangents of an unbatched operand of `vmap` (Equinox 0.13.8, Lineax 0.1.1; no upstream
    issue was found). The compiler removes the selection.
    """
    arrays = list(filter(eqx.is_array, jax.tree.leaves(operator)))
    first = [jnp.reshape(x, -1)[:1] for x in arrays]
    predicate = ft.reduce(jnp.logical_and, [jnp.all(x == x) for x in first], jnp.array(True))
    return jax.lax.select(jnp.broadcast_to(predicate, vector.shape), vector, vector)


def _choose(lx, n: int, tags: frozenset[object], dtype: Any) -> Any:
    if lx.diagonal_tag in tags:
        return lx.Diagonal(well_posed=True)
    structured = {lx.tridiagonal_tag, lx.lower_triangular_tag, lx.upper_triangular_tag}
    if n <= DENSE_UP_TO and not tags:
        return lx.LU()
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


def _check_tags(lx, tags, like, domain, user):
    shapes = {lx.diagonal_tag, lx.tridiagonal_tag}
    shapes |= {lx.lower_triangular_tag, lx.upper_triangular_tag}
    if domain.has_complex and tags & shapes:
        raise rule_error(
            f"`{user}` was given a tag that says where the entries of a matrix are, of complex "
            "unknowns.",
            f"the unknowns are {show_tree(like)}",
            do="A complex unknown is solved for as two real ones. Leave the tag out.",
        )
