"""Random formulas with derivatives written by hand, over leaves of any shapes and dtypes."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np


# The operators and functions of `jax.numpy` are traced as calls, which takes longer.
add, mul = jax.lax.add, jax.lax.mul


_slope_of_tanh = lambda out: jax.lax.sub(jnp.ones_like(out), mul(out, out))


# A function and its derivative.
UNARY = {
    "identity": (lambda x: x, ft.partial(jax.lax.full_like, fill_value=1)),
    "square": (lambda x: mul(x, x), lambda x: add(x, x)), "sin": (jax.lax.sin, jax.lax.cos),
    "tanh": (jax.lax.tanh, lambda x: _slope_of_tanh(jax.lax.tanh(x))),
}  # fmt: skip


@eqg.custom_jvp
def _sin(x):
    return jax.lax.sin(x)


@_sin.def_jvp
def _sin_jvp(primals, tangents):
    (x,), (t_x,) = primals, tangents
    return _sin(x), mul(jax.lax.cos(x), t_x)


@eqg.custom_vjp
def _tanh(x):
    return jax.lax.tanh(x)


@_tanh.def_fwd
def _tanh_fwd(x):
    out = _tanh(x)
    return out, out


@_tanh.def_bwd
def _tanh_bwd(out, ct):
    return (mul(ct, _slope_of_tanh(out)),)


_square = eqg.elementwise(lambda x: mul(x, x), lambda out, x: add(x, x))

# For rules that call functions with rules.
NESTED = {
    "identity": UNARY["identity"], "square": (_square, UNARY["square"][1]),
    "sin": (_sin, jax.lax.cos), "tanh": (_tanh, lambda x: _slope_of_tanh(_tanh(x))),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Term:
    """A coefficient times functions of leaves: `(index of the leaf, name of the function)`."""

    coefficient: float
    factors: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class Formula:
    """A sum of terms in a dtype and a shape to which its leaves broadcast, or the sum of all
    elements of that."""

    terms: tuple[Term, ...]
    dtype: str
    shape: tuple[int, ...]
    is_sum: bool = False

    def _fit(self, x: Any) -> Any:
        x = jnp.asarray(x)
        if jnp.iscomplexobj(x) and not self.dtype.startswith("complex"):
            x = jnp.real(x)
        return jnp.broadcast_to(x.astype(self.dtype), self.shape)

    def _products(self, leaves: Sequence[Any], unary: Any, index: int | None):
        """The terms, or their partial derivatives with respect to a leaf."""
        for term in self.terms:
            if index is not None and all(i != index for i, _ in term.factors):
                continue
            factors = [
                unary[name][i == index](self._fit(leaves[i])) for i, name in term.factors
            ]
            product = ft.reduce(mul, factors)
            yield mul(product, jax.lax.full_like(product, term.coefficient))

    def _sum(self, values: Any) -> Any:
        return ft.reduce(add, values)

    def value(self, leaves: Sequence[Any], unary: Any = UNARY) -> Any:
        out = self._sum(self._products(leaves, unary, None))
        return sum_of(out) if self.is_sum else out

    def partial(self, leaves: Sequence[Any], index: int, unary: Any = UNARY) -> Any:
        if not self.depends_on(index):
            return jnp.zeros(self.shape, self.dtype)
        return self._sum(self._products(leaves, unary, index))

    def depends_on(self, index: int) -> bool:
        return any(i == index for term in self.terms for i, _ in term.factors)

    def tangent(self, leaves: Any, tangents: Any, unary: Any = UNARY) -> Any:
        """`None` is a zero tangent, among the arguments and as the result."""
        live = [i for i, t in enumerate(tangents) if t is not None and self.depends_on(i)]
        if not live:
            return None
        out = self._sum(
            mul(self.partial(leaves, i, unary), self._fit(tangents[i])) for i in live
        )
        return sum_of(out) if self.is_sum else out

    def cotangent(self, leaves: Any, index: int, ct: Any, unary: Any = UNARY) -> Any:
        """The cotangent of a leaf, before the sum over axes along which it was broadcast."""
        if ct is None or not self.depends_on(index):
            return None
        return mul(self.partial(leaves, index, unary), jnp.broadcast_to(ct, self.shape))


def wide() -> Any:
    """The dtype in which sums are computed."""
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32


def sum_of(x: Any) -> Any:
    # Not `jnp.sum`, which computes sums of half precision in single precision.
    return jax.lax.reduce_sum(x, tuple(range(x.ndim)))


def total(values: Sequence[Any]) -> Any:
    """One number that depends on all elements of all arrays, each with another weight."""
    terms = []
    for k, x in enumerate(values):
        x = jnp.asarray(x)
        if jnp.iscomplexobj(x):
            x = add(jax.lax.real(x), jax.lax.imag(x))
        weights = 0.5 + 0.25 * k + 0.1 * np.arange(x.size).reshape(x.shape)
        x = jax.lax.convert_element_type(x, wide())
        terms.append(sum_of(mul(x, np.asarray(weights, x.dtype))))
    return ft.reduce(add, terms, jnp.zeros((), wide()))
