"""Layers whose state is a vector of complex numbers, each of which recurs by itself."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Complex, Float

from ..._tangent_spaces import promote
from .._recurrent.layer import AbstractRecurrent, stacked
from .gates import check_real, product, states


class AbstractDiagonalCell(eqx.Module):
    """The parameters of $h_t = a\\,h_{t-1} + s\\,B\\,x_t$, $y_t = c\\,Re(C h_t) + D x_t$, in
    which $a$ and $s$ are complex vectors that `factors` returns."""

    # Real and imaginary parts are parameters of their own, as an optimizer that follows the
    # gradient of a complex one goes the wrong way: in JAX it has to be conjugated.
    weight_in: eqx.AbstractVar[Float[Array, "2 state in"]]
    weight_out: eqx.AbstractVar[Float[Array, "2 out state"]]
    # A vector, if there are as many outputs as inputs.
    skip: eqx.AbstractVar[Float[Array, "..."]]
    input_size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def factors(self, dtype) -> tuple[Array, Array, float]:
        """`a`, `s` and `c`, computed in this real dtype."""


class AbstractDiagonal(AbstractRecurrent):
    """A layer of diagonal cells."""

    cells: eqx.AbstractVar[tuple[tuple[AbstractDiagonalCell, ...], ...]]
    initial_parts: eqx.AbstractVar[Float[Array, "2 ..."] | None]
    activation: eqx.AbstractVar[Callable[[Array], Array] | None]
    method: eqx.AbstractVar[str]

    @property
    def initial_state(self) -> Complex[Array, "..."] | None:
        """The first state, if it is learned."""
        parts = self.initial_parts
        if parts is None:
            return None
        return jax.lax.complex(*parts.astype(promote([parts, jnp.float32])))

    def _zero_state(self):
        weight = self.cells[0][0].weight_in
        return jnp.zeros(weight.shape[1], promote([weight, jnp.complex64]))

    def _run(self, cell, xs, state, valid, reverse):
        check_real(type(self).__name__, cell, xs)
        dtype = promote([xs, cell.weight_in])
        wide = promote([dtype, jnp.float32, jnp.real(state)])
        a, scale, factor = cell.factors(wide)
        weight_in = cell.weight_in.reshape(-1, cell.input_size).astype(dtype)
        drive = product(xs.astype(dtype), weight_in).astype(wide)
        drive = jax.lax.complex(*jnp.split(drive, 2, -1))
        hs, last = states(
            a[None, None], scale[None, None] * drive, state, valid, reverse, self.method
        )
        real, imag = cell.weight_out.astype(wide)
        parts = jnp.concatenate([jnp.real(hs), jnp.imag(hs)], -1)
        ys = factor * product(parts, jnp.concatenate([real, -imag], -1))
        x, skip = xs.astype(wide), cell.skip.astype(wide)
        ys = ys + (skip[None, None] * x if skip.ndim == 1 else product(x, skip))
        ys = ys.astype(dtype)
        return ys if self.activation is None else self.activation(ys), last


def make_skip(key, input_size, output_size, dtype):
    """A standard normal vector, or a matrix that keeps the variance."""
    if input_size == output_size:
        return jr.normal(key, (output_size,), dtype)
    return jr.normal(key, (output_size, input_size), dtype) * input_size**-0.5


def learned_state(cells, dtype) -> Float[Array, "2 ..."]:
    """Real and imaginary parts of the first state of all cells."""
    size = cells[0][0].weight_in.shape[1]
    zero = stacked(jnp.zeros(size, dtype), len(cells) * len(cells[0]))
    return jnp.stack([zero, zero])
