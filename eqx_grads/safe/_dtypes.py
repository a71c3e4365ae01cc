"""Arguments as arrays of one real dtype, and half precision computed in single."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._errors import rule_error, type_of
from .._rules.float_args import widen
from .._tangent_spaces import dtype_of_array, promote


def real_arrays(name: str, **xs: Any) -> list[Array]:
    """The arguments of `name` as arrays of one floating dtype, to which they promote as in
    NumPy: Python numbers take that of the arrays, and integers alone take the default."""
    for argument, x in xs.items():
        dtype = dtype_of_array(x)
        if dtype is None or not jnp.issubdtype(dtype, np.number):
            raise rule_error(
                f"`safe.{name}` was given something that is not an array of numbers.",
                f"`{argument}` is {type_of(x)}",
                do="Pass an array of floats, or a number.",
            )
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise rule_error(
                f"`safe.{name}` was given complex numbers, and is a function of real ones.",
                f"`{argument}` is {type_of(x)}",
                do="Use the function of `jax.numpy`, or pass the real and the imaginary part.",
            )
    dtype = promote([x if hasattr(x, "dtype") else jnp.asarray(x) for x in xs.values()])
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.zeros(()).dtype
    return [_cast(jnp.asarray(x), dtype) for x in xs.values()]


def _cast(x, dtype):
    return x if x.dtype == dtype else x.astype(dtype)


def apply(name: str, op: Callable[..., Array], **xs: Any) -> Array:
    """An elementwise `op` of the arguments of `name`, broadcast together: computed in single
    precision if they are of half, and rounded once."""
    arrays = real_arrays(name, **xs)
    dtype = arrays[0].dtype
    if len({x.shape for x in arrays}) > 1:
        arrays = broadcast(name, xs, arrays)
    return _cast(op(*map(widen, arrays)), dtype)


def broadcast(name: str, xs: dict[str, Any], arrays: list[Array]) -> list[Array]:
    """The arrays, which come from the arguments `xs` of `name`, with one shape."""
    try:
        shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    except ValueError:
        raise rule_error(
            f"The arguments of `safe.{name}` do not broadcast together.",
            ", ".join(f"`{argument}` is {type_of(x)}" for argument, x in xs.items()),
            do="Give them shapes that are equal, or one where an axis is shared.",
        ) from None
    return [jnp.broadcast_to(x, shape) for x in arrays]
