"""Errors of compiled programs: `equinox.error_if`, also inside `jax.shard_map`."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import PyTree

from .._errors import rule_error
from .._jaxprs.varying import varying_axes


def branched_error_if(
    x: PyTree, is_error: jax.Array, index: Any, messages: Sequence[str]
) -> PyTree:
    """`x`, or the error `messages[index]` at run time if `is_error`.

    The error is raised by a callback, which `jax.export` refuses: that is an error here, with
    what to do. Inside a `shard_map` with `check_vma=True`, one branch of
    `eqx.branched_error_if` varies and the other does not, which JAX rejects (Equinox 0.13.8; no
    upstream issue was found). There, the callback is called each time, and looks at `is_error`.
    """
    if isinstance(is_error, Tracer):
        is_error = _not_exported_p.bind(is_error, message=messages[0])
    if not any(map(varying_axes, jax.tree.leaves((x, is_error)))):
        return eqx.branched_error_if(x, is_error, index, messages)
    if _raises():
        index = jnp.where(is_error, index, -1)
        out, call = jax.ShapeDtypeStruct((), jnp.float32), _Raise(tuple(messages))
        one = jax.pure_callback(call, out, index, vmap_method="expand_dims")
    else:
        one = jnp.where(is_error & (_ON_ERROR == "nan"), jnp.nan, jnp.ones(()))
    # The compiler would remove a callback whose result is not used.
    check = lambda x: x * one.astype(x.dtype) if eqx.is_inexact_array(x) else x
    return jax.tree.map(check, x)


# Equinox's setting, which it reads when it is imported, too.
_ON_ERROR = os.environ.get("EQX_ON_ERROR", "raise")


def _raises() -> bool:
    return _ON_ERROR not in ("nan", "off")


@dataclasses.dataclass(frozen=True)
class _Raise:
    messages: tuple[str, ...]

    def __call__(self, index):
        index = np.asarray(index)
        if np.any(index >= 0):
            raise RuntimeError(self.messages[int(np.max(index))])
        return np.ones(index.shape, np.float32)


# The identity. JAX knows that a program is exported when it lowers the program, and only then.
_not_exported_p = Primitive("eqg_not_exported")


def _lower(ctx, x, *, message):
    if ctx.module_context.lowering_parameters.for_export and _raises():
        raise rule_error(
            "A check at run time can't be exported: it calls Python, to raise an error.",
            f"the error begins with: {message.splitlines()[0]}",
            do="Set the environment variable `EQX_ON_ERROR=nan` before Python starts. A check "
            "that fails then returns NaN, and calls nothing.",
        )
    return [x]


_not_exported_p.def_impl(lambda x, *, message: x)
_not_exported_p.def_abstract_eval(lambda x, *, message: x)
mlir.register_lowering(_not_exported_p, _lower)
batching.primitive_batchers[_not_exported_p] = lambda args, dims, *, message: (
    _not_exported_p.bind(*args, message=message),
    dims[0],
)
