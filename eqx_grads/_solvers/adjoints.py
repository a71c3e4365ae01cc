"""Adjoints of fixed points, for this library and for Optimistix."""

import abc
import functools as ft
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import bad_argument, check_flags, rule_error
from .._jaxprs.varying import cast_carry, on_explicit_mesh
from .._rules.float_args import as_count, is_number
from .._rules.tree_split import TreeSplit
from .._tangent_spaces import is_array
from .linear_solve import check_linear_solver, linear_solver
from .optimistix import optimistix as optx
from .real_view import RealView, working_dtype
from .run_time_error import branched_error_if
from .solution_tangent import constant, differentiable_solution


Map: TypeAlias = Callable[[PyTree], PyTree]
Tags: TypeAlias = frozenset[object]


class AbstractFixedPointAdjoint(optx.AbstractAdjoint):
    r"""The derivative of a fixed point $y = f(y, \theta)$: how its linear equation is solved.

    Pass one to [`eqx_grads.fixed_point`][], or as `adjoint=` to `optimistix.fixed_point`, with
    any of its solvers for fixed points and roots. It may also be passed to
    `optimistix.root_find` of a function $g$; then $f(y, \theta) = y + g(y, \theta)$. If the
    solver minimizes, Optimistix differentiates another equation: the gradient of the objective
    is zero. This works with [`eqx_grads.solvers.ImplicitAdjoint`][], and is an error with any
    other adjoint. Everything else that Optimistix returns, such as `aux`, has a zero
    derivative.

    To write an adjoint, implement `solve_tangent`.
    """

    def apply(self, primal_fn: Any, rewrite_fn: Any, inputs: Any, tags: Any) -> Any:
        """Run the solver, and give its solution this derivative. Called by Optimistix."""
        fn, solver, y0, args, *options = inputs
        finds = isinstance(solver, optx.AbstractFixedPointSolver | optx.AbstractRootFinder)
        is_of_optimistix = rewrite_fn.__module__.startswith("optimistix")
        if is_of_optimistix and not (finds or isinstance(self, ImplicitAdjoint)):
            # The equation is that a gradient is zero, and not f(y) = y.
            name = type(self).__name__
            raise rule_error(
                f"`{name}` was given to Optimistix together with a solver that minimizes.",
                f"the solver is `{type(solver).__name__}`, and `{name}` is for fixed points",
                do="Use `eqx_grads.fixed_point`, which differentiates the fixed point whatever "
                "the solver; or `eqx_grads.solvers.ImplicitAdjoint`.",
            )
        # The fixed point depends on the function and its arguments only.
        inputs = (fn, *constant((solver, y0)), args, *constant(options))
        y, rest = primal_fn((*constant(inputs), _while_loop))
        # Python numbers are static where Equinox has traced `fn`, and remain so.
        static, arrays = TreeSplit.split(inputs, is_array)
        # `None` is for other outputs of the solver than `y`: Optimistix does not read them.
        residual = lambda y, arrays: rewrite_fn(y, None, static.tree(arrays))
        solver = lambda linear_map, *_: lambda b: self.solve_tangent(linear_map, b, tags)
        return differentiable_solution(y, arrays, residual=residual, solver=solver), rest

    @abc.abstractmethod
    def solve_tangent(self, linear_map: Map, b: PyTree, tags: Tags = frozenset()) -> PyTree:
        r"""Solve $t = J t + b$ for $t$, the tangent of the fixed point, where
        $J = \partial f/\partial y$ and $b = \partial f/\partial\theta\,t_\theta$.

        **Arguments:**

        - `linear_map`: the function $t \mapsto (J - I) t$.
        - `b`: a PyTree like the fixed point.
        - `tags`: `lineax` tags of the matrix $J - I$.

        **Returns:**

        $t$, or an approximation that is linear in `b`, written in operations that JAX can
        transpose: reverse mode is the transpose, and solves $u = J^T u + g$ in the same way.
        """


def _while_loop(cond_fun, body_fun, init_val, *, max_steps):
    """`jax.lax.while_loop` with a bound, in the form that Optimistix asks for."""
    max_steps = 2**31 - 1 if max_steps is None else max_steps

    def step(carry):
        count, old = carry
        # With `jax_enable_x64`, the first error of `optimistix.FixedPointIteration` is float64
        # whatever the dtype of the state (Optimistix 0.1.0). A loop rejects such a carry.
        new = jax.tree.map(lambda new, old: new.astype(old.dtype), body_fun(old), old)
        return count + 1, new

    leaves, treedef = jax.tree.flatten(init_val)
    types = lambda leaves: jax.make_jaxpr(body_fun)(treedef.unflatten(leaves)).out_avals
    init_val = treedef.unflatten(cast_carry(types, leaves))
    goes_on = lambda carry: cond_fun(carry[1]) & (carry[0] < max_steps)
    init = on_explicit_mesh(jnp.array(0, jnp.int32)), init_val
    return jax.lax.while_loop(goes_on, step, init)[1]


def plain_iteration(y: PyTree) -> optx.FixedPointIteration:
    """The plain iteration, to eps^(3/4) of the coarsest dtype, 6e-6 in single precision.

    An iteration that contracts slowly stops at a multiple of eps that depends on the function.
    """
    eps = [float(jnp.finfo(jnp.result_type(x)).eps) for x in jax.tree.leaves(y)]
    tolerance = max(eps) ** 0.75
    return optx.FixedPointIteration(rtol=tolerance, atol=tolerance)


def check_solver(solver: Any, user: str) -> None:
    finds = optx.AbstractFixedPointSolver | optx.AbstractRootFinder
    minimizes = optx.AbstractLeastSquaresSolver | optx.AbstractMinimiser
    if not isinstance(solver, finds | minimizes):
        do = "Give an instance, such as `optimistix.Newton(rtol=1e-5, atol=1e-5)` or "
        do += "`eqx_grads.solvers.Anderson(rtol=1e-5, atol=1e-5)`."
        raise bad_argument(user, "solver", "one of Optimistix", solver, do)


class OneStepAdjoint(AbstractFixedPointAdjoint):
    r"""The derivative of one step of the iteration at the fixed point.

    The Jacobian-free backpropagation of [Fung et al.,
    2021](https://arxiv.org/abs/2103.12803). One VJP of the function, without a loop.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        halfway = lambda y, x: 0.5 * y + x  # the fixed point is 2x
        solve = lambda x: eqg.fixed_point(halfway, 0.0, x, backward="one_step").value
        print(jax.grad(solve)(3.0))
        ```

        ```text
        1.0
        ```

    **Derivative:**

    An approximation, in both modes: $t = b$ instead of $(I - J)^{-1} b$, and $u = g$. It is
    exact where $J = 0$. The second derivative is that of this approximation, and approximates
    the second derivative of the fixed point.
    """

    def solve_tangent(self, linear_map: Map, b: PyTree, tags: Tags = frozenset()) -> PyTree:
        """As for [`eqx_grads.solvers.AbstractFixedPointAdjoint`][]."""
        return b


class NeumannAdjoint(AbstractFixedPointAdjoint):
    r"""The first terms of the Neumann series of $(I - J)^{-1}$.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        from eqx_grads import solvers

        halfway = lambda y, x: 0.5 * y + x  # the fixed point is 2x
        backward = solvers.NeumannAdjoint(3)
        solve = lambda x: eqg.fixed_point(halfway, 0.0, x, backward=backward).value
        print(jax.grad(solve)(3.0))  # 1 + 1/2 + 1/4 + 1/8, of 2
        ```

        ```text
        1.875
        ```

    **Arguments:**

    - `k`: the highest power of $J$, an integer. Zero is
        [`eqx_grads.solvers.OneStepAdjoint`][].

    **Derivative:**

    An approximation, in both modes: $t = \sum_{i=0}^k J^i b$, and in reverse mode
    $u = \sum_{i=0}^k (J^T)^i g$, at the cost of $k$ JVPs or VJPs of the function. Where $f$ is
    a contraction with the factor $L$, the relative error of $t$ and $u$ falls with $L^{k+1}$.
    Where an eigenvalue of $J$ is at least one in modulus, the series does not converge. The
    second derivative is that of this approximation, and approximates the second derivative of
    the fixed point.

    **Raises:**

    [`eqx_grads.RuleError`][] if `k` is not an integer, or is negative.
    """

    k: int = eqx.field(static=True)

    def __init__(self, k: Any = 5):
        self.k = as_count("NeumannAdjoint", "k", k, least=0)

    def solve_tangent(self, linear_map: Map, b: PyTree, tags: Tags = frozenset()) -> PyTree:
        """As for [`eqx_grads.solvers.AbstractFixedPointAdjoint`][]."""
        return _damped_steps(linear_map, b, self.k + 1, 1.0)


class PhantomAdjoint(AbstractFixedPointAdjoint):
    r"""Some damped steps of the iteration for the tangent, or the cotangent.

    The phantom gradient of [Geng et al., 2021](https://arxiv.org/abs/2111.05177), in the form
    of a Neumann series. At a fixed point, it is the gradient of `k` steps
    $y \leftarrow (1 - \tau)\,y + \tau f(y, \theta)$ that start there.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        from eqx_grads import solvers

        halfway = lambda y, x: 0.5 * y + x  # the fixed point is 2x
        backward = solvers.PhantomAdjoint(2, tau=0.5)
        solve = lambda x: eqg.fixed_point(halfway, 0.0, x, backward=backward).value
        print(jax.grad(solve)(3.0))  # 0.5 * (1 + 0.75), of 2
        ```

        ```text
        0.875
        ```

    **Arguments:**

    - `k`: how many steps, a positive integer.
    - `tau`: the damping $\tau$, above zero and at most one. With $\tau = 1$, the derivative
        equals [`eqx_grads.solvers.NeumannAdjoint`][] with `k - 1`.

    **Derivative:**

    An approximation, in both modes: with $B = \tau J + (1 - \tau) I$,
    $t = \tau \sum_{i=0}^{k-1} B^i b$, and in reverse mode
    $u = \tau \sum_{i=0}^{k-1} (B^T)^i g$, at the cost of $k - 1$ JVPs or
    VJPs of the function. The second derivative is that of this approximation, and approximates
    the second derivative of the fixed point.

    **Raises:**

    [`eqx_grads.RuleError`][] if `k` is not a positive integer, or if `tau` is not a number
    above zero and at most one.
    """

    k: int = eqx.field(static=True)
    tau: float = eqx.field(static=True)

    def __init__(self, k: Any = 5, tau: Any = 0.5):
        if not (is_number(tau) and 0 < tau <= 1):
            do = "Give a number above zero that is at most one."
            raise bad_argument("PhantomAdjoint", "tau", "a damping", tau, do)
        self.k = as_count("PhantomAdjoint", "k", k)
        self.tau = float(tau)

    def solve_tangent(self, linear_map: Map, b: PyTree, tags: Tags = frozenset()) -> PyTree:
        """As for [`eqx_grads.solvers.AbstractFixedPointAdjoint`][]."""
        return _damped_steps(linear_map, b, self.k, self.tau)


def _damped_steps(linear_map, b, steps, tau):
    """`t` after `steps` steps t <- t + tau (b + (J - I) t) from zero; the first gives tau b."""
    scaled = jax.tree.map(lambda b: tau * b, b)

    def step(t, _):
        change = linear_map(t)
        return jax.tree.map(lambda t, dt, b: t + tau * dt + b, t, change, scaled), None

    t, _ = jax.lax.scan(step, scaled, None, length=steps - 1)
    return t


class FixedPointAdjoint(AbstractFixedPointAdjoint):
    r"""Iterate the linear equation of the tangent, or of the cotangent, to convergence.

    It costs about as many VJPs as the iteration has steps, and the memory of one VJP.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        halfway = lambda y, x: 0.5 * y + x  # the fixed point is 2x
        solve = lambda x: eqg.fixed_point(halfway, 0.0, x, backward="fixed_point").value
        print(f"{jax.grad(solve)(3.0):.3f}")
        ```

        ```text
        2.000
        ```

    **Arguments:**

    - `solver`: an Optimistix solver for fixed points, which is applied to $u = J^T u + g$ with
        $g$ divided by its largest entry. By default, the plain iteration, which stops at a
        relative change of eps^(3/4): 6e-6 in single precision.
    - `max_steps`: the largest number of steps.
    - `throw`: whether an iteration that does not converge is an error. Otherwise the derivative
        is the last iterate.

    The number of steps and the residual of a backward pass are not available: it returns
    cotangents, and nothing else. `throw` says if it failed.

    **Derivative:**

    $t = J t + b$ in forward mode, $u = J^T u + g$ in reverse mode. Both modes and all orders,
    each by its own iteration. The plain iteration converges where all eigenvalues of
    $J$ are below one in modulus. There, the plain iteration for the fixed point converges from
    all starts nearby.

    **Raises:**

    A run-time error where `throw` is true and the iteration does not converge.
    """

    solver: Any = None
    max_steps: int | None = 256
    throw: bool = True

    def __check_init__(self):
        if self.solver is not None:
            check_solver(self.solver, "FixedPointAdjoint")
        if self.max_steps is not None:
            as_count("FixedPointAdjoint", "max_steps", self.max_steps)
        check_flags("FixedPointAdjoint", throw=self.throw)

    def solve_tangent(self, linear_map: Map, b: PyTree, tags: Tags = frozenset()) -> PyTree:
        """As for [`eqx_grads.solvers.AbstractFixedPointAdjoint`][]."""
        matvec = lambda t: jax.tree.map(jnp.negative, linear_map(t))  # I - J
        solve = ft.partial(_iterate, self, self.solver or plain_iteration(b))
        # JAX transposes the solve if all of `b` is perturbed, as a single vector is.
        view = RealView(b, working_dtype(b))
        of_vector = lambda v: view.to_vector(matvec(view.from_vector(v)))
        b = view.to_vector(b)
        return view.from_vector(jax.lax.custom_linear_solve(of_vector, b, solve, solve))


def _iterate(adjoint, solver, matvec, b):
    """Solve `matvec(t) = b` by t <- t + b - matvec(t)."""
    # An absolute tolerance would accept zero for a small cotangent, so its norm is made one.
    norm = optx.max_norm(b)
    scale = jnp.where(norm > 0, norm, jnp.ones_like(norm))
    unit = b / scale
    step = lambda t, _: t + (unit - matvec(t))
    how = {"max_steps": adjoint.max_steps, "adjoint": WithoutDerivative(_while_loop)}
    solution = optx.fixed_point(step, solver, unit, throw=False, **how)
    t = solution.value * scale
    if adjoint.throw:
        t = branched_error_if(t, solution.result != optx.RESULTS.successful, 0, [_DIVERGED])
    return t


_DIVERGED = (
    "The derivative of a fixed point did not converge: `FixedPointAdjoint` was still iterating "
    "after `max_steps`, or became infinite.\n"
    "  The function is not a contraction at its fixed point, or a slow one.\n"
    "Use `eqx_grads.solvers.ImplicitAdjoint`, which is a linear solve, raise `max_steps`, or "
    "give a `solver` such as `eqx_grads.solvers.Anderson`."
)


class ImplicitAdjoint(AbstractFixedPointAdjoint):
    r"""Solve the linear equation of the tangent, or of the cotangent, by `lineax`.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp
        import lineax as lx
        from eqx_grads import solvers

        halfway = lambda y, x: 0.5 * y + x  # the fixed point is 2x
        backward = solvers.ImplicitAdjoint(lx.GMRES(rtol=1e-6, atol=1e-6))
        solve = lambda x: eqg.fixed_point(halfway, jnp.zeros(3), x, backward=backward).value
        print(jnp.diag(jax.jacobian(solve)(jnp.ones(3))).round(3))
        ```

        ```text
        [2. 2. 2.]
        ```

    **Arguments:**

    - `linear_solver`: a `lineax` solver. By default, the `tags` of the fixed point choose it.
        Without tags, it is LU of the dense Jacobian for up to 256 unknowns. For more, it is
        GMRES, which only needs products with the Jacobian.

    **Derivative:**

    $t = (I - J)^{-1} b$ in forward mode, $u = (I - J)^{-T} g$ in reverse mode. Both modes and
    all orders. It exists where no eigenvalue of $J$ is one: $f$ need not be a contraction.

    **Raises:**

    A run-time error if the linear solve fails, for example where $I - J$ is singular.
    """

    linear_solver: Any = None

    def __check_init__(self):
        check_linear_solver(self.linear_solver, "linear_solver", "ImplicitAdjoint")

    def solve_tangent(self, linear_map: Map, b: PyTree, tags: Tags = frozenset()) -> PyTree:
        """As for [`eqx_grads.solvers.AbstractFixedPointAdjoint`][]."""
        options = {"solver": self.linear_solver, "tags": tags, "user": "ImplicitAdjoint"}
        solve = linear_solver(linear_map, b, b, **options)
        return solve(jax.tree.map(jnp.negative, b))


class WithoutDerivative(optx.AbstractAdjoint):
    """Runs a solver in this loop. Another adjoint around it has the derivative."""

    while_loop: Callable[..., Any]

    def apply(self, primal_fn: Any, rewrite_fn: Any, inputs: Any, tags: Any) -> Any:
        del rewrite_fn, tags
        return primal_fn((*inputs, self.while_loop))


_BACKWARD = {
    "implicit": ImplicitAdjoint,
    "fixed_point": FixedPointAdjoint,
    "neumann": NeumannAdjoint,
    "phantom": PhantomAdjoint,
    "one_step": OneStepAdjoint,
}


def as_adjoint(backward: Any) -> optx.AbstractAdjoint:
    """The adjoint that `backward` is, or is the name of."""
    if isinstance(backward, optx.AbstractAdjoint):
        return backward
    if not isinstance(backward, str) or backward not in _BACKWARD:
        do = f"Give one of {', '.join(map(repr, _BACKWARD))}, or an adjoint with its options, "
        do += "such as `eqx_grads.solvers.NeumannAdjoint(k=10)`."
        raise bad_argument("fixed_point", "backward", "known", backward, do)
    return _BACKWARD[backward]()
