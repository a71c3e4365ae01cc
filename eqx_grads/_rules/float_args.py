"""What a quantizer acts on: floats, in at least single precision."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import rule_error, type_of
from .._tangent_spaces import dtype_of
from .nondifferentiable import nondifferentiable


def map_floats(name: str, fn: Callable[..., Any], tree: PyTree) -> PyTree:
    """`fn` of every leaf of floats, as an array. All other leaves stay as they are."""
    if jax.tree_util.all_leaves([tree]):
        return fn(as_floats(name, tree))

    def of_leaf(path, x):
        if _is(x, jnp.complexfloating):
            raise _is_complex(name, f"at x{jax.tree_util.keystr(path)}: it is {type_of(x)}")
        return fn(jnp.asarray(x)) if _is(x, jnp.floating) else x

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def as_floats(name: str, x: Any, what: str = "x") -> Array:
    """`x` as an array, or an error if it is not one of floats."""
    if _is(x, jnp.complexfloating):
        raise _is_complex(name, f"`{what}` is {type_of(x)}")
    if not _is(x, jnp.floating):
        raise rule_error(
            f"`{name}` was given something that is not an array of floats.",
            f"`{what}` is {type_of(x)}",
            do="Only floats have a gradient that could go straight through: pass "
            f"`{what}.astype(jnp.float32)`.",
        )
    return jnp.asarray(x)


def _is(x, kind):
    dtype = dtype_of(x)
    return dtype is not None and jnp.issubdtype(dtype, kind)


def _is_complex(name, where):
    return rule_error(
        f"`{name}` was given complex numbers, which are not ordered.",
        where,
        do="Apply it to the real and to the imaginary part.",
    )


def widen(x: Array) -> Array:
    """Half precision as single precision, in which integers up to 2^24 are exact."""
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def spread(name: str, what: str, x: Any, over: Array) -> Array:
    """A parameter as an array like the one that it is for."""
    x = jnp.asarray(x)
    ends = zip(x.shape[::-1], over.shape[::-1], strict=False)
    fits = x.ndim <= over.ndim and all(a in (1, b) for a, b in ends)
    if not fits or jnp.iscomplexobj(x):
        raise rule_error(
            f"The {what} of `{name}` does not broadcast to the array that it is for.",
            f"the array is {type_of(over)}, the {what} {type_of(x)}",
            do=f"Give the {what} the shape of the array, with ones for the axes that share it.",
        )
    return jnp.broadcast_to(x.astype(over.dtype), over.shape)


def constant(name: str, what: str, x: Any) -> Any:
    """A parameter that must not be differentiated."""
    if isinstance(x, float | int):
        return x
    return nondifferentiable(x, f"The {what} of `{name}`")


def check_positive(name: str, what: str, x: Any) -> None:
    """Raise if a parameter is a number, and so can be looked at, that is not positive."""
    if isinstance(x, float | int) and not x > 0:
        raise rule_error(
            f"The {what} of `{name}` is not positive.",
            f"it is {x!r}",
            do=f"Give it a positive {what}.",
        )
