"""Errors of compiled programs: `equinox.error_if`, also inside `jax.shard_map`."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._jaxprs.varying import vary_over, varying_axes


def branched_error_if(
    x: PyTree, is_error: jax.Array, index: Any, messages: Sequence[str]
) -> PyTree:
    """`x`, or the error `messages[index]` at run time if `is_error`.

    Inside a `shard_map` with `check_vma=True`, one branch of `eqx.branched_error_if` varies and
    the other does not, which JAX rejects (Equinox 0.13.8; no upstream issue was found). There,
    the devices agree on the error, and `x` is multiplied by a one that does not vary.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((x, is_error))))
    if not axes:
        return eqx.branched_error_if(x, is_error, index, messages)
    index = jax.lax.pmax(vary_over(jnp.where(is_error, index, -1), axes), tuple(axes))
    one = jnp.ones((), jnp.float32)
    one = eqx.branched_error_if(one, index >= 0, jnp.maximum(index, 0), messages)
    scaled = lambda x: x * one.astype(x.dtype) if eqx.is_inexact_array(x) else x
    return jax.tree.map(scaled, x)
