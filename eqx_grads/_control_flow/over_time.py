"""Arguments of recurrences over arrays, `(time, ..., features)`: checks, and padding."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from .._errors import rule_error, type_of
from .._jaxprs.symbolic_sizes import is_symbolic
from .._tangent_spaces import holds_numbers


def as_arrays(name: str, given: dict[str, Any], *, real: bool) -> dict[str, Array]:
    """The arguments as arrays, or an error."""
    for argument, x in given.items():
        if not holds_numbers(x) or (real and jnp.iscomplexobj(x)):
            raise rule_error(
                f"The `{argument}` of `{name}` is not an array of {'real ' * real}numbers.",
                f"it is {type_of(x)}",
                do="Give an array, `jnp.stack(xs)` for a list.",
            )
    return {argument: jnp.asarray(x) for argument, x in given.items()}


def zero_padding(name: str, xs: Sequence[Array], lengths: Any) -> list[Array]:
    """The arrays, `(time, ..., features)`, with zeros at the steps that do not count."""
    if lengths is None:
        return list(xs)
    lengths, (steps, *axes) = as_known(lengths), xs[0].shape[:-1]
    fits = lengths.shape == tuple(axes[: lengths.ndim]) and is_integer(lengths)
    where = f"`lengths` is {type_of(lengths)}"
    if fits and isinstance(lengths, np.ndarray) and lengths.size and not is_symbolic(steps):
        fits = 0 <= lengths.min() <= lengths.max() <= steps
        where = f"`lengths` are from {lengths.min()} to {lengths.max()}"
    if not fits:
        raise rule_error(
            f"The `lengths` of `{name}` do not fit its arguments.",
            where,
            f"there are {steps} steps, and the axes between time and features are {axes}",
            do="Give a number of steps for each entry of the first axis after time.",
        )
    times = jnp.arange(steps).reshape(-1, *(1,) * lengths.ndim)
    is_valid = times < jnp.asarray(lengths)[None].astype(times.dtype)
    valid = lambda x: jnp.expand_dims(is_valid, range(lengths.ndim + 1, x.ndim))
    return [jnp.where(valid(x), x, jnp.zeros((), x.dtype)) for x in xs]


def as_known(x):
    """A NumPy array, or a traced array. Anything else becomes an array of an object."""
    try:
        return x if isinstance(x, Tracer) else np.asarray(x)
    except (TypeError, ValueError):
        return np.asarray(None)


def is_integer(x):
    return jnp.issubdtype(x.dtype, jnp.integer)
