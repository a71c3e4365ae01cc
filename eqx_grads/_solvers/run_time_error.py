"""Errors of compiled programs: `equinox.error_if`, also inside `jax.shard_map`."""

import dataclasses
import os
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
    """`x`, or the error `messages[index]` at run time if `is_error`.

    Inside a `shard_map` with `check_vma=True`, one branch of `eqx.branched_error_if` varies and
    the other does not, which JAX rejects (Equinox 0.13.8; no upstream issue was found). There,
    the callback is called each time, and looks at `is_error`. It is no collective: only some
    devices may reach it.
    """
    if not any(map(varying_axes, jax.tree.leaves((x, is_error)))):
        return eqx.branched_error_if(x, is_error, index, messages)
    if _ON_ERROR in ("nan", "off"):
        one = jnp.where(is_error & (_ON_ERROR == "nan"), jnp.nan, jnp.ones(()))
    else:
        index = jnp.where(is_error, index, -1)
        out, call = jax.ShapeDtypeStruct((), jnp.float32), _Raise(tuple(messages))
        one = jax.pure_callback(call, out, index, vmap_method="expand_dims")
    # The compiler would remove a callback whose result is not used.
    check = lambda x: x * one.astype(x.dtype) if eqx.is_inexact_array(x) else x
    return jax.tree.map(check, x)


# Equinox's setting, which it reads when it is imported, too.
_ON_ERROR = os.environ.get("EQX_ON_ERROR", "raise")


@dataclasses.dataclass(frozen=True)
class _Raise:
    messages: tuple[str, ...]

    def __call__(self, index):
        index = np.asarray(index)
        if np.any(index >= 0):
            raise RuntimeError(self.messages[int(np.max(index))])
        return np.ones(index.shape, np.float32)
