"""Arguments that layers of several kinds have: their checks and dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import bad_argument, rule_error, type_of
from .._rules.float_args import as_count, as_dtype
from .._tangent_spaces import dtype_of_array, promote


def as_sizes(layer: str, **sizes: Any) -> list[int]:
    """Positive sizes as Python integers, which a static field has to be."""
    return [as_count(layer, name, size) for name, size in sizes.items()]


def check_callable(layer: str, name: str, fn: Any, such_as: str = "jax.nn.gelu") -> None:
    """Check that an optional function is one, and not its name."""
    if fn is not None and (isinstance(fn, type) or not callable(fn)):
        do = f"Give a function of an array, such as `{such_as}`, and not its name."
        raise bad_argument(layer, name, "a function", fn, do)


def check_features(layer: str, cell: Any, xs: Array) -> None:
    """Check the size of the inputs of a cell that says which it takes."""
    size = getattr(cell, "input_size", None)
    shape = (size,) if isinstance(size, int) else size
    if isinstance(shape, tuple) and xs.shape[2:] != shape:
        step = jax.ShapeDtypeStruct(xs.shape[2:], xs.dtype)  # there may be no step to look at
        raise rule_error(
            f"`{layer}` was given inputs of the wrong size.",
            f"a step of `xs` is {type_of(step)}, and `input_size` is {size}",
            do="The last axis, or axes, of `xs` must have this size."
            + " A sequence of numbers is `xs[..., None]`." * (size == 1),
        )


def check_real(layer: str, xs: Array) -> None:
    if jnp.iscomplexobj(xs):
        raise rule_error(
            f"`{layer}` was given complex numbers.",
            f"`xs` is {type_of(xs)}",
            do="Pass real ones. Real and imaginary parts may be features of their own.",
        )


_KINDS = {
    "floats": (jnp.floating,),
    "real numbers": (jnp.floating, jnp.integer, jnp.bool_),
    "numbers": (jnp.number, jnp.bool_),
}


def check_step(cell: str, of: str, arrays: dict[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Check that the arguments of a cell are arrays of numbers, with these shapes."""
    for name, (x, shape) in arrays.items():
        dtype = dtype_of_array(x)
        is_kind = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in _KINDS[of])
        if not is_kind or jnp.shape(x) != shape:
            raise rule_error(
                f"`{cell}` was given something that does not fit its neurons.",
                f"`{name}` is {type_of(x)}, and has to be an array of {of} of shape {shape}",
                do="A cell takes one step of one example: use `jax.vmap` for a batch, and a "
                "scan for time.",
            )


def layer_dtype(layer: str, dtype: Any = None) -> Any:
    """The dtype of the parameters of a layer, a real floating one: by default, JAX's."""
    known = jnp.zeros(()).dtype if dtype is None else as_dtype(dtype)
    if known is None or not jnp.issubdtype(known, jnp.floating):
        do = "Give one such as `jnp.float32` or `jnp.bfloat16`, or `None` for JAX's default."
        raise bad_argument(layer, "dtype", "a real floating one", dtype, do)
    return known


def common_dtype(*trees: PyTree) -> Any:
    """All arrays in one inexact dtype. With float32 inputs, a bfloat16 weight is float32 here,
    and its gradient is bfloat16."""
    dtype = promote(jax.tree.leaves(trees))
    return jax.tree.map(lambda x: x.astype(dtype), trees)
