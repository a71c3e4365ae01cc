"""Anderson acceleration as a solver of Optimistix, which lacks it (0.1.0)."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Int, PyTree

from .._errors import check_function
from .._rules.float_args import as_count, check_nonnegative_number
from .._tangent_spaces import promote
from .optimistix import optimistix as optx


class _State(eqx.Module):
    """The last step, and differences between consecutive steps; the oldest difference is
    overwritten."""

    step: Int[Array, ""]
    f: PyTree[Array]  # the value of the function
    g: PyTree[Array]  # the value minus the argument
    delta_f: PyTree[Array]  # with an axis of `history` in front
    delta_g: PyTree[Array]
    relative_error: Float[Array, ""]


class Anderson(optx.AbstractFixedPointSolver):
    r"""Anderson acceleration of a fixed-point iteration, as a solver of Optimistix.

    Each step takes a combination of the last steps, with weights that sum to one: the
    combination with the smallest linearized residual $g(y) = f(y) - y$. It needs one evaluation
    of the function for a step, and few steps even where the plain iteration contracts slowly,
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
        zeros = jax.tree.map(jnp.zeros_like, y)
        history = jax.tree.map(lambda y: jnp.zeros((self.history, *y.shape), y.dtype), y)
        return _State(jnp.array(0), zeros, zeros, history, history, jnp.array(jnp.inf))

    def step(self, fn, y, args, options, state, tags):
        """As for `optimistix.AbstractIterativeSolver`."""
        f, aux = fn(y, args)
        g = jax.tree.map(jnp.subtract, f, y)
        delta_f = _push(state.delta_f, f, state.f, state.step)
        delta_g = _push(state.delta_g, g, state.g, state.step)
        gamma = _least_squares(delta_g, g, self.ridge)
        best_f = _minus_combination(f, delta_f, gamma)
        best_g = _minus_combination(g, delta_g, gamma)
        new_y = jax.tree.map(lambda f, g: f - (1 - self.mixing) * g, best_f, best_g)
        scaled = jax.tree.map(lambda f, g: g / (self.atol + self.rtol * jnp.abs(f)), f, g)
        error = self.norm(scaled).astype(state.relative_error.dtype)
        # At the end, the differences are as small as their rounding errors.
        new_y = jax.tree.map(lambda f, new: jnp.where(error < 1, f, new), f, new_y)
        return new_y, _State(state.step + 1, f, g, delta_f, delta_g, error), aux

    def terminate(self, fn, y, args, options, state, tags):
        """As for `optimistix.AbstractIterativeSolver`."""
        return state.relative_error < 1, optx.RESULTS.successful

    def postprocess(self, fn, y, aux, args, options, state, tags, result):
        """As for `optimistix.AbstractIterativeSolver`."""
        return y, aux, {}


def _push(history, new, old, step):
    """Replace the oldest difference by the newest, if there is a step before this one."""

    def leaf(history, new, old):
        delta = jnp.where(step > 0, new - old, jnp.zeros_like(new))
        # In the first step, zeros are written where the second step writes.
        return history.at[jnp.maximum(step - 1, 0) % len(history)].set(delta)

    return jax.tree.map(leaf, history, new, old)


def _inner(xs, ys):
    """Inner products over all leaves of two stacks: real, and in single precision at least."""

    def leaf(xs, ys):
        dtype = promote([xs, jnp.zeros((), jnp.float32)])
        xs, ys = (z.reshape(len(z), -1).astype(dtype) for z in (xs, ys))
        return jnp.real(xs.conj() @ ys.T)

    return jax.tree.reduce(jnp.add, jax.tree.map(leaf, xs, ys))


def _least_squares(columns, target, ridge):
    """The coefficients of the combination of columns that is nearest to the target."""
    gram = _inner(columns, columns)
    right = _inner(columns, jax.tree.map(lambda x: x[None], target))[:, 0]
    squares = jnp.diagonal(gram)
    scale = jnp.where(squares > 0, jax.lax.rsqrt(squares), 0)  # no difference there, so far
    gram = gram * scale[:, None] * scale[None] + ridge * jnp.eye(len(gram), dtype=gram.dtype)
    operator = lx.MatrixLinearOperator(gram, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, right * scale, lx.Cholesky(), throw=False).value * scale


def _minus_combination(x, columns, coefficients):
    combine = lambda c: jnp.tensordot(coefficients.astype(c.dtype), c, axes=1)
    return jax.tree.map(lambda x, c: x - combine(c), x, columns)
