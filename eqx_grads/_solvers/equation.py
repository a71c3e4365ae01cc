"""The equation of a function with `implicit`, and the tangent of its solution."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import name_of, place_of, rule_error, show_path, type_of, unlike
from .._rules.closure_convert import ClosureTemplate, Opaque
from .linear_solve import linear_solver
from .residual_check import one_if_small


class Options(NamedTuple):
    """What `implicit` was told.

    - `solver`, `tags`: of the linear system.
    - `tolerance`: how large the residual may be; `None` for any.
    """

    solver: Any
    tags: frozenset[object]
    has_aux: bool
    tolerance: float | None


class Equation(Opaque):
    """`residual(y, *args, **config) = 0`. Holds no tracer.

    - `template`: of `[residual, args, config]`, with placeholders where there were tracers.
    - `solve`: what the user calls the function that solves the equation.
    """

    def __init__(self, template: ClosureTemplate, options: Options, solve: str):
        self._template = template
        self._options = options
        self._solve = solve
        self._name = name_of(template.items[0])
        self._place = place_of(template.items[0])

    def residual(self, y: PyTree, operands: Sequence[Any]) -> PyTree[Array]:
        """The inexact arrays of the residual, `operands` being the tracers."""
        (residual, args, config), _ = self._template.substitute(operands)
        try:
            out = residual(y, *args, **config)
        except Exception as error:
            note = (
                f"The residual `{self._name}` is called with the solution of `{self._solve}` "
                "first, and then with its arguments. Of a method, these begin with `self`."
            )
            if isinstance(error, jax.errors.TracerArrayConversionError):
                note = f"NumPy can't compute with a traced array. The residual `{self._name}` "
                note += f"({self._place}) is differentiated by JAX: write it in `jnp`."
            error.add_note(note)
            raise
        return self._like_solution(out, y)

    def solver(self, linear_map, unknowns, value) -> Callable[[PyTree], PyTree]:
        """The function of `b` that returns the tangent of the solution: an error if the
        residual there is not small."""
        options, of = self._options, self._solve
        one = jnp.ones((), jnp.float32)
        if options.tolerance is not None:
            names = self._name, self._place, of
            one = one_if_small(value, linear_map, unknowns, options.tolerance, names)
        matrix = f"The Jacobian of the residual `{self._name}` ({self._place})"
        given = {"solver": options.solver, "tags": options.tags, "user": "implicit"}
        solve = linear_solver(linear_map, value, unknowns, **given, of=of, matrix=matrix)
        return lambda b: solve(jax.tree.map(lambda t: -t * one.astype(t.dtype), b))

    def _like_solution(self, out: PyTree, y: PyTree) -> PyTree[Array]:
        """The inexact arrays of a residual, with `None` in the place of the other leaves.

        A leaf of `y` that can't be differentiated is not solved for, and what the residual has
        in its place is left out. Raises if the rest is not like the solution, with one equation
        for each unknown, unless the user chose a solver, which may accept another number.
        """
        unknowns = jax.tree.map(lambda x: _as_array(x) if _is_unknown(x) else None, y)
        leaves = jax.tree_util.tree_leaves_with_path(y)
        others = {path for path, x in leaves if not _is_unknown(x)}

        def leaf(path, x):
            if _is_unknown(x):
                return _as_array(x)
            if path in others or not eqx.is_array_like(x):
                return None
            raise rule_error(
                f"The residual `{self._name}` of `{self._solve}` has no derivative.",
                f"at residual{show_path(path)}: it is {type_of(x)}",
                self._place,
                do="Return floats, which are zero at the solution, and `None` for what is not "
                "solved for.",
            )

        residuals = jax.tree_util.tree_map_with_path(leaf, out)
        if self._options.solver is not None:
            return residuals
        text = "the solution is {}, the residual {}"
        where = unlike(
            unknowns, residuals, "residual", text, lambda x: (x.shape, jnp.iscomplexobj(x))
        )
        if not where:
            return residuals
        objective = ""
        if [x.shape for x in jax.tree.leaves(residuals)] == [()]:
            objective = "Is this an objective? Give `jax.grad` of it, or `eqx.filter_grad`. "
        raise rule_error(
            f"The residual `{self._name}` of `{self._solve}` is not like the solution.",
            *where,
            self._place,
            do=f"{objective}Return one equation for each unknown, in a tree like that of the "
            "solution. For more or fewer equations than unknowns, pass a least-squares solver, "
            "such as `solver=lineax.SVD()`.",
        )


def _is_unknown(x) -> bool:
    return isinstance(x, float | complex) or eqx.is_inexact_array(x)


def _as_array(x) -> Array:
    # While something is linearized, each conversion takes as long as an operation.
    return x if isinstance(x, jax.Array) else jnp.asarray(x)
