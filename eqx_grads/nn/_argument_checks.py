"""Checks of arguments that layers of several kinds have."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._errors import check_flags, rule_error, type_of
from .._rules.float_args import is_number
from .._tangent_spaces import dtype_of_array


def is_size(x: Any) -> bool:
    """Whether `x` is a positive integer that can be the size of an axis."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and 1 <= int(x) < 2**31


# In single precision, larger numbers are infinite.
_LARGEST = float(np.finfo(np.float32).max)


def as_sizes(layer: str, **sizes: Any) -> list[int]:
    """Positive sizes as Python integers, which a static field has to be."""
    for name, size in sizes.items():
        if not is_size(size):
            raise rule_error(
                f"`{layer}` was given a size that is not a positive integer.",
                f"`{name}` is {size!r:.60}",
                do="Give a positive integer, less than 2^31.",
            )
    return [int(size) for size in sizes.values()]


def check_numbers(layer: str, **numbers: Any) -> None:
    for name, number in numbers.items():
        if not is_number(number) or not abs(float(number)) < _LARGEST:
            raise rule_error(
                f"The `{name}` of `{layer}` is not a number that is finite.",
                f"it is {number!r:.60}",
                do="Give a real number.",
            )


def check_callable(layer: str, name: str, fn: Any, such_as: str = "jax.nn.gelu") -> None:
    """Check that an optional function is one, and not its name."""
    if fn is not None and (isinstance(fn, type) or not callable(fn)):
        raise rule_error(
            f"The `{name}` of `{layer}` is not a function.",
            f"it is {fn!r:.60}",
            do=f"Give a function of an array, such as `{such_as}`, and not its name.",
        )


def check_stack(layer: str, *, num_layers: Any, dropout: Any, **flags: Any) -> None:
    """Check the options that all recurrent layers share."""
    as_sizes(layer, num_layers=num_layers)
    check_flags(layer, **flags)
    if not (is_number(dropout) and 0 <= dropout <= 1):
        raise rule_error(
            f"The `dropout` of `{layer}` is not a probability.",
            f"it is {dropout!r:.60}",
            do="Give a number from zero to one.",
        )
    if dropout > 0 and num_layers == 1:
        raise rule_error(
            f"`{layer}` was given a `dropout`, and has a single layer.",
            f"`dropout` is {dropout}, `num_layers` is {num_layers}",
            do="Dropout is applied between two layers: put an `equinox.nn.Dropout` before or "
            "after this layer, or leave `dropout` out.",
        )


def check_features(layer: str, cell: Any, xs: Array) -> None:
    """Check the size of the inputs of a cell that says which it takes."""
    size = getattr(cell, "input_size", None)
    shape = (size,) if isinstance(size, int) else size
    if isinstance(shape, tuple) and xs.shape[2:] != shape:
        step = jax.ShapeDtypeStruct(xs.shape[2:], xs.dtype)  # there may be no step to look at
        raise rule_error(
            f"`{layer}` was given inputs of the wrong size.",
            f"a step of `xs` is {type_of(step)}, and `input_size` is {size}",
            do="The last axis of `xs` is `input_size` long, or the last axes are."
            + " A sequence of numbers is `xs[..., None]`." * (size == 1),
        )


def check_real(layer: str, cell: Any, xs: Array, *states: Array) -> None:
    """Check that inputs have the right size and are real, and that given states are real."""
    check_features(layer, cell, xs)
    for name, x in (("xs", xs), *(("state", state) for state in states)):
        if jnp.iscomplexobj(x):
            raise rule_error(
                f"`{layer}` was given complex numbers.",
                f"`{name}` is {type_of(x)}",
                do="Pass real ones. Real and imaginary parts may be features of their own.",
            )


def check_step(cell: str, **arrays: tuple[Any, int]) -> None:
    """Check that the arguments of a cell are vectors with these sizes."""
    for name, (x, size) in arrays.items():
        dtype = dtype_of_array(x)
        is_numeric = dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended)
        if not is_numeric or jnp.shape(x) != (size,):
            raise rule_error(
                f"`{cell}` was given something that does not fit its weights.",
                f"`{name}` is {type_of(x)}, and has to be an array of shape ({size},)",
                do="A cell takes one step of one example: use `jax.vmap` for a batch, and a "
                "scan for time.",
            )
