"""A layer whose output is a fixed point of a cell: a deep equilibrium model."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from .._errors import check_flags, check_function, name_of
from .._rules.float_args import as_count
from .._solvers.fixed_point import fixed_point
from .._tangent_spaces import promote


class FixedPoint(eqx.Module):
    r"""A layer whose output is the fixed point $z = \mathrm{cell}(x, z)$ of a cell.

    The deep equilibrium model of [Bai et al., 2019](https://arxiv.org/abs/1909.01377): a
    network of infinitely many layers that share their weights, in the memory of one layer.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        class Cell(eqx.Module):
            of_input: eqx.nn.Linear
            of_state: eqx.nn.Linear

            def __call__(self, x, z):
                return jnp.tanh(self.of_input(x) + self.of_state(z))

        key1, key2 = jax.random.split(jax.random.key(0))
        cell = Cell(eqx.nn.Linear(3, 8, key=key1), eqx.nn.Linear(8, 8, key=key2))
        layer = eqg.nn.FixedPoint(cell, 8, backward="fixed_point")
        xs = jnp.ones((5, 3))
        print(jax.vmap(layer)(xs).shape)

        grads = eqx.filter_grad(lambda layer: jnp.sum(jax.vmap(layer)(xs) ** 2))(layer)
        print(jnp.any(grads.cell.of_state.weight != 0))
        print(layer.solve(xs[0]).stats["num_steps"] < 50)
        ```

        ```text
        (5, 8)
        True
        True
        ```

    A cell is a contraction in `z` if its Jacobian in `z` has a norm of at most $L < 1$
    everywhere: for example, a `tanh` after a weight of spectral norm $L$. If training makes the
    cell lose this property, the solver may fail: see `throw`.

    **Derivative:**

    The derivative of [`eqx_grads.fixed_point`][] with the same `backward`, with respect to the
    cell and to `x`. The derivative with respect to `z0` is zero.
    """

    cell: Callable[..., Any]
    shape: tuple[int, ...] = eqx.field(static=True)
    solver: Any
    backward: Any
    max_steps: int | None = eqx.field(static=True)
    throw: bool = eqx.field(static=True)

    def __init__(
        self,
        cell: Callable[..., Any],
        shape: Any,
        *,
        solver: Any = None,
        backward: Any = "implicit",
        max_steps: int | None = 256,
        throw: Any = True,
    ):
        """**Arguments:**

        - `cell`: called as `cell(x, z)`, returns an array like the state `z`: a Module, which
            is trained with the layer, or a function.
        - `shape`: the shape of the state, or its size if it has one axis.
        - `solver`, `backward`, `max_steps`, `throw`: as for [`eqx_grads.fixed_point`][].

        **Raises:**

        [`eqx_grads.RuleError`][] if `shape` does not consist of positive integers.
        """
        check_function(cell, "cell", "FixedPoint")
        check_flags("FixedPoint", throw=throw)
        self.cell = cell
        sizes = shape if isinstance(shape, tuple) else (shape,)
        self.shape = tuple(as_count("FixedPoint", "shape", size) for size in sizes)
        self.solver = solver
        self.backward = backward
        self.max_steps = max_steps
        self.throw = bool(throw)

    def __call__(
        self, x: PyTree, z0: PyTree | None = None, *, key: PRNGKeyArray | None = None
    ) -> PyTree:
        """**Arguments:**

        - `x`: the input, any PyTree. It has no batch axis: use `jax.vmap`, under which each
            example has its own number of steps, or write a cell for batches.
        - `z0`: the state to start from, by default zeros in the common dtype of `x` and the
            cell. You may pass another PyTree of arrays, if the cell takes and returns such a
            tree.
        - `key`: ignored.

        **Returns:**

        The fixed point, like `z0`.

        **Raises:**

        As [`eqx_grads.fixed_point`][].
        """
        del key
        return self.solve(x, z0).value

    def solve(self, x: PyTree, z0: PyTree | None = None) -> Any:
        """Call the layer, and return more than the fixed point.

        **Arguments:**

        - `x`, `z0`: as for a call.

        **Returns:**

        The `optimistix.Solution` of [`eqx_grads.fixed_point`][]: the fixed point in `value`,
        the code in `result`, the number of steps and the norm of the residual in `stats`.
        """
        if z0 is None:
            leaves = list(filter(eqx.is_inexact_array, jax.tree.leaves((x, self.cell))))
            z0 = jnp.zeros(self.shape, promote(leaves) if leaves else None)
        return fixed_point(
            _OfState(self.cell),
            z0,
            x,
            solver=self.solver,
            backward=self.backward,
            max_steps=self.max_steps,
            throw=self.throw,
        )


class _OfState(eqx.Module):
    """The cell with its state first, under its own name."""

    cell: Callable[..., Any]

    @property
    def __name__(self):
        return name_of(self.cell)

    @property
    def __wrapped__(self):
        return self.cell

    def __call__(self, z, x):
        return self.cell(x, z)
