"""Gradients that are summed over chunks, and their inner product with tangents."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs.varying import vary_over, varying_axes
from .._tangent_spaces import sum_dtype


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
    """The tangent of a scalar; where there is no gradient, the tangent is zero.

    The products are not flattened, so that distributed arrays stay where they are.
    """
    products = [
        jnp.sum(gradient * t.astype(gradient.dtype))
        for gradient, t in zip(gradients, tangents, strict=True)
        if gradient is not None
    ]
    return sum(products[1:], products[0])
