"""The check that a residual has the structure of the solution, and one equation for each
unknown unless the linear solver accepts another number."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import name_of, optional_import, place_of, rule_error, show_path, type_of


def residual_leaves(
    out: PyTree, y: PyTree, *, residual: Callable[..., Any], solve: str, solver: Any
) -> PyTree[Array]:
    """The inexact arrays of a residual, with `None` in the place of the other leaves.

    A leaf of `y` that can't be differentiated is not solved for, and what the residual has in
    its place is left out. Raises if the rest does not fit.
    """
    not_unknown = {p for p, x in _leaves(y) if not _is_unknown(x)}

    def leaf(path, x):
        if _is_unknown(x):
            return jnp.asarray(x)
        if path in not_unknown or not eqx.is_array_like(x):
            return None
        raise rule_error(
            f"The residual `{name_of(residual)}` of `{solve}` has no derivative.",
            f"at residual{show_path(path)}: it is {type_of(x)}",
            place_of(residual),
            do="Return floats, which are zero at the solution, and `None` for what is not "
            "solved for.",
        )

    leaves = jax.tree_util.tree_map_with_path(leaf, out)
    if not _accepts_any_shape(solver):
        unknowns = jax.tree.map(lambda x: x if _is_unknown(x) else None, y)
        _check_same_structure(leaves, unknowns, residual, solve)
    return leaves


def _check_same_structure(residuals, unknowns, residual, solve):
    wants, has = dict(_leaves(unknowns)), dict(_leaves(residuals))
    differences = [
        f"at {show_path(path) or 'the only leaf'}: the solution is "
        f"{_type(wants.get(path))}, the residual {_type(has.get(path))}"
        for path in {**wants, **has}
        if _kind(wants.get(path)) != _kind(has.get(path))
    ]
    if differences or jax.tree.structure(unknowns) != jax.tree.structure(residuals):
        shown = differences[:_MOST_SHOWN]
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown)} more")
        if not differences:
            shown = ["the containers differ: a tuple and a list, say"]
        shapes = [jnp.shape(x) for x in jax.tree.leaves(residuals)]
        objective = ""
        if shapes == [()]:
            objective = "Is this an objective? Give `jax.grad` of it, or `eqx.filter_grad`. "
        raise rule_error(
            f"The residual `{name_of(residual)}` of `{solve}` is not like the solution.",
            *shown,
            place_of(residual),
            do=f"{objective}Return one equation for each unknown, in a tree like that of the "
            "solution. For more or fewer equations than unknowns, pass a least-squares solver, "
            "such as `solver=lineax.SVD()`.",
        )


_MOST_SHOWN = 5


def _leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def _is_unknown(x) -> bool:
    if isinstance(x, float | complex):
        return True
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def _kind(x):
    if x is None:
        return None
    return x.shape, jnp.issubdtype(x.dtype, jnp.complexfloating)


def _type(x):
    return "not there" if x is None else type_of(x)


def _accepts_any_shape(solver) -> bool:
    """Whether a `lineax` solver may be given a matrix that is not square."""
    if solver is None:
        return False
    lx = optional_import("lineax", "implicit")
    if isinstance(solver, lx.AutoLinearSolver):
        return solver.well_posed is not True
    square = (lx.LU, lx.Cholesky, lx.CG, lx.GMRES, lx.BiCGStab)
    return not isinstance(solver, (*square, lx.Diagonal, lx.Tridiagonal, lx.Triangular))
