"""`implicit`: the derivative of any solver, from the equation that it solves."""

import functools as ft
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import (
    bad_argument,
    check_flags,
    check_function,
    name_of,
    pair_of,
    place_of,
    rule_error,
    unlike,
)
from .._rules.closure_convert import ClosureTemplate, lift_tracers, Opaque
from .._rules.float_args import as_number
from .._rules.nondifferentiable import nondifferentiable
from .._rules.signature import accepted_keywords, Signature
from .._rules.without_tangents import call_without_tangents
from .._rules.wrapper import AbstractWrapper, P, set_metadata, T, unwrap_method
from .linear_solve import as_tags, check_linear_solver, linear_solver
from .residual_check import one_if_small
from .solution_tangent import differentiable_solution


class Options(NamedTuple):
    """What `implicit` was told.

    - `solver`, `tags`: of the linear system.
    - `tolerance`: how large the residual may be; `None` for any.
    """

    solver: Any
    tags: frozenset[object]
    has_aux: bool
    tolerance: float | None


def implicit(
    residual: Callable[..., Any],
    *,
    solver: Any = None,
    tags: object | Collection[object] = (),
    has_aux: bool = False,
    tolerance: float | None = 1e-2,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    r"""Give any solver a derivative, from the equation that it solves.

    A decorator. The function that you decorate may be a `while_loop`, an optimizer, or a call
    of Optimistix, or of SciPy in a callback. It is called for the value, and never
    differentiated.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def residual(y, a):
            return y**3 + y - a

        @eqg.implicit(residual)
        def solve(a):
            def halve(_, bracket):
                low, high = bracket
                middle = (low + high) / 2
                above = residual(middle, a) > 0
                return jnp.where(above, low, middle), jnp.where(above, middle, high)

            low, high = jax.lax.fori_loop(0, 40, halve, (-10.0, 10.0))
            return (low + high) / 2

        print(f"{solve(2.0):.3f}")
        print(f"{jax.grad(solve)(2.0):.3f}")
        print(f"{jax.hessian(solve)(2.0):.3f}")
        ```

        ```text
        1.000
        0.250
        -0.094
        ```

    **Arguments:**

    - `residual`: called as `residual(y, *args)`, with the solution `y` and the positional
        arguments of the solver; zero at the solution. It returns a tree like `y`, with one
        equation for each unknown: for each element of each floating or complex leaf of `y`.
        For a minimum, `eqx.filter_grad(objective)`.
    - `solver`: a `lineax` solver for the linear system. By default, the library divides if the
        program of the residual acts on each element by itself. Otherwise it uses LU up to 256
        unknowns, and beyond that GMRES, which does not form the matrix. With `lineax.SVD()` and
        other least-squares solvers the matrix may be singular or not square, and the residual
        may have any structure.
    - `tags`: the `lineax` tag or tags of $\partial F/\partial y$. With
        `lineax.positive_semidefinite_tag` (a minimum), Cholesky and conjugate gradients are
        used instead of LU and GMRES.
    - `has_aux`: whether the solver returns `y, aux`.
    - `tolerance`: how large the residual may be at the solution. The limit is the change of the
        residual when each element of the solution changes by this fraction of itself. (An
        element below $10^{-3}$ changes by this fraction of $10^{-3}$.) The fraction is at least
        16 times the machine epsilon of the residual, which matters in half precision. A larger
        residual is an error when the derivative is computed. `None`: no check.

    The decorated function:

    - The residual gets its positional arguments too, even if you pass them by keyword. You
        can differentiate with respect to them, `self` included, and to the values that the
        residual closes over.
    - Its keyword-only parameters are for values that the solution does not depend on: a first
        guess, a bracket, a number of steps, a key. The residual does not get them, and their
        derivative is zero. If the residual has a parameter of the same name, it gets the value.
        It is then configuration, as for any rule, and differentiating it is an error.
    - It returns `y`, any PyTree; with `has_aux`, a pair `y, aux`. Leaves of `y` that can't be
        differentiated are not solved for. The derivative of `aux` is zero.

    Values that the residual does not depend on can't change the solution. So a first guess that
    depends on parameters (the last solution, in a scan) needs no `stop_gradient`, and the
    solver may close over anything.

    **Returns:**

    A decorator.

    **Derivative:**

    With the residual $F(y, a) = 0$, the implicit function theorem says that
    $\frac{\partial F}{\partial y}\,\dot y = -\frac{\partial F}{\partial a}\,\dot a$. The
    forward rule solves this system. The reverse rule, its transpose, solves
    $\left(\frac{\partial F}{\partial y}\right)^\top \lambda = -\bar y$ and returns
    $\bar a = \left(\frac{\partial F}{\partial a}\right)^\top \lambda$. Both modes and all
    orders: the derivative of a rule applies the rule again. The residual has to be
    differentiable in forward mode. With several solutions, or none nearby, the system is
    singular, which is an error. With a least-squares solver, $\dot y$ is then the smallest
    least-squares solution.

    A function that is not holomorphic may have complex unknowns: they are solved for as pairs
    of real ones.

    **Raises:**

    [`eqx_grads.RuleError`][] if the residual can't be called with these arguments, or does not
    have the structure of the solution. A `ModuleNotFoundError` if Lineax is not installed:
    `tags`, a `solver` and more than 256 unknowns need it. A run-time error (see
    `equinox.error_if`) if the residual is not small at the solution, or the linear solve fails.
    A run-time error may show the stack of an earlier call, whose compiled program is used
    again. Its text names the residual, its file and its line.

    ??? cite

        Blondel, M. et al. (2022). Efficient and modular implicit differentiation. *Advances in
        Neural Information Processing Systems* 35.
    """
    check_function(residual, "residual", "implicit")
    check_flags("implicit", has_aux=has_aux)
    check_linear_solver(solver, "solver", "implicit")
    known = as_number(tolerance)
    if tolerance is not None and not (known is not None and known >= 0):
        do = "Give a number such as `1e-2`, or `None` for no check."
        raise bad_argument("implicit", "tolerance", "a number of at least zero", tolerance, do)
    tags = as_tags(tags, "implicit")
    options = Options(solver, tags, has_aux, known)
    return ft.partial(ImplicitFunction, residual=residual, options=options)


class ImplicitFunction(AbstractWrapper[P, T]):
    """A function that solves an equation, with the derivative of the solution."""

    fn: Callable[..., Any]
    residual: Callable[..., Any]
    _binding: str = eqx.field(static=True)
    _options: Options = eqx.field(static=True)

    def __init__(self, fn: Any, residual: Callable[..., Any], options: Options):
        self.fn, self._binding = unwrap_method(fn, "fn", "implicit")
        self.residual = residual
        self._options = options
        set_metadata(self, self.fn)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(*Signature(self.fn).bind(args, kwargs, True)[:2])

    def _call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        # Numbers inside of an argument stay as they are: a module may scan over its arrays.
        args = tuple(jnp.asarray(x) if isinstance(x, float | complex) else x for x in args)
        y, aux = call_without_tangents(self.fn, args, kwargs), None
        solve = name_of(self.fn)
        if self._options.has_aux:
            do = "Return `y, aux`, as `has_aux=True` says: the solution and anything else."
            y, aux = pair_of(y, f"`{solve}`", place_of(self.fn), do)
        config = _config(self.residual, args, kwargs, solve)
        # The derivative of whatever is traced: the arguments, and what the residual or a
        # function among the arguments closes over.
        template, operands = lift_tracers([self.residual, args, config])
        if operands:
            equation = Equation(template, self._options, solve)
            rules = {"residual": equation.residual, "solver": equation.solver}
            y = differentiable_solution(y, operands, **rules)
        return (y, aux) if self._options.has_aux else y


def _config(residual, args, kwargs, solve):
    """The keyword-only arguments that the residual has a parameter for."""
    config, mismatch = accepted_keywords(residual, (None, *args), kwargs)
    if mismatch:
        raise rule_error(
            f"The residual `{name_of(residual)}` can't be called with the solution and the "
            f"arguments of `{solve}`: {mismatch}.",
            f"positional arguments of `{solve}`, defaults included: {len(args)}",
            place_of(residual),
            do="Give it the parameters `(y, *args)`, where `args` are the positional "
            "parameters of the function that it decorates. A first guess, and all else that "
            "the solution does not depend on, is a keyword-only parameter of that function.",
        )
    what = "The keyword-only argument `{}` of `{}`"
    return {k: nondifferentiable(v, what.format(k, solve)) for k, v in config.items()}


# ---------------------------------------------------------------- the equation


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
                "first, and then with its arguments. The arguments of a method "
                "begin with `self`."
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

        A leaf of `y` that can't be differentiated is not solved for. Raises if the rest is not
        like the solution, with one equation for each unknown, unless the user chose a solver,
        which may accept another number.
        """
        unknowns, residuals = _unknowns(y), _unknowns(out)
        if self._options.solver is not None:
            return residuals
        text = "the solution is {}, the residual {}"
        kind = lambda x: (x.shape, jnp.iscomplexobj(x))
        where = unlike(unknowns, residuals, "residual", text, kind)
        if not where:
            return residuals
        objective = ""
        if [x.shape for x in jax.tree.leaves(residuals)] == [()]:
            objective = "Is this an objective? Give `jax.grad` of it, or `eqx.filter_grad`. "
        raise rule_error(
            f"The residual `{self._name}` of `{self._solve}` is not like the solution.",
            *where,
            self._place,
            do=f"{objective}Return one equation for each unknown, in a tree like the solution, "
            "as a float: other leaves are `None`. For more or fewer equations than unknowns, "
            "pass a least-squares solver, such as `solver=lineax.SVD()`.",
        )


def _unknowns(tree: PyTree) -> PyTree[Array]:
    """The inexact arrays, with `None` in the place of the other leaves."""
    # While something is linearized, each conversion takes as long as an operation.
    as_array = lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x)
    is_unknown = lambda x: isinstance(x, float | complex) or eqx.is_inexact_array(x)
    return jax.tree.map(lambda x: as_array(x) if is_unknown(x) else None, tree)
