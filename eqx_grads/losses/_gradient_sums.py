"""Gradients that are summed over chunks, and their inner product with tangents."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs.varying import vary_over, varying_axes
from .._tangent_spaces import promote, sum_dtype


def zero_sum(shape: Sequence[int], dtype: Any, args: Any) -> jax.Array:
    """The sum over no chunks, in single precision for a half.

    Under `shard_map` it varies over all axes over which one of `args` does, as the sum over
    some chunks will.
    """
    axes = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves(args)))
    return vary_over(jnp.zeros(shape, sum_dtype(dtype)), axes)


def add(sums: Any, terms: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, terms)


def inner_product(gradients: Iterable[Any], tangents: Iterable[Any]) -> jax.Array:
    """The tangent of a scalar; an input without a gradient adds zero.

    The products are not flattened, so that distributed arrays stay where they are.
    """
    pairs = [(g, t) for g, t in zip(gradients, tangents, strict=True) if g is not None]
    # In one dtype: sums over chunks of half precision are in single precision, and the
    # gradients of what is split are not. And real, as the loss is.
    dtype = promote([sum_dtype(g.dtype) for g, _ in pairs])
    products = [jnp.sum(g.astype(dtype) * t.astype(dtype)) for g, t in pairs]
    return jnp.real(sum(products[1:], products[0]))
