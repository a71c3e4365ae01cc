"""The kinds of wrong arguments. Each makes a value that replaces a good argument."""

import decimal
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np


class NotApplicable(Exception):
    """This kind can't be made from this good argument."""


KINDS: dict[str, Callable[[Any], Any]] = {}


def _constants(**values):
    for name, value in values.items():
        KINDS[name.replace("_", " ")] = lambda good, value=value: value


def _array(good):
    """The good argument as a NumPy array."""
    if isinstance(good, bool) or not isinstance(good, jax.Array | np.ndarray | float | int):
        raise NotApplicable
    if isinstance(good, jax.Array) and jnp.issubdtype(good.dtype, jax.dtypes.prng_key):
        raise NotApplicable
    return np.asarray(good, None if isinstance(good, jax.Array | np.ndarray) else np.float32)


def _floats(good):
    array = _array(good)
    return array.astype(np.float32) if array.dtype.kind in "iub" else array


# No arrays.
_constants(
    none=None, string="nonsense", empty_string="", bytes=b"nonsense", a_bool=True,
    object=object(), type=int, module_of_Python=types, function=jnp.sin,
    function_of_nothing=lambda: 1.0, list_of_floats=[0.5, 2.0], tuple_of_floats=(0.5, 2.0),
    empty_list=[], empty_tuple=(), dict={"nonsense": 1.0}, empty_dict={}, set={1.0, 2.0},
    range=range(3), ragged_list=[[1.0], [1.0, 2.0]], list_of_strings=["a", "b"],
    list_of_none=[None, None], decimal=decimal.Decimal("0.5"), ellipsis=..., slice=slice(0, 1),
    shape_and_dtype=jax.ShapeDtypeStruct((3,), "float32"),
)  # fmt: skip
# Numbers.
_constants(
    nan=float("nan"), infinity=float("inf"), minus_infinity=-float("inf"), zero=0,
    zero_float=0.0, negative=-1, negative_float=-1.5, fraction=0.37, beyond_int32=2**40,
    beyond_int64=10**30, beyond_float32=1e300, complex=1 + 2j,
)  # fmt: skip
# An axis, more or less.
_constants(axis_too_large=99, axis_too_small=-99, axis_twice=(0, 0), axis_in_list=[0])


# Arrays that are no numbers.
_constants(
    array_of_objects=np.array([None, "a"], object), array_of_strings=np.array(["a", "b"]),
    array_of_dates=np.zeros(2, "datetime64[s]"),
    structured_array=np.zeros(2, [("a", "f4"), ("b", "f4")]),
    masked_array=np.ma.masked_greater(np.array([0.5, 2.0, 3.0], np.float32), 1.0),
)  # fmt: skip


def _of_type(good, *types):
    if not isinstance(good, types):
        raise NotApplicable
    return good


def _with_first(good, value):
    array = np.array(_floats(good))
    array.reshape(-1)[:1] = value
    return jnp.asarray(array)


def _with_axes(good):
    """As an array of JAX, with one axis at least."""
    array = jnp.asarray(_array(good))
    if array.ndim == 0:
        raise NotApplicable
    return array


def _read_only(good):
    array = np.array(_floats(good))
    array.flags.writeable = False
    return array


KINDS |= {
    # Of JAX and Equinox.
    "some floats": lambda good: jnp.array([0.5, 2.0]),
    "an integer of JAX": lambda good: jnp.array(3),
    "a module": lambda good: eqx.nn.Linear(2, 3, key=jr.key(0)),
    "an iterator": lambda good: iter([0.5, 2.0]),
    "a key": lambda good: jr.key(0),
    "some keys": lambda good: jr.split(jr.key(0), 3),
    # Arrays like the good one, but for one thing.
    "nan in array": lambda good: _with_first(good, np.nan),
    "infinity in array": lambda good: _with_first(good, np.inf),
    "zeros": lambda good: jnp.zeros_like(jnp.asarray(_array(good))),
    "negated": lambda good: -jnp.asarray(_floats(good)) - 1,
    "one axis more": lambda good: jnp.asarray(_array(good))[None],
    "one axis less": lambda good: _with_axes(good)[0],
    "five axes": lambda good: jnp.ones((1, 2, 1, 2, 3), _array(good).dtype),
    "empty array": lambda good: jnp.zeros((0,), _array(good).dtype),
    "first axis of size zero": lambda good: jnp.atleast_1d(_array(good))[None][:, :0],
    "one longer": lambda good: jnp.concatenate(
        [_with_axes(good), _with_axes(good)[..., :1]], -1
    ),
    "integers": lambda good: jnp.asarray(_array(good)).astype(jnp.int32),
    "unsigned": lambda good: jnp.asarray(np.abs(_array(good)).astype(np.uint8)),
    "bools": lambda good: jnp.asarray(_array(good) > 0),
    "half precision": lambda good: jnp.asarray(_floats(good)).astype(jnp.float16),
    "complex array": lambda good: jnp.asarray(_floats(good)).astype(jnp.complex64) * (1 + 1j),
    "read only": _read_only,
    "not contiguous": lambda good: np.repeat(_floats(good)[..., None], 2, -1)[..., 0],
    "number of NumPy": lambda good: np.float32(_array(good).reshape(-1)[0]),
    "double of NumPy": lambda good: np.asarray(_floats(good), np.float64),
    # Like the good option, but for one thing.
    "option in an array": lambda good: jnp.asarray(_of_type(good, bool, int)),
    "misspelled": lambda good: _of_type(good, str) + "x",
    "upper case": lambda good: _of_type(good, str).upper(),
    "in a list": lambda good: [good],
    "in a dict": lambda good: {"nonsense": good},
}
