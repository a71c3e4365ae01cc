"""The dtypes that layers compute in."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from .._tangent_spaces import promote


def default_dtype(dtype: Any = None) -> Any:
    """The dtype of parameters: that of JAX unless one is given."""
    return jnp.zeros(()).dtype if dtype is None else dtype


def common_dtype(*xs: Array | None) -> list[Any]:
    """All arrays in one inexact dtype. With float32 inputs, a bfloat16 weight is float32 here,
    and its gradient is bfloat16."""
    dtype = promote([x for x in xs if x is not None])
    return [None if x is None else x.astype(dtype) for x in xs]
