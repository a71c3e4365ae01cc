"""Layers over a linear recurrence with a complex diagonal matrix."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Complex, Float

from ..._control_flow.linear_recurrence import METHODS
from ..._errors import check_option
from ..._rules.explicit_sharding import gathered
from ..._tangent_spaces import promote
from .._arguments import check_callable, check_real
from .._recurrent.layer import AbstractRecurrent
from .._recurrent.stack import make_cells, Stack
from .recurrence import matmul_f32, run_recurrence


class AbstractDiagonalCell(eqx.Module):
    """The parameters of $h_t = a\\,h_{t-1} + s\\,B\\,x_t$, $y_t = c\\,Re(C h_t) + D x_t$, with
    the complex vectors $a$ and $s$ and the number $c$ that `factors` returns."""

    # Real and imaginary parts are separate parameters. JAX's gradient of a complex parameter
    # has to be conjugated to be a direction of ascent, which optimizers do not do (by design:
    # https://github.com/jax-ml/jax/issues/9110).
    weight_in: eqx.AbstractVar[Float[Array, "2 state in"]]
    weight_out: eqx.AbstractVar[Float[Array, "2 out state"]]
    # A vector if there are as many outputs as inputs, and else a matrix.
    skip: eqx.AbstractVar[Float[Array, "..."]]
    input_size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def factors(self, dtype) -> tuple[Array, Array, float]:
        """`a`, `s` and `c`, computed in this real dtype."""

    def initial_state(self) -> Array:
        weight = self.weight_in
        return jnp.zeros(weight.shape[1], promote([weight, jnp.complex64]))


class AbstractDiagonal(AbstractRecurrent):
    """A recurrent layer of diagonal cells."""

    cells: tuple[tuple[Any, ...], ...]
    initial_parts: Float[Array, "2 ..."] | None
    stack: Stack
    activation: Callable[[Array], Array] | None
    method: eqx.AbstractVar[str]

    def _set(self, make, sizes, activation, method, dtype, key, options):
        """Set all fields, in `__init__`: see `make_cells`."""
        name = type(self).__name__
        check_option(name, "method", method, METHODS)
        check_callable(name, "activation", activation)
        self.cells, first, self.stack = make_cells(name, make, sizes, dtype, key, **options)
        if first is not None:
            dtype = self.cells[0][0].skip.dtype
            first = jnp.stack([jnp.real(first), jnp.imag(first)]).astype(dtype)
        self.initial_parts, self.activation, self.method = first, activation, method

    @property
    def initial_state(self) -> Complex[Array, "..."] | None:
        """The first state, if it is learned."""
        parts = self.initial_parts
        if parts is None:
            return None
        return jax.lax.complex(*parts.astype(promote([parts, jnp.float32])))

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_real(type(self).__name__, xs)
        dtype = promote([xs, cell.weight_in])
        wide = promote([dtype, jnp.float32, jnp.real(state)])
        a, scale, factor = cell.factors(wide)
        weight_in = gathered(cell.weight_in).reshape(-1, cell.input_size).astype(dtype)
        drive = matmul_f32(xs.astype(dtype), weight_in).astype(wide)
        drive = jax.lax.complex(*jnp.split(drive, 2, -1))
        hs, last = run_recurrence(
            a[None, None], scale[None, None] * drive, state, valid, reverse, self.method
        )
        real, imag = cell.weight_out.astype(wide)
        parts = jnp.concatenate([jnp.real(hs), jnp.imag(hs)], -1)
        ys = factor * matmul_f32(parts, jnp.concatenate([real, -imag], -1))
        x, skip = xs.astype(wide), cell.skip.astype(wide)
        ys = ys + (skip[None, None] * x if skip.ndim == 1 else matmul_f32(x, skip))
        ys = ys.astype(dtype)
        return ys if self.activation is None else self.activation(ys), last


def make_skip(key, input_size, output_size, dtype):
    """A standard normal vector, or a matrix that keeps the variance."""
    if input_size == output_size:
        return jr.normal(key, (output_size,), dtype)
    return jr.normal(key, (output_size, input_size), dtype) * input_size**-0.5
