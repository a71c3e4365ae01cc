"""The one place that calls NumPy code from a JAX program: dtypes, shapes, exceptions."""

import abc
import dataclasses
import functools as ft
import pathlib
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._errors import rule_error, RuleError, type_of
from .._jaxprs.current_trace import is_staged, outside_of_linearization
from .._jaxprs.varying import vary_alike
from .._rules.closure_convert import Opaque
from .host_bits import (
    bits_type,
    from_bits,
    from_bits_on_host,
    needs_bits,
    to_bits,
    to_bits_on_host,
)


VMAP_METHODS = (
    "sequential",
    "sequential_unrolled",
    "expand_dims",
    "broadcast_all",
    "legacy_vectorized",
)


class AbstractHostOp(Opaque, abc.ABC):
    """A function of a list of NumPy arrays that returns a list of NumPy arrays.

    It is hashed and compared by what it is made of, as JAX keeps compiled programs by it. The
    arrays may have more axes in front than `in_types` say: those of `vmap`.
    """

    call: Any  # the `PrimalOp` that this is, or is derived from
    in_types: Any  # tuples of `jax.ShapeDtypeStruct`s
    out_types: Any

    @ft.cached_property
    def in_ranks(self) -> list[int]:  # compared at each call
        return [len(t.shape) for t in self.in_types]

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What the user calls the function that runs."""

    @property
    @abc.abstractmethod
    def place(self) -> str:
        """Its file and line."""

    @property
    @abc.abstractmethod
    def vmap_method(self) -> str: ...

    @abc.abstractmethod
    def out_path(self, i: int) -> str:
        """Where output number `i` is, in the user's words."""

    @abc.abstractmethod
    def run(self, leaves: Sequence[np.ndarray]) -> list[Any]:
        """The outputs as the user's code returned them: nothing is cast yet, so that
        differences of them can be taken. Only `own_outputs` calls this."""


def call_on_host(op: AbstractHostOp, leaves: Sequence[Any]) -> list[jax.Array]:
    """The outputs of `op`, of the types that it promises.

    Where the values are known, `op` is simply called, so that an exception arrives as it was
    raised. In a program that is being traced the call is a `jax.pure_callback`.
    """
    if any(isinstance(x, Tracer) for x in leaves) or is_staged(leaves):
        # Its type does not say that it varies over a mesh as the arguments do.
        return vary_alike(_call_in_program(op, leaves), leaves)
    try:
        out = _run(op, [np.asarray(x) for x in leaves])
    except Exception as error:
        error.add_note(
            f"This was raised on the host, by `{op.name}`, called with {_given(op, leaves)}."
        )
        raise
    with outside_of_linearization(()):
        return [jnp.asarray(x) for x in out]


def _call_in_program(op: AbstractHostOp, leaves: Sequence[Any]) -> list[jax.Array]:
    has_bits = needs_bits([*op.in_types, *op.out_types])
    call, types = _Callback(op, has_bits), op.out_types
    if not has_bits:
        return list(jax.pure_callback(call, types, *leaves, vmap_method=op.vmap_method))
    leaves = [jnp.asarray(x) for x in leaves]
    # Integers have no tangents. From the empty parts of the arrays JAX sees that the arrays are
    # differentiated, and raises, as for any callback.
    empty = [x.ravel()[:0] for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    leaves, types = [to_bits(x) for x in leaves], tuple(map(bits_type, types))
    out = jax.pure_callback(call, types, *leaves, *empty, vmap_method=op.vmap_method)
    return [from_bits(x, t.dtype) for x, t in zip(out, op.out_types, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Callback:
    """What JAX keeps of a callback, and calls. `has_bits`: see `host_bits.py`."""

    op: AbstractHostOp
    has_bits: bool

    def __call__(self, *leaves):
        leaves = [np.asarray(x) for x in leaves]
        if self.has_bits:
            pairs = zip(leaves, self.op.in_types, strict=False)  # empty ones are behind them
            leaves = [from_bits_on_host(x, t.dtype) for x, t in pairs]
        try:
            out = _run(self.op, leaves)
        except RuleError as error:
            # The text says it all, and JAX writes the stack in front of it, twice.
            raise error.with_traceback(None) from None
        except Exception as error:
            # All that leaves a compiled program is the text of the last exception.
            raise RuntimeError(_describe(self.op, leaves, error)) from None
        return tuple(map(to_bits_on_host, out) if self.has_bits else out)


def _describe(op, leaves, error) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY)]
    lines = "".join(traceback.format_list(own or frames))
    text = "".join(traceback.format_exception_only(error)).rstrip()
    do = (
        "The program is compiled, and so can't raise the exception itself. Call the function "
        "outside of `jax.jit` and `jax.vmap` to catch it, or to debug it."
    )
    if [np.ndim(x) for x in leaves] != op.in_ranks:
        do = (
            f'Under `jax.vmap`, `vmap_method="{op.vmap_method}"` puts the axes of the batch in '
            f"front. {_BROADCAST_ARGUMENTS}"
        )
    return (
        f"`{op.name}` raised an exception on the host.\n"
        f"  {op.place}\n  called with {_given(op, leaves)}\n{lines}{text}\n{do}"
    )


_BROADCAST_ARGUMENTS = (
    "If arguments have another number of axes than each other, broadcast them before the call, "
    "by `jnp.broadcast_arrays`."
)
_LIBRARY = str(pathlib.Path(__file__).parents[1])


def _given(op, leaves) -> str:
    """The types of the arrays, and those without the axes of `vmap` if there are any."""
    given, own = (", ".join(map(type_of, xs)) for xs in (leaves, op.in_types))
    if not given:
        return "no arrays"
    is_batched = [np.ndim(x) for x in leaves] != op.in_ranks
    return f"{given}, under `vmap` of {own}" if is_batched else given


def described(op: AbstractHostOp) -> str:
    """The function that runs; of a rule, whose it is."""
    function = op.call.name
    return f"`{op.name}`" if op.name == function else f"`{op.name}` of `{function}`"


def read_only(x: np.ndarray) -> np.ndarray:
    """`x`, to which host code can't write. It is given all arrays like this, as the library
    may give it the same array in the next call."""
    x.flags.writeable = False
    return x


def batch_shape(op: AbstractHostOp, leaves: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The axes of `vmap` in front of the arrays."""
    if [x.ndim for x in leaves] == op.in_ranks:
        return ()
    pairs = zip(leaves, op.in_ranks, strict=True)
    return np.broadcast_shapes(*(x.shape[: x.ndim - rank] for x, rank in pairs))


def own_outputs(op: AbstractHostOp, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of `op`, of the promised shapes, in memory that the host code does not have.

    All arrays that host code returns enter the library here, and are copied. Host code may
    write into the same memory in its next call, as C and Fortran do, and a Jacobian is made of
    the outputs of several calls.
    """
    out = [np.array(x) for x in op.run(leaves)]
    return [check_shape(op, i, x, leaves) for i, x in enumerate(out)]


def _run(op, leaves) -> list[np.ndarray]:
    out = own_outputs(op, leaves)
    return [
        _cast(op, i, x, t.dtype) for i, (x, t) in enumerate(zip(out, op.out_types, strict=True))
    ]


def check_shape(
    op: AbstractHostOp,
    i: int,
    x: np.ndarray,
    leaves: Sequence[np.ndarray],
    do: str = "Return an array of the promised shape, or promise another one.",
) -> np.ndarray:
    """Output number `i`, given the inputs, as an array with the axes of `vmap`; raises if it
    has another shape than was promised."""
    batch = batch_shape(op, leaves)
    shape = op.out_types[i].shape
    if x.shape == batch + shape:
        return x
    own = x.shape[: x.ndim - len(shape)]
    if batch and len(own) <= len(batch) and x.shape[len(own) :] == shape:
        own = (1,) * (len(batch) - len(own)) + own
        may_be_one = _axes_of_size_one(op, leaves, batch)
        if op is not op.call and not np.any(x):  # a zero cotangent
            may_be_one = [True] * len(batch)
        axes = zip(own, batch, may_be_one, strict=True)
        if all(n == m or (n == 1 and one_is_enough) for n, m, one_is_enough in axes):
            return np.broadcast_to(x.reshape(own + shape), batch + shape)
    promised = jax.ShapeDtypeStruct(batch + shape, op.out_types[i].dtype)
    if batch:
        do += (
            f" With `vmap_method={op.vmap_method!r}` the function is given the axes of "
            "`jax.vmap` in front, and returns them; with `'sequential'` it is not."
        )
        if len(set(op.in_ranks)) > 1:
            do += f" {_BROADCAST_ARGUMENTS}"
    raise _misfit(op, i, "shape", x, promised, do)


def _axes_of_size_one(op, leaves, batch) -> list[bool]:
    """In which of the axes of `vmap` an output may have one entry: it may depend only on
    arguments that are not batched there. It may not if arguments have another number of axes
    than each other: NumPy then aligns an axis of `vmap` with another axis."""
    if len(set(op.call.in_ranks)) > 1:
        return [False] * len(batch)
    pairs = list(zip(leaves, op.in_ranks, strict=True))
    own = [x.shape[: x.ndim - rank] for x, rank in pairs]
    own = [(1,) * (len(batch) - len(axes)) + axes for axes in own]
    return [any(axes[k] == 1 for axes in own) for k in range(len(batch))]


def _cast(op, i, x, dtype) -> np.ndarray:
    if x.dtype == dtype:
        return x
    kinds = _kind(x.dtype), _kind(dtype)
    if kinds in (("float", "float"), ("complex", "complex"), ("float", "complex")):
        with np.errstate(over="ignore"):  # as JAX: what float32 can't hold is infinite
            return x.astype(dtype)
    if kinds == ("integer", "integer"):
        cast = x.astype(dtype)
        if np.array_equal(cast, x):
            return cast
    promised = jax.ShapeDtypeStruct(x.shape, dtype)
    do = (
        "Floats are cast to the promised precision, and integers that fit to the promised "
        "width. Nothing else is: return what was promised, or promise what is returned."
    )
    raise _misfit(op, i, "dtype", x, promised, do)


def _kind(dtype) -> str:
    for name, kind in _KINDS.items():
        if jnp.issubdtype(dtype, kind):
            return name
    return str(dtype)


_KINDS = {"float": jnp.floating, "complex": jnp.complexfloating, "integer": jnp.integer}


def _misfit(op, i, what, got, promised, do) -> RuleError:
    return rule_error(
        f"{described(op)} returned another {what} than was promised.",
        f"at {op.out_path(i)}: promised was {type_of(promised)}, returned was {type_of(got)}",
        op.place,
        do=do,
    )
