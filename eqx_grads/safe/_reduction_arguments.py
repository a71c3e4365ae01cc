"""Arguments of the reductions: arrays that may be complex, axes and masks, or an error."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array

from .._errors import rule_error, type_of
from .._rules.float_args import as_axes, widen
from .._tangent_spaces import broadcasts_to, dtype_of_array, holds_numbers


Axis: TypeAlias = int | Sequence[int] | None


def as_inexact(name: str, x: Any, argument: str = "x") -> Array:
    """`x` as an array of floats or complex numbers; integers become floats, as in NumPy."""
    if not holds_numbers(x):
        raise rule_error(
            f"`safe.{name}` was given something that is not an array of numbers.",
            f"`{argument}` is {type_of(x)}",
            do="Pass an array of numbers.",
        )
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def axes_of(name: str, axis: Axis, x: Array, argument: str = "x") -> tuple[int, ...]:
    """The axes of `x` as a tuple of numbers from zero up; `None` is all of them."""
    return as_axes(f"safe.{name}", axis, x, argument)


def as_mask(name: str, where: Any, x: Array) -> Array:
    """`where` with the shape of the array."""
    if dtype_of_array(where) != jnp.bool_ or not broadcasts_to(jnp.shape(where), x.shape):
        raise rule_error(
            f"The `where` of `safe.{name}` has to be booleans that broadcast to the array.",
            f"the array is {type_of(x)}, `where` is {type_of(where)}",
            do="Pass `True` for each element to be included.",
        )
    return jnp.broadcast_to(jnp.asarray(where), x.shape)


def squeeze(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    """Without the axes that were reduced, unless they are to be kept."""
    return x if keepdims else jnp.squeeze(x, axes)


def in_single(x: Array) -> Array:
    """Half precision in single precision, in which sums and squares are taken."""
    return x if jnp.iscomplexobj(x) else widen(x)
