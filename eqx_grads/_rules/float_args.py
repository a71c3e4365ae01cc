"""Check and convert the arguments of ops: floats, and numbers of bits and levels."""

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._errors import rule_error, type_of
from .._tangent_spaces import broadcasts_to, dtype_of
from .nondifferentiable import nondifferentiable


# A Python or NumPy number is a constant; an array of JAX can be learned.
Parameter: TypeAlias = float | int | np.floating | np.ndarray | Array


def map_floats(name: str, fn: Callable[..., Any], tree: PyTree) -> PyTree:
    """`fn` of every floating leaf, as an array. All other leaves are left unchanged."""
    if jax.tree_util.all_leaves([tree]):
        return fn(as_floats(name, tree))

    def of_leaf(path, x):
        if _is(x, jnp.complexfloating):
            raise _is_complex(name, f"at x{jax.tree_util.keystr(path)}: it is {type_of(x)}")
        return fn(jnp.asarray(x)) if _is(x, jnp.floating) else x

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def as_floats(name: str, x: Any, argument: str = "x") -> Array:
    """`x` as an array, or an error if it is not floating."""
    if _is(x, jnp.complexfloating):
        raise _is_complex(name, f"`{argument}` is {type_of(x)}")
    if not _is(x, jnp.floating):
        raise rule_error(
            f"`{name}` was given something that is not an array of floats.",
            f"`{argument}` is {type_of(x)}",
            do=f"Only floats have a gradient: pass `{argument}.astype(jnp.float32)`.",
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


def broadcast_parameter(name: str, what: str, x: Any, to: Array) -> Array:
    """A real parameter with the shape and the dtype of the array that it belongs to."""
    x = jnp.asarray(x)
    if not broadcasts_to(x.shape, to.shape) or jnp.iscomplexobj(x):
        raise rule_error(
            f"The {what} of `{name}` does not broadcast to the array.",
            f"the array is {type_of(to)}, the {what} {type_of(x)}",
            do=f"Give the {what} the shape of the array, with ones for the axes that share it.",
        )
    return jnp.broadcast_to(x.astype(to.dtype), to.shape)


def constant(name: str, what: str, x: Any) -> Any:
    """A parameter, or an error where it is differentiated."""
    if isinstance(x, float | int):
        return x
    return nondifferentiable(x, f"The {what} of `{name}`")


def is_known(x: Any) -> bool:
    """Whether a parameter can be compared in Python: it is given, not traced, and not spread
    over several processes."""
    is_elsewhere = isinstance(x, jax.Array) and not (
        isinstance(x, Tracer) or x.is_fully_addressable
    )
    return x is not None and not isinstance(x, Tracer) and not is_elsewhere


def check_parameter(name: str, what: str, x: Any) -> None:
    """Raise if a parameter is not a number, or an array of numbers. A bool is not."""
    if not _is(x, jnp.inexact) and not _is(x, jnp.integer):
        raise rule_error(
            f"The {what} of `{name}` is not a number.",
            f"it is {type_of(x)}",
            do="Give it a real number, or an array of real numbers.",
        )


def check_positive(name: str, what: str, x: Any) -> None:
    """Raise if a parameter is not positive. Traced arrays have no value to look at."""
    check_parameter(name, what, x)
    is_real = not jnp.iscomplexobj(x)  # a complex one is refused where it is broadcast
    if is_real and is_known(x) and not np.all(np.asarray(x) > 0):
        raise rule_error(
            f"The {what} of `{name}` is not positive.",
            f"it is {x!r:.80}",
            do=f"Give it a positive {what}.",
        )


def check_flags(name: str, **flags: Any) -> None:
    """Raise unless each option is a bool. Any other object would count as true, `"no"` too."""
    for option, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise rule_error(
                f"The `{option}` of `{name}` is not a bool.",
                f"it is {flag!r:.60}",
                do="Give `True` or `False`.",
            )


def as_integer(x: Any) -> int | None:
    """`x` as a Python integer, or `None` if it is not an integer. A bool is not."""
    if isinstance(x, bool | np.bool_):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


def as_bits(name: str, bits: Any, signed: bool) -> int:
    """A number of bits that a quantizer can have."""
    fewest = 2 if signed else 1
    known = as_integer(bits)
    if known is None or not fewest <= known <= 24:
        raise rule_error(
            f"`{name}` can't quantize to this number of bits.",
            f"`bits` is {bits!r:.80}, `signed` is {signed}",
            do=f"Give it an integer from {fewest} to 24: single precision is exact for no "
            "more. For a single signed bit, use `eqx_grads.ste.binary_sign`.",
        )
    return known


def as_levels(name: str, levels: Any) -> tuple[int, ...]:
    """The numbers of levels of finite scalar quantization."""
    given = tuple(levels) if hasattr(levels, "__iter__") else ()
    known = tuple(count for count in map(as_integer, given) if count is not None)
    all_known = bool(known) and len(known) == len(given)
    if not all_known or min(known) < 2 or math.prod(known) >= 2**31:
        raise rule_error(
            f"`{name}` can't quantize to these levels.",
            f"`levels` is {levels!r:.80}",
            do="Give it a sequence of integers, each two or more, whose product is less than "
            "2^31: `(8, 5, 5)`.",
        )
    return known
