"""Errors of compiled programs: `equinox.error_if`, also inside `jax.shard_map`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._jaxprs.varying import varying_axes


def branched_error_if(
    x: PyTree, is_error: jax.Array, index: Any, messages: Sequence[str]
) -> PyTree:
    """`x`; raises `messages[index]` when it is computed if `is_error`.

    Where `shard_map` tracks what varies over the mesh, one branch of Equinox's own function
    varies and the other does not, which JAX rejects (Equinox 0.13.8; no upstream issue was
    found). There it is a callback, which looks at `is_error` each time.
    """
    if not any(map(varying_axes, jax.tree.leaves((x, is_error)))):
        return eqx.branched_error_if(x, is_error, index, messages)
    index = jnp.where(is_error, index, -1)
    zero = jax.pure_callback(
        _Raise(tuple(messages)),
        jax.ShapeDtypeStruct((), jnp.float32),
        index,
        vmap_method="expand_dims",
    )
    # The compiler removes a check of a value that nothing depends on.
    add_zero = lambda x: x + zero.astype(x.dtype) if eqx.is_inexact_array(x) else x
    return jax.tree.map(add_zero, x)


@dataclasses.dataclass(frozen=True)
class _Raise:
    messages: tuple[str, ...]

    def __call__(self, index):
        index = np.asarray(index)
        if np.any(index >= 0):
            raise RuntimeError(self.messages[int(np.max(index))])
        return np.zeros(index.shape, np.float32)
