"""Checks of arguments that layers of several kinds have."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from .._errors import rule_error, type_of


def is_size(x: Any) -> bool:
    """Whether `x` is a positive integer."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(x >= 1)


def check_sizes(layer: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if not is_size(size):
            raise rule_error(
                f"`{layer}` was given a size that is not a positive integer.",
                f"`{name}` is {size!r:.60}",
                do="Give a positive integer.",
            )


def check_option(layer: str, name: str, option: Any, known: Collection[str]) -> None:
    if not isinstance(option, str) or option not in known:
        raise rule_error(
            f"`{layer}` was given an unknown `{name}`.",
            f"`{name}` is {option!r:.60}",
            do=f"Give one of {', '.join(map(repr, known))}.",
        )


def check_features(layer: str, cell: Any, xs: Array) -> None:
    if xs.shape[-1] != cell.input_size:
        step = jax.ShapeDtypeStruct(xs.shape[2:], xs.dtype)  # there may be no step to look at
        raise rule_error(
            f"`{layer}` was given inputs of the wrong size.",
            f"a step of `xs` is {type_of(step)}, and `input_size` is {cell.input_size}",
            do="The last axis of `xs` is `input_size` long.",
        )
