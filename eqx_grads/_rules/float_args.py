"""Check and convert the arguments of ops: floats, and numbers of bits and levels."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._errors import bad_argument, rule_error, show_path, type_of
from .._tangent_spaces import broadcasts_to, dtype_of_array, holds_numbers
from .nondifferentiable import nondifferentiable


# A Python or NumPy number is a constant; an array of JAX can be learned.
Parameter: TypeAlias = float | int | np.floating | np.ndarray | Array


def map_floats(name: str, fn: Callable[..., Any], tree: PyTree) -> PyTree:
    """`fn` of every floating leaf, as an array. All other leaves are left unchanged."""
    if jax.tree_util.all_leaves([tree]):
        return fn(as_floats(name, tree))

    def of_leaf(path, x):
        if _is(x, jnp.complexfloating):
            raise _is_complex(name, f"at x{show_path(path)}: it is {type_of(x)}")
        return fn(jnp.asarray(x)) if _is(x, jnp.floating) else x

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def as_floats(name: str, x: Any, argument: str = "x") -> Array:
    """`x` as an array, or an error if it is not floating."""
    if _is(x, jnp.complexfloating):
        raise _is_complex(name, f"`{argument}` is {type_of(x)}")
    if not _is(x, jnp.floating):
        do = f"Only floats have a gradient: pass `jnp.asarray({argument}, float)`."
        raise bad_argument(name, argument, "an array of floats", x, do)
    return jnp.asarray(x)


def _is(x, kind):
    dtype = dtype_of_array(x)
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
    """Whether a parameter can be compared in Python: it is given, not traced, not spread over
    several processes, and of no class that only JAX can convert."""
    if x is None or isinstance(x, Tracer) or hasattr(x, "__jax_array__"):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_parameter(name: str, what: str, x: Any) -> None:
    """Raise if a parameter is not a real number, or an array of them. A bool is not."""
    if not _is(x, jnp.floating) and not _is(x, jnp.integer):
        raise rule_error(
            f"The {what} of `{name}` is not a number.",
            f"it is {type_of(x)}",
            do="Give it a real number, or an array of real numbers.",
        )


def check_positive(name: str, what: str, x: Any, *, or_zero: bool = False) -> None:
    """Raise if a parameter is not positive. Traced arrays have no value to look at."""
    check_parameter(name, what, x)
    if not is_known(x):
        return
    values = np.asarray(x)
    if not np.all(values >= 0 if or_zero else values > 0):
        kind = "positive or zero" if or_zero else "positive"
        raise rule_error(
            f"The {what} of `{name}` is not {kind}.",
            f"it is {x!r:.80}",
            do=f"Give it a {what} that is {kind}.",
        )


def as_integer(x: Any) -> int | None:
    """`x` as a Python integer, or `None` if it is not an integer. A bool is not."""
    if type(x) is int:
        return x
    if isinstance(x, bool | np.bool_):
        return None
    if isinstance(x, jax.Array | np.ndarray) and not jnp.issubdtype(x.dtype, jnp.integer):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


def as_count(
    caller: str,
    argument: str,
    x: Any,
    *,
    least: int = 1,
    do: str = "Give an integer of Python or NumPy.",
) -> int:
    """A number of steps or the like, as a Python integer."""
    count = as_integer(x)
    if count is None or not least <= count < 2**31:
        bound = f"of at least {least}" if count is None or count < least else "below 2**31"
        raise bad_argument(caller, argument, f"an integer {bound}", x, do)
    return count


def as_axes(
    name: str,
    axis: Any,
    x: Any,
    argument: str = "x",
    do: str = "Number the axes from zero up, or from minus one down.",
) -> tuple[int, ...]:
    """The axes of `x` as a tuple of numbers from zero up; `None` is all of them."""
    ndim = np.ndim(x)
    if axis is None:
        return tuple(range(ndim))
    is_several = isinstance(axis, Sequence) and not isinstance(axis, str | bytes)
    given = tuple(axis) if is_several else (axis,)
    known = [i for i in map(as_integer, given) if i is not None]
    if len(known) < len(given):
        do = "Give an integer, a tuple of integers, or `None` for all axes."
        raise bad_argument(name, "axis", "an integer", axis, do)
    is_missing = any(not -ndim <= i < ndim for i in known)
    axes = tuple(i + ndim if i < 0 else i for i in known)
    if is_missing or len(set(axes)) < len(axes):
        raise rule_error(
            f"`{name}` was given an axis that `{argument}` "
            + ("does not have." if is_missing else "has only once."),
            f"`axis` is {axis}, `{argument}` is {type_of(x)}",
            do=do,
        )
    return axes


def as_axis(name: str, axis: Any, x: Array, argument: str = "x") -> int:
    """One axis of `x`, as a number from zero up."""
    if as_integer(axis) is None:
        raise bad_argument(name, "axis", "one axis", axis, "Give one integer.")
    return as_axes(name, axis, x, argument)[0]


def as_dtype(x: Any) -> Any:
    """`x` as a dtype, or `None` if it is not one: NumPy would take `None` for float64, and an
    array for its dtype."""
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    try:
        return None if x is None or isinstance(x, arrays) else jnp.dtype(x)
    except Exception:  # an error of any kind: it depends on the object
        return None


def is_key_array(x: Any) -> bool:
    """Whether `x` holds keys of `jax.random.key`."""
    dtype = dtype_of_array(x)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def check_key(name: str, key: Any) -> None:
    """Raise unless `key` is one random key, of either kind."""
    if is_key_array(key):
        is_key = key.shape == ()
    else:
        is_key = dtype_of_array(key) == jnp.uint32 and np.shape(key) in ((2,), (4,))
    if not is_key:
        do = "Give it `jax.random.key(0)`, or one key of what `jax.random.split` returns."
        raise bad_argument(name, "key", "a random key", key, do)


def is_number(x: Any) -> TypeGuard[int | float]:
    """Whether `x` is a real number of Python or NumPy. A bool is not."""
    numbers = int | float | np.integer | np.floating
    return isinstance(x, numbers) and not isinstance(x, bool)


def as_number(x: Any) -> float | None:
    """`x` as a float, or `None` if it is not one real number whose value is known. A bool is
    not."""
    if isinstance(x, int | float):
        return None if isinstance(x, bool) else float(x)
    is_real = _is(x, jnp.floating) or _is(x, jnp.integer)
    return float(x) if is_real and is_known(x) and np.shape(x) == () else None


def check_nonnegative_number(name: str, **numbers: Any) -> None:
    """Raise unless each is one real number, zero or positive, or an array that is traced."""
    for argument, x in numbers.items():
        if not (is_number(x) or (holds_numbers(x) and np.shape(x) == ())):
            do = "Give one real number: under `jax.vmap`, one for each example."
            raise bad_argument(name, argument, "a number", x, do)
        check_positive(name, f"`{argument}`", x, or_zero=True)


def as_bits(name: str, bits: Any, signed: bool, narrow: bool = False) -> int:
    """A number of bits that a quantizer can have. A narrow range lacks the smallest integer."""
    fewest = 2 if signed or narrow else 1
    known = as_integer(bits)
    if known is None or not fewest <= known <= 24:
        do = "Single precision is exact up to 24 bits. For a single signed bit, use "
        do += "`eqx_grads.ste.binary_sign`."
        raise bad_argument(name, "bits", f"an integer from {fewest} to 24", bits, do)
    return known


def as_levels(name: str, levels: Any) -> tuple[int, ...]:
    """The numbers of levels of finite scalar quantization."""
    is_several = hasattr(levels, "__iter__") and getattr(levels, "ndim", 1) > 0
    known = tuple(map(as_integer, levels)) if is_several else ()
    counts = [count for count in known if count is not None and count >= 2]
    if not known or len(counts) < len(known) or math.prod(counts) >= 2**31:
        what, do = "a sequence of integers of at least 2", "Their product is less than 2^31."
        raise bad_argument(name, "levels", what, levels, f"{do} For example, `(8, 5, 5)`.")
    return tuple(counts)
