"""Masks: `True` (all elements), `False` (none), an array, or `None` (not known)."""

import functools as ft
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._jaxprs.varying import cast_to


Mask: TypeAlias = Any  # `True`, `False`, an array of booleans, or `None`


def either(*masks: Mask) -> Mask:
    if any(mask is True for mask in masks):
        return True
    arrays = [mask for mask in masks if mask is not False]
    if any(mask is None for mask in arrays):
        return None
    return ft.reduce(operator.or_, arrays) if arrays else False


def both(a: Mask, b: Mask) -> Mask:
    if a is True or b is False:
        return b
    return a if b is True or a is False else a & b


def dense(mask: Mask, shape: Sequence[int]) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(mask), shape)


def of_type(t: Any, mask: Mask) -> jax.Array:
    """A mask as an array that has the shape of a type, and is on the devices as its values."""
    return cast_to(dense(mask, t.shape), t)
