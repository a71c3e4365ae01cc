"""How a decorated function is called, and what of its arguments can be differentiated."""

import dataclasses
from collections.abc import Callable
from typing import Any

from .._tangent_spaces import is_array, is_arraylike, is_dynamic, is_numeric_array


@dataclasses.dataclass(frozen=True)
class Convention:
    """A calling convention.

    - `args`, `kwargs`, `outputs`: which leaves of the positional arguments, the keyword-only
        arguments and the outputs are arrays, and so operands. The others are static.
    - `binds`: whether arguments are bound to the parameters of the function, and numbers are
        arrays even if nothing is transformed. If not, the arguments stay as they were given.
    - `fills_defaults`: whether a rule gets the positional arguments that were left out.
    - `returns_numbers`: whether `jax.jvp` of Python numbers returns Python numbers.
    - `configuration`: for errors, what can't be differentiated, and what to do.
    """

    args: Callable[[Any], bool] = is_dynamic
    kwargs: Callable[[Any], bool] = is_array
    outputs: Callable[[Any], bool] = is_dynamic
    binds: bool = True
    fills_defaults: bool = True
    returns_numbers: bool = False
    configuration: tuple[str, str] = (
        "a keyword-only argument",
        "Keyword-only arguments are configuration. Make it a positional parameter to give it a "
        "derivative, or pass `jax.lax.stop_gradient` of it.",
    )


OURS = Convention()
# The rule gets the arguments of the caller.
AS_CALLED = Convention(fills_defaults=False)
JAX = Convention(
    outputs=is_arraylike,
    binds=False,
    configuration=(
        "an argument of `nondiff_argnums`",
        "Remove it from `nondiff_argnums`, and return its cotangent, or pass "
        "`jax.lax.stop_gradient` of it.",
    ),
)
EQUINOX = Convention(
    args=is_numeric_array,
    kwargs=is_numeric_array,
    binds=False,
    fills_defaults=False,
    returns_numbers=True,
    configuration=(
        "an argument that was passed by keyword",
        "Pass it by position to give it a derivative, or pass `jax.lax.stop_gradient` of it.",
    ),
)
