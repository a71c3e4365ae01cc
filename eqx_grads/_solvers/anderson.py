"""Anderson acceleration as a solver of Optimistix, which lacks it (0.1.0)."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree

from .._errors import check_function
from .._rules.float_args import as_count, check_nonnegative_number
from .._tangent_spaces import promote
from .optimistix import optimistix as optx


class _State(eqx.Module):
    """The last step, and differences between consecutive steps; the oldest difference is
    overwritten."""

    step: Int[Array, ""]
    f: Array  # the value of the function, as a vector
    g: Array  # the value minus the argument
    delta_f: Array  # with an axis of `history` in front
    delta_g: Array
    relative_error: Float[Array, ""]


class Anderson(optx.AbstractFixedPointSolver):
    r"""Anderson acceleration of a fixed-point iteration, as a solver of Optimistix.

    Each step takes a combination of the last steps, with weights that sum to one: the
    combination with the smallest linearized residual $g(y) = f(y) - y$. It evaluates the
    function once per step. It needs few steps even where the plain iteration contracts slowly,
    or diverges in a few directions. This is type II of [Walker and Ni,
    2011](https://doi.org/10.1137/10078356X).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp
        import optimistix as optx
        from eqx_grads import solvers

        def diffuse(y, x):  # between neighbors on a ring, with a source
            return 0.49 * (jnp.roll(y, 1) + jnp.roll(y, -1)) + x

        source = jnp.zeros(16).at[0].set(1.0)
        for solver in (optx.FixedPointIteration(1e-5, 1e-5), solvers.Anderson(1e-5, 1e-5)):
            y = eqg.fixed_point(diffuse, jnp.zeros(16), source, solver=solver, max_steps=1000)
            print(y.stats["num_steps"] // 20 * 20)
        ```

        ```text
        400
        60
        ```

    **Arguments:**

    - `rtol`, `atol`: the iteration ends where $|f(y) - y|$ is less than `atol + rtol |f(y)|`.
    - `norm`: the norm of a PyTree, for this comparison.
    - `history`: how many differences of steps are kept, each as large as `y`.
    - `mixing`: the damping $\beta$ of the residual, in $y + \beta g(y)$; with $\beta = 1$, the
        residual is not damped.
    - `ridge`: added to the diagonal of the normal equations, whose columns are normalized.

    One least-squares problem is solved for the whole of `y`. Use `jax.vmap` for a batch of
    fixed points that do not depend on each other.

    **Raises:**

    [`eqx_grads.RuleError`][] if `history` is not a positive integer.
    """

    rtol: float
    atol: float
    norm: Callable[[PyTree], Array] = optx.max_norm
    history: Any = eqx.field(default=5, static=True)
    mixing: float = 1.0
    ridge: float = 1e-5

    def __check_init__(self):
        check_nonnegative_number(
            "Anderson", rtol=self.rtol, atol=self.atol, mixing=self.mixing, ridge=self.ridge
        )
        check_function(self.norm, "norm", "Anderson")
        as_count("Anderson", "history", self.history)

    def init(self, fn, y, args, options, f_struct, aux_struct, tags):
        """As for `optimistix.AbstractIterativeSolver`."""
        zeros = jnp.zeros_like(ravel_pytree(y)[0])
        history = jnp.zeros((self.history, zeros.size), zeros.dtype)
        return _State(jnp.array(0), zeros, zeros, history, history, jnp.array(jnp.inf))

    def step(self, fn, y, args, options, state, tags):
        """As for `optimistix.AbstractIterativeSolver`."""
        value, aux = fn(y, args)
        f, unravel = ravel_pytree(value)
        g = f - ravel_pytree(y)[0]
        delta_f = _push(state.delta_f, f - state.f, state.step)
        delta_g = _push(state.delta_g, g - state.g, state.step)
        gamma = _least_squares(delta_g, g, self.ridge).astype(f.dtype)
        best_f, best_g = f - gamma @ delta_f, g - gamma @ delta_g
        scaled = g / (self.atol + self.rtol * jnp.abs(f))
        error = self.norm(unravel(scaled)).astype(state.relative_error.dtype)
        # At the end, the differences are as small as their rounding errors.
        new_y = jnp.where(error < 1, f, best_f - (1 - self.mixing) * best_g)
        return unravel(new_y), _State(state.step + 1, f, g, delta_f, delta_g, error), aux

    def terminate(self, fn, y, args, options, state, tags):
        """As for `optimistix.AbstractIterativeSolver`."""
        return state.relative_error < 1, optx.RESULTS.successful

    def postprocess(self, fn, y, aux, args, options, state, tags, result):
        """As for `optimistix.AbstractIterativeSolver`."""
        return y, aux, {}


def _push(history, delta, step):
    """Replace the oldest difference by the newest, if there is a step before this one."""
    delta = jnp.where(step > 0, delta, jnp.zeros_like(delta))
    return history.at[step % len(history)].set(delta)


def _least_squares(columns, target, ridge):
    """The coefficients of the combination of columns that is nearest to the target. Inner
    products are real, and in single precision at least."""
    dtype = promote([columns, jnp.zeros((), jnp.float32)])
    columns, target = columns.astype(dtype), target.astype(dtype)
    gram, right = jnp.real(columns.conj() @ columns.T), jnp.real(columns.conj() @ target)
    squares = jnp.diagonal(gram)
    scale = jnp.where(squares > 0, jax.lax.rsqrt(squares), 0)  # no difference there, so far
    gram = gram * scale[:, None] * scale[None] + ridge * jnp.eye(len(gram), dtype=gram.dtype)
    operator = lx.MatrixLinearOperator(gram, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, right * scale, lx.Cholesky(), throw=False).value * scale
