"""`fixed_point`: the solution of y = f(y), and its derivative by choice."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._errors import (
    bad_argument,
    check_flags,
    check_function,
    name_of,
    optional_import,
    pair_of,
    place_of,
    rule_error,
    show_path,
    show_tree,
    type_of,
    unlike,
)
from .._jaxprs.varying import cast_carry
from .._rules.float_args import as_count
from .._tangent_spaces import dtype_of_array
from .._trees import mirror, mirrored, unmirror
from .linear_solve import as_tags
from .run_time_error import branched_error_if
from .solution_tangent import constant


def fixed_point(
    fn: Callable[..., Any],
    y0: PyTree,
    *args: Any,
    solver: Any = None,
    backward: Any = "implicit",
    max_steps: int | None = 256,
    throw: bool = True,
    has_aux: bool = False,
    options: dict[str, Any] | None = None,
    tags: object | Collection[object] = (),
) -> Any:
    r"""Find the fixed point $y = f(y, \theta)$ of a function, by any solver of Optimistix.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def cosine(y, x):
            return jnp.cos(y) * x

        solution = eqg.fixed_point(cosine, 1.0, 0.9)
        y, dy = solution.value, jax.grad(lambda x: eqg.fixed_point(cosine, 1.0, x).value)(0.9)
        print(f"{y:.3f}, with the slope {dy:.3f}")
        print(solution.stats["residual_norm"] < 1e-5)
        ```

        ```text
        0.693, with the slope 0.489
        True
        ```

    **Arguments:**

    - `fn`: a function, or a Module. Called as `fn(y, *args)`, returns a PyTree with the
        structure, shapes and dtypes of `y`. The arrays of a Module are differentiated as `args`
        are, and so are traced values that `fn` closes over.
    - `y0`: where the solver starts, a PyTree of floating arrays. It does not change the fixed
        point, so its gradient is zero.
    - `args`: any PyTrees.
    - `solver`: an Optimistix solver, for fixed points, roots (of $f(y) - y$), least squares or
        minima, such as `optimistix.Newton(rtol=1e-5, atol=1e-5)`, or
        [`eqx_grads.solvers.Anderson`][]. By default `optimistix.FixedPointIteration`, the plain
        iteration. It stops at a change, absolute or relative, of eps^(3/4) of the coarsest
        dtype in `y0`: 6e-6 in single, 2e-12 in double precision.
    - `backward`: how the linear equation of the derivative is solved. A name from the table
        below, or any adjoint of
        [`eqx_grads.solvers`][eqx_grads.solvers.AbstractFixedPointAdjoint] or Optimistix.
        `optimistix.RecursiveCheckpointAdjoint()` differentiates the steps of the solver.
    - `max_steps`: the largest number of steps of the solver; `None` for no bound.
    - `throw`: whether a solver that fails is a run-time error. Otherwise, the last iterate is
        returned, with the failure in `result`.
    - `has_aux`: whether `fn` returns a pair `y, aux`, where `aux` is any other PyTree.
    - `options`: for the solver.
    - `tags`: the `lineax` tag or tags of the Jacobian of $f(y) - y$, such as
        `lineax.negative_semidefinite_tag`, for the linear solve of `"implicit"`.

    | `backward` | derivative | reverse mode: one VJP in $\theta$, and |
    |---|---|---|
    | `"implicit"` | exact, `ImplicitAdjoint()` | a linear solve |
    | `"fixed_point"` | exact, `FixedPointAdjoint()` | a VJP for each step of an iteration |
    | `"neumann"` | approximate, `NeumannAdjoint(k=5)` | $k$ VJPs |
    | `"phantom"` | approximate, `PhantomAdjoint(k=5, tau=0.5)` | $k - 1$ VJPs |
    | `"one_step"` | approximate, `OneStepAdjoint()` | nothing |

    **Returns:**

    An `optimistix.Solution`:

    - `value`: the fixed point, like `y0`.
    - `result`: a code, `optimistix.RESULTS.successful` or what went wrong.
    - `aux`: the second output of `fn` at the fixed point, or `None`. It is differentiable.
    - `stats`: a dictionary with `"num_steps"`, `"max_steps"`, `"residual_norm"`, the largest
        entry of $|f(y) - y|$, and what the solver adds. Not differentiated.
    - `state`: `None`.

    The number of steps of the backward pass is not in `stats`: it is not known when this
    function returns. A backward pass that fails is an error.

    A call is compiled, once for each `fn` as by `equinox.filter_jit`: outside of a `jit`, do
    not make a new function for each call.

    **Derivative:**

    With $J = \partial f/\partial y$ and $b = \partial f/\partial\theta\,t_\theta$ at the
    fixed point, $t_y = (I - J)^{-1} b$; in reverse mode, $\bar\theta = (\partial
    f/\partial\theta)^T u$ with $u = (I - J)^{-T} g$. Both modes and all orders. With
    `"implicit"` and `"fixed_point"`, exact up to the tolerances of the solvers. The others
    replace $(I - J)^{-1}$ by the approximation that their adjoint documents, in both modes and
    at all orders. The steps of the solver are never differentiated, so the memory does not
    depend on their number.

    **Raises:**

    [`eqx_grads.RuleError`][] if `fn` returns a structure, shape or dtype other than `y` has, if
    a leaf of `y0` is not floating, or if `max_steps` is not positive. Also if `backward` or
    `solver` is neither known nor of Optimistix. A `ModuleNotFoundError` if Optimistix is not
    installed. A run-time error (see `equinox.error_if`) if `throw` is true and the solver
    fails, for example because the plain iteration diverges.
    """
    optional_import("optimistix", "fixed_point")
    from . import adjoints

    check_function(fn, "fn", "fixed_point")
    if max_steps is not None:
        as_count("fixed_point", "max_steps", max_steps)
    y0 = _as_arrays(fn, y0)
    if solver is None:
        solver = adjoints.plain_iteration(y0)
    adjoints.check_solver(solver, "fixed_point")
    adjoint = adjoints.as_adjoint(backward)
    check_flags("fixed_point", throw=throw, has_aux=has_aux)
    if not isinstance(options, dict | None):
        do = "Give the options of the solver, or `None`."
        raise bad_argument("fixed_point", "options", "a dictionary", options, do)
    tags = as_tags(tags, "fixed_point")
    # Equinox and Optimistix map bools and types over trees.
    y0, args = mirrored(y0), mirrored(args)
    step = _Step(fn, has_aux)
    solution = _solve(step, y0, args, solver, adjoint, max_steps, throw, options, tags)
    value, aux = unmirror((solution.value, solution.aux))
    return dataclasses.replace(solution, value=value, aux=aux)


@eqx.filter_jit
def _solve(step, y0, args, solver, adjoint, max_steps, throw, options, tags):
    import optimistix as optx

    # Inside `shard_map`, the start varies over the mesh as the iterates do.
    start, treedef = jax.tree.flatten(y0)
    next_y = lambda ys: step(treedef.unflatten(ys), args)[0]
    y0 = treedef.unflatten(cast_carry(lambda ys: jax.make_jaxpr(next_y)(ys).out_avals, start))
    # Traced once, here, and the tracers that it closes over become leaves of the result.
    converted = eqx.filter_closure_convert(step, y0, args)
    inputs = (converted, solver, y0, args, options, max_steps)
    value, (result, stats) = adjoint.apply(_run, _residual, inputs, tags)
    if step.has_aux:
        out, aux = converted(value, args)
    else:
        out, aux = constant(converted)(constant(value), constant(args))
    residual = jax.tree.map(jnp.subtract, constant(out), constant(value))
    norm = optx.max_norm(residual)
    stats = {**stats, "max_steps": max_steps, "residual_norm": norm}
    if throw:
        value = _raise_if_failed(step.fn, value, result)
    return optx.Solution(value=value, result=result, aux=aux, stats=stats, state=None)


def _run(inputs):
    """Run the solver in the loop that the adjoint appended to the inputs."""
    import optimistix as optx

    from .adjoints import WithoutDerivative

    fn, solver, y0, args, options, max_steps, while_loop = inputs
    # Without the auxiliary output, which Optimistix would compute in each step, and which would
    # have to be arrays.
    how = {"max_steps": max_steps, "adjoint": WithoutDerivative(while_loop), "throw": False}
    first = lambda y, args: fn(y, args)[0]
    solution = optx.fixed_point(first, solver, y0, args, options, **how)
    stats = {name: x for name, x in solution.stats.items() if name != "max_steps"}
    return solution.value, (solution.result, stats)


def _residual(y, _, inputs):
    """The equation that is differentiated, for every solver."""
    fn, _, _, args, *_ = inputs
    return jax.tree.map(jnp.subtract, fn(y, args)[0], y)


class _Step(eqx.Module):
    """`fn` as Optimistix calls it, of mirrors, with a check of what it returns."""

    fn: Callable[..., Any]
    has_aux: bool

    def __call__(self, y, args):
        y, args = unmirror(y), unmirror(args)
        name = name_of(self.fn)
        try:
            out, aux = self.fn(y, *args), None
        except Exception as error:
            given = f"`y` first, and then with the {len(args)} arguments after `y0`."
            error.add_note(f"`{name}` is called with {given}")
            raise
        if self.has_aux:
            do = "Return `y, aux`, as `has_aux=True` says, or leave it out."
            out, aux = pair_of(out, f"`{name}`", place_of(self.fn), do)
        kind = lambda x: (jnp.shape(x), jnp.result_type(x))
        where = unlike(y, out, "y", "it was given {}, and returned {}", kind)
        if where:
            raise rule_error(
                f"`{name}` returned something other than it was given: it has no fixed point.",
                *where,
                place_of(self.fn),
                do="Return a PyTree with the structure of `y`, the first argument. Give `y0` "
                "the shape and the dtype of what the function returns, or reshape and cast it.",
            )
        return mirror(jnp.asarray, out), mirrored(aux)


def _as_arrays(fn, y0):
    """The start as arrays without weak types, which a fixed point does not have."""
    leaves = jax.tree_util.tree_leaves_with_path(y0)
    is_floating = lambda x: jnp.issubdtype(dtype_of_array(x) or np.dtype(int), jnp.inexact)
    bad = [f"y0{show_path(p)} is {type_of(x)}" for p, x in leaves if not is_floating(x)]
    if bad or not leaves:
        what = "a start that is not floating" if bad else "a start without arrays"
        raise rule_error(
            f"`fixed_point` of `{name_of(fn)}` was given {what}.",
            bad[0] if bad else f"`y0` is {show_tree(y0)}",
            do="Give floating-point arrays or numbers, such as `0.0`. Values that are not "
            "iterated belong to the arguments after `y0`.",
        )
    strong = lambda x: jax.lax.convert_element_type(x, x.dtype)
    return jax.tree.map(lambda x: strong(jnp.asarray(x)), y0)


def _raise_if_failed(fn, value, result):
    import optimistix as optx

    codes = optx.RESULTS
    do = (
        f"\n  {place_of(fn)}\nThe function may not be a contraction: give a solver that does "
        "not need one, such as `eqx_grads.solvers.Anderson(rtol=1e-5, atol=1e-5)` or "
        "`optimistix.Newton(rtol=1e-5, atol=1e-5)`"
    )
    messages = [
        f"The fixed point of `{name_of(fn)}` was not found: {why}; or read `result` with "
        "`throw=False`."
        for why in (
            f"the solver took `max_steps` steps.{do}, or raise `max_steps`",
            f"the iterates became infinite or NaN.{do}",
            f"the solver failed.{do}",
        )
    ]
    # For a batch, the message with the largest index is shown.
    in_time = (result == codes.successful) | (result == codes.nonlinear_max_steps_reached)
    index = jnp.where(in_time, 0, jnp.where(result == codes.nonfinite, 1, 2))
    return branched_error_if(value, result != codes.successful, index, messages)
