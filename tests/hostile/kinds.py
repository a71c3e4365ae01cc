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


def _kind(make):
    KINDS[make.__name__.strip("_").replace("_", " ")] = make
    return make


def _constants(**values):
    for name, value in values.items():
        KINDS[name.replace("_", " ")] = lambda good, value=value: value


def _module():
    return eqx.nn.Linear(2, 3, key=jr.key(0))


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
    none=None,
    string="nonsense",
    empty_string="",
    bytes=b"nonsense",
    a_bool=True,
    object=object(),
    type=int,
    module_of_Python=types,
    function=jnp.sin,
    function_of_nothing=lambda: 1.0,
    list_of_floats=[0.5, 2.0],
    tuple_of_floats=(0.5, 2.0),
    empty_list=[],
    empty_tuple=(),
    dict={"nonsense": 1.0},
    empty_dict={},
    set={1.0, 2.0},
    range=range(3),
    ragged_list=[[1.0], [1.0, 2.0]],
    list_of_strings=["a", "b"],
    list_of_none=[None, None],
    decimal=decimal.Decimal("0.5"),
    ellipsis=...,
    slice=slice(0, 1),
    shape_and_dtype=jax.ShapeDtypeStruct((3,), "float32"),
)
# Numbers.
_constants(
    nan=float("nan"),
    infinity=float("inf"),
    minus_infinity=-float("inf"),
    zero=0,
    zero_float=0.0,
    negative=-1,
    negative_float=-1.5,
    fraction=0.37,
    beyond_int32=2**40,
    beyond_int64=10**30,
    beyond_float32=1e300,
    complex=1 + 2j,
)
# An axis, more or less.
_constants(axis_too_large=99, axis_too_small=-99, axis_twice=(0, 0), axis_in_list=[0])


@_kind
def some_floats(good):
    return jnp.array([0.5, 2.0])


@_kind
def an_integer_of_JAX(good):
    return jnp.array(3)


@_kind
def a_module(good):
    return _module()


@_kind
def an_iterator(good):
    return iter([0.5, 2.0])


@_kind
def a_key(good):
    return jr.key(0)


@_kind
def some_keys(good):
    return jr.split(jr.key(0), 3)


# Arrays that are no numbers.
_constants(
    array_of_objects=np.array([None, "a"], object),
    array_of_strings=np.array(["a", "b"]),
    array_of_dates=np.zeros(2, "datetime64[s]"),
    structured_array=np.zeros(2, [("a", "f4"), ("b", "f4")]),
    masked_array=np.ma.masked_greater(np.array([0.5, 2.0, 3.0], np.float32), 1.0),
)


# Arrays like the good one, but for one thing.
@_kind
def nan_in_array(good):
    array = np.array(_floats(good))
    array.reshape(-1)[:1] = np.nan
    return jnp.asarray(array)


@_kind
def infinity_in_array(good):
    array = np.array(_floats(good))
    array.reshape(-1)[:1] = np.inf
    return jnp.asarray(array)


@_kind
def zeros(good):
    return jnp.zeros_like(jnp.asarray(_array(good)))


@_kind
def negated(good):
    return -jnp.asarray(_floats(good)) - 1


@_kind
def one_axis_more(good):
    return jnp.asarray(_array(good))[None]


@_kind
def one_axis_less(good):
    array = jnp.asarray(_array(good))
    if array.ndim == 0:
        raise NotApplicable
    return array[0]


@_kind
def five_axes(good):
    return jnp.ones((1, 2, 1, 2, 3), _array(good).dtype)


@_kind
def empty_array(good):
    return jnp.zeros((0,), _array(good).dtype)


@_kind
def first_axis_of_size_zero(good):
    return jnp.asarray(_array(good))[None][:, :0] if _array(good).ndim else jnp.zeros((0,))


@_kind
def one_longer(good):
    array = _array(good)
    if array.ndim == 0:
        raise NotApplicable
    return jnp.concatenate([jnp.asarray(array), jnp.asarray(array)[..., :1]], -1)


@_kind
def integers(good):
    return jnp.asarray(_array(good)).astype(jnp.int32)


@_kind
def unsigned(good):
    return jnp.asarray(np.abs(_array(good)).astype(np.uint8))


@_kind
def bools(good):
    return jnp.asarray(_array(good) > 0)


@_kind
def half_precision(good):
    return jnp.asarray(_floats(good)).astype(jnp.float16)


@_kind
def complex_array(good):
    return jnp.asarray(_floats(good)).astype(jnp.complex64) * (1 + 1j)


@_kind
def read_only(good):
    array = np.array(_floats(good))
    array.flags.writeable = False
    return array


@_kind
def not_contiguous(good):
    return np.repeat(_floats(good)[..., None], 2, -1)[..., 0]


@_kind
def number_of_NumPy(good):
    return np.float32(_array(good).reshape(-1)[0])


@_kind
def double_of_NumPy(good):
    return np.asarray(_floats(good), np.float64)


@_kind
def option_in_an_array(good):
    if not isinstance(good, bool | int):
        raise NotApplicable
    return jnp.asarray(good)


@_kind
def misspelled(good):
    if not isinstance(good, str):
        raise NotApplicable
    return good + "x"


@_kind
def upper_case(good):
    if not isinstance(good, str):
        raise NotApplicable
    return good.upper()


@_kind
def in_a_list(good):
    return [good]


@_kind
def in_a_dict(good):
    return {"nonsense": good}
