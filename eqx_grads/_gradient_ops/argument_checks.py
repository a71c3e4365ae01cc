"""Checks of the arguments of gradient ops: factors, bounds, norms and axes."""

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import rule_error, type_of
from .._rules.float_args import as_integer, is_known
from .._tangent_spaces import broadcasts_to, holds_numbers, is_differentiable, shape_of


def check_broadcasts(op, argument, value, x):
    """Raise unless `value` broadcasts to every floating leaf, and is real where that is."""
    if not holds_numbers(value):
        raise rule_error(
            f"`{op}` was given a `{argument}` that is not a number.",
            f"`{argument}` is {type_of(value)}",
            do="Give it a number or an array.",
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        check_broadcasts_to_leaf(op, argument, value, path, leaf)
        if is_differentiable(leaf) and jnp.iscomplexobj(value) and not jnp.iscomplexobj(leaf):
            raise rule_error(
                f"`{op}` was given a complex `{argument}` for a real array.",
                f"`{argument}` is {type_of(value)}, x{jax.tree_util.keystr(path)} is "
                f"{type_of(leaf)}",
                do=f"The gradient of a real array is real: give it a real `{argument}`.",
            )


def check_broadcasts_to_leaf(op, argument, value, path, leaf):
    if is_differentiable(leaf) and not broadcasts_to(np.shape(value), shape_of(leaf)):
        raise rule_error(
            f"The `{argument}` of `{op}` does not broadcast to `x`.",
            f"`{argument}` is {type_of(value)}, x{jax.tree_util.keystr(path)} is "
            f"{type_of(leaf)}",
            do=f"A gradient has the shape of its value: `{argument}` has to broadcast to it.",
        )


def check_bounds(op, min, max, x):
    for argument, bound in (("min", min), ("max", max)):
        if bound is None:
            continue
        if holds_numbers(bound) and jnp.iscomplexobj(bound):
            raise rule_error(
                f"`{op}` was given a complex bound.",
                f"`{argument}` is {type_of(bound)}",
                do="The real and the imaginary part are clipped separately, both to the same "
                "real bounds.",
            )
        check_broadcasts(op, argument, bound, x)
    if is_known(min) and is_known(max) and not np.all(np.asarray(min) <= np.asarray(max)):
        raise rule_error(
            f"`{op}` was given a `min` that exceeds `max`.",
            f"`min` is {min}, `max` is {max}",
            do="Were the bounds swapped, or is one of them NaN?",
        )


def check_not_negative(op, argument, value, scalar=True):
    if scalar and (not holds_numbers(value) or np.shape(value) != ()):
        raise rule_error(
            f"The `{argument}` of `{op}` is not a scalar.",
            f"`{argument}` is {type_of(value)}",
            do="Use one number for all, or `jax.vmap` for one number each.",
        )
    if (
        not holds_numbers(value)
        or jnp.iscomplexobj(value)
        or (is_known(value) and not np.all(np.asarray(value) >= 0))
    ):
        raise rule_error(
            f"The `{argument}` of `{op}` is not a non-negative number.",
            f"`{argument}` is {value!r:.80}",
            do="Give it a real number that is zero or positive.",
        )


def check_axis(op, axis, x):
    if axis is None:
        return
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = [known for known in map(as_integer, given) if known is not None]
    if len(axes) < len(given):
        raise rule_error(
            f"`{op}` was given an axis that is not an integer.",
            f"`axis` is {axis!r:.60}",
            do="Give it an integer, a tuple of integers, or `None` for all axes of all leaves.",
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        n = len(shape_of(leaf)) if is_differentiable(leaf) else None
        if n is None:
            continue
        missing = any(not -n <= a < n for a in axes)
        if missing or len({a % n for a in axes}) < len(axes):
            raise rule_error(
                f"`{op}` was given an axis that `x` "
                + ("does not have." if missing else "has but once."),
                f"`axis` is {axis}, x{jax.tree_util.keystr(path)} is {type_of(leaf)}",
                do="Every floating leaf needs this axis. With `axis=None`, there is one norm "
                "for all leaves together.",
            )
