"""What can be wrong with an argument of a gradient op."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._errors import rule_error, type_of
from .._tangent_spaces import is_arraylike, is_differentiable, shape_of


def check_fits(op, argument, value, x):
    if not is_arraylike(value):
        raise rule_error(
            f"`{op}` was given a `{argument}` that is not a number.",
            f"`{argument}` is {type_of(value)}",
            do="Give it a number or an array.",
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        check_leaf_fits(op, argument, value, path, leaf)
        if is_differentiable(leaf) and jnp.iscomplexobj(value) and not jnp.iscomplexobj(leaf):
            raise rule_error(
                f"`{op}` was given a complex `{argument}` for something real.",
                f"`{argument}` is {type_of(value)}, x{jax.tree_util.keystr(path)} is "
                f"{type_of(leaf)}",
                do="The gradient of a real value is real: take the real part of one of them.",
            )


def check_leaf_fits(op, argument, value, path, leaf):
    if not is_differentiable(leaf):
        return
    try:
        fits = np.broadcast_shapes(np.shape(value), shape_of(leaf)) == shape_of(leaf)
    except ValueError:
        fits = False
    if not fits:
        raise rule_error(
            f"The `{argument}` that was given to `{op}` does not fit.",
            f"`{argument}` is {type_of(value)}, x{jax.tree_util.keystr(path)} is "
            f"{type_of(leaf)}",
            do=f"A gradient has the shape of its value: `{argument}` has to broadcast to it.",
        )


def check_bounds(op, min, max, x):
    for argument, bound in (("min", min), ("max", max)):
        if bound is None:
            continue
        if jnp.iscomplexobj(bound):
            raise rule_error(
                f"`{op}` was given a complex bound.",
                f"`{argument}` is {type_of(bound)}",
                do="Of something complex, the real and the imaginary part are clipped: "
                "give real bounds for them.",
            )
        check_fits(op, argument, bound, x)
    if _is_known(min) and _is_known(max) and not np.all(np.asarray(min) <= np.asarray(max)):
        raise rule_error(
            f"`{op}` was given a `min` that exceeds `max`.",
            f"`min` is {min}, `max` is {max}",
            do="Between the bounds there has to be something. Were they swapped?",
        )


def check_not_negative(op, argument, value, scalar=True):
    if scalar and (not is_arraylike(value) or np.shape(value) != ()):
        raise rule_error(
            f"The `{argument}` that was given to `{op}` is not a scalar.",
            f"`{argument}` is {type_of(value)}",
            do="Use one number for all, or `jax.vmap` for one each.",
        )
    if jnp.iscomplexobj(value) or (_is_known(value) and not np.all(np.asarray(value) >= 0)):
        raise rule_error(
            f"`{op}` was given a `{argument}` that is not a number from zero up.",
            f"`{argument}` is {value}",
            do="A length is real, and not negative.",
        )


def check_axis(op, axis, x):
    if axis is None:
        return
    axes = axis if isinstance(axis, tuple) else (axis,)
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        n = len(shape_of(leaf)) if is_differentiable(leaf) else None
        if n is not None and any(not -n <= a < n for a in axes):
            raise rule_error(
                f"`{op}` was given an axis that `x` does not have.",
                f"`axis` is {axis}, x{jax.tree_util.keystr(path)} is {type_of(leaf)}",
                do="Every floating leaf needs this axis. With `axis=None`, there is one norm "
                "for all of them.",
            )


def _is_known(value) -> bool:
    return value is not None and not isinstance(value, Tracer)
