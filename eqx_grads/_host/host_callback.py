"""The one place that calls NumPy code from a JAX program, and passes on its exceptions."""

import dataclasses
import pathlib
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._errors import RuleError, type_of
from .._jaxprs.current_trace import is_staged, outside_of_linearization
from .._jaxprs.varying import vary_alike
from . import bits
from .host_op import BROADCAST_ARGUMENTS, HostOp


VMAP_METHODS = ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all")


def call_on_host(op: HostOp, leaves: Sequence[Any]) -> list[jax.Array]:
    """The outputs of `op`, of the types that it promises.

    Where the values are known, `op` is simply called, so that an exception arrives as it was
    raised. In a program that is being traced the call is a `jax.pure_callback`.
    """
    if any(isinstance(x, Tracer) for x in leaves) or is_staged(leaves):
        # Its type does not say that it varies over a mesh as the arguments do.
        return vary_alike(_call_in_program(op, leaves), leaves)
    try:
        out = op.cast_outputs([np.asarray(x) for x in leaves])
    except Exception as error:
        error.add_note(
            f"This was raised on the host, by `{op.name}`, called with {_given(op, leaves)}."
        )
        raise
    with outside_of_linearization(()):
        return [jnp.asarray(x) for x in out]


def _call_in_program(op: HostOp, leaves: Sequence[Any]) -> list[jax.Array]:
    has_bits = bits.needs_bits([*op.in_types, *op.out_types])
    call, types = _Callback(op, has_bits), op.out_types
    if not has_bits:
        return list(jax.pure_callback(call, types, *leaves, vmap_method=op.vmap_method))
    leaves = [jnp.asarray(x) for x in leaves]
    # Integers have no tangents. From the empty parts of the arrays JAX sees that the arrays are
    # differentiated, and raises, as for any callback. The checks do this, without the rules.
    empty = [x.ravel()[:0] for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    leaves, types = [bits.to_bits(x) for x in leaves], tuple(map(bits.bits_type, types))
    out = jax.pure_callback(call, types, *leaves, *empty, vmap_method=op.vmap_method)
    return [bits.from_bits(x, t.dtype) for x, t in zip(out, op.out_types, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Callback:
    """What JAX keeps of a callback, and calls. `has_bits`: see `bits.py`."""

    op: HostOp
    has_bits: bool

    def __call__(self, *leaves):
        leaves = [np.asarray(x) for x in leaves]
        if self.has_bits:
            pairs = zip(leaves, self.op.in_types, strict=False)  # empty ones are behind them
            leaves = [bits.from_bits_on_host(x, t.dtype) for x, t in pairs]
        try:
            out = self.op.cast_outputs(leaves)
        except RuleError as error:
            # The text says it all, and JAX writes the stack in front of it, twice.
            raise error.with_traceback(None) from None
        except Exception as error:
            # All that leaves a compiled program is the text of the last exception.
            raise RuntimeError(_describe(self.op, leaves, error)) from None
        return tuple(map(bits.to_bits_on_host, out) if self.has_bits else out)


def _describe(op, leaves, error) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY)]
    text = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)])
    do = (
        "The program is compiled, and so can't raise the exception itself. Call the function "
        "outside of `jax.jit` and `jax.vmap` to catch it, or to debug it."
    )
    if any(op.own_axes(leaves)):
        do = (
            f'Under `jax.vmap`, `vmap_method="{op.vmap_method}"` puts the axes of the batch in '
            f"front. {BROADCAST_ARGUMENTS}"
        )
    return (
        f"`{op.name}` raised an exception on the host.\n"
        f"  {op.place}\n  called with {_given(op, leaves)}\n{text.rstrip()}\n{do}"
    )


_LIBRARY = str(pathlib.Path(__file__).parents[1])


def _given(op, leaves) -> str:
    """The types of the arrays, and those without the axes of `vmap` if there are any."""
    given, own = (", ".join(map(type_of, xs)) for xs in (leaves, op.in_types))
    given = given or "no arrays"
    return f"{given}, under `vmap` of {own}" if any(op.own_axes(leaves)) else given
