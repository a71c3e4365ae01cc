"""Checks of the arguments of gradient ops: factors, bounds and axes."""

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import rule_error, show_path, type_of
from .._rules.float_args import as_axes, is_known
from .._tangent_spaces import broadcasts_to, holds_numbers, is_differentiable, shape_of


def check_broadcasts(op, argument, value, x, *, is_real=False):
    """Raise unless `value` broadcasts to every floating leaf, and is real where that is.

    - `is_real`: whether it is real for a complex leaf too.
    """
    if not holds_numbers(value):
        raise rule_error(
            f"`{op}` was given a `{argument}` that is not a number.",
            f"`{argument}` is {type_of(value)}",
            do="Give it a number or an array.",
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        check_broadcasts_to_leaf(op, argument, value, path, leaf)
        if not is_differentiable(leaf):
            continue
        if jnp.iscomplexobj(value) and (is_real or not jnp.iscomplexobj(leaf)):
            raise rule_error(
                f"`{op}` was given a complex `{argument}` for a real array.",
                f"`{argument}` is {type_of(value)}, x{show_path(path)} is {type_of(leaf)}",
                do=f"Give it a real `{argument}`.",
            )


def check_broadcasts_to_leaf(op, argument, value, path, leaf):
    if is_differentiable(leaf) and not broadcasts_to(np.shape(value), shape_of(leaf)):
        raise rule_error(
            f"The `{argument}` of `{op}` does not broadcast to `x`.",
            f"`{argument}` is {type_of(value)}, x{show_path(path)} is {type_of(leaf)}",
            do=f"A gradient has the shape of its value: `{argument}` has to broadcast to it.",
        )


def check_bounds(op, min, max, x):
    for argument, bound in (("min", min), ("max", max)):
        if bound is not None:
            check_broadcasts(op, argument, bound, x, is_real=True)
    if is_known(min) and is_known(max) and not np.all(np.asarray(min) <= np.asarray(max)):
        raise rule_error(
            f"`{op}` was given a `min` that exceeds `max`.",
            f"`min` is {min}, `max` is {max}",
            do="Were the bounds swapped, or is one of them NaN?",
        )


def check_axis(op, axis, x):
    """`axis`, with a tuple for a list, or an error if a floating leaf does not have it."""
    do = (
        "Every floating leaf needs this axis. With `axis=None`, there is one norm for all "
        "leaves together."
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if axis is not None and is_differentiable(leaf):
            as_axes(op, axis, leaf, f"x{show_path(path)}", do)
    return tuple(axis) if isinstance(axis, list) else axis
