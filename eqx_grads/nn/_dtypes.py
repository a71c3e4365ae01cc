"""The dtypes that layers compute in."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from .._errors import rule_error
from .._rules.float_args import as_dtype
from .._tangent_spaces import promote


def default_dtype(dtype: Any = None) -> Any:
    """The dtype of parameters: by default, the dtype of JAX."""
    return jnp.zeros(()).dtype if dtype is None else dtype


def layer_dtype(layer: str, dtype: Any) -> Any:
    """The dtype of the parameters of a layer, checked to be a real floating one."""
    known = default_dtype() if dtype is None else as_dtype(dtype)
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise rule_error(
            f"The `dtype` of `{layer}` is not a real floating one.",
            f"it is {dtype!r:.60}" if known is None else f"it is {known}",
            do="Give one such as `jnp.float32` or `jnp.bfloat16`, or `None` for JAX's default.",
        )
    return default_dtype(dtype)


def common_dtype(*xs: Array | None) -> list[Any]:
    """All arrays in one inexact dtype. With float32 inputs, a bfloat16 weight is float32 here,
    and its gradient is bfloat16."""
    dtype = promote([x for x in xs if x is not None])
    return [None if x is None else x.astype(dtype) for x in xs]
