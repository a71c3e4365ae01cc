"""How many steps a scan has."""

from typing import Any

import jax
import jax.numpy as jnp

from .._errors import rule_error, type_of
from .scan_body import is_sliced


def common_length(xs: Any, length: int | None) -> int:
    """The length of the time axis, which all arrays in `xs` share."""
    found: int | None = None
    where = ""
    if length is not None:
        found, where = _as_length(length), "`length`"
    for path, x in jax.tree_util.tree_leaves_with_path(xs):
        if not is_sliced(x):
            continue
        name = f"`xs{jax.tree_util.keystr(path)}`"
        if jnp.ndim(x) == 0:
            raise rule_error(
                "`filter_scan` was given an array without a time axis.",
                f"{name} is {type_of(x)}",
                do="Every array in `xs` has one slice for each step. Close over what is the "
                "same for all steps.",
            )
        steps = jnp.shape(x)[0]
        if found is None:
            found, where = steps, name
        elif steps != found:
            raise rule_error(
                "`filter_scan` was given lengths that differ.",
                f"{where} says {found} steps, {name} is {type_of(x)}",
                do="Every array in `xs` has one slice for each step, along its first axis.",
            )
    if found is None:
        raise rule_error(
            "`filter_scan` can't tell the number of steps.",
            "there is no array in `xs`, and `length` is None",
            do="Pass `length=`.",
        )
    return found


def _as_length(length: Any) -> int:
    try:
        steps = length.__index__()
    except Exception:
        steps = -1
    if steps < 0 or isinstance(length, bool):
        raise rule_error(
            "`filter_scan` was given a `length` that is not a number of steps.",
            f"it is {length!r:.60}",
            do="Give a non-negative integer that is known while tracing.",
        )
    return steps
