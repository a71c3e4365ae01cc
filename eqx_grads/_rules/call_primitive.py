"""One JAX primitive: a call that has a batching rule of its own, and a forward rule.

`jax.custom_batching.custom_vmap` can't be differentiated in reverse mode unless `vmap` comes
first, and a `jax.custom_jvp` is batched by batching its rule. Here the batching rule sees the
call as it stands, before differentiation takes it apart (clause 3 of the contract).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .linear_primitive import lifetime


class VmapCall:
    """A function of arrays with rules, all of them flat. Hashed by identity; no tracers.

    - `primal(*operands)` returns a list of arrays.
    - `jvp(primals, tangents)` returns two lists; zero is JAX's `SymbolicZero`, both ways.
    - `vmap(axis_data, batched, *operands)` gets the batch axis in front, and returns a list
        of arrays and a list of Python bools: which of them have it.
    """

    def __init__(
        self,
        name: str,
        primal: Callable[..., Sequence[Any]],
        jvp: Callable[..., Any],
        vmap: Callable[..., tuple[Sequence[Any], Sequence[bool]]],
    ):
        self.name = name
        self.primal = primal
        self.jvp = jvp
        self.vmap = vmap

    def __repr__(self):  # what a jaxpr shows
        return self.name


def vmap_call(call: VmapCall, operands: Sequence[Any]) -> list[Any]:
    return call_p.bind(*operands, call=call, lifetime=lifetime())


call_p = Primitive("eqg_call")
call_p.multiple_results = True


def _impl(*operands, call, lifetime):
    del lifetime
    return list(call.primal(*operands))


def _abstract_eval(*avals, call, lifetime):
    del lifetime
    jaxpr = jax.make_jaxpr(lambda *xs: list(call.primal(*xs)))(*avals)
    return jaxpr.out_avals


def _jvp(primals, tangents, *, call, lifetime):
    del lifetime
    tangents = [SymbolicZero(t.aval) if type(t) is ad.Zero else t for t in tangents]
    out, t_out = call.jvp(primals, tangents)
    return out, [ad.Zero(t.aval) if type(t) is SymbolicZero else t for t in t_out]


def _transpose(cts, *operands, call, lifetime):
    """A linear function, applied to a tangent: transpose what it does."""
    del lifetime
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    live = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]

    def of_linear(*xs):
        full = list(operands)
        for i, x in zip(linear, xs, strict=True):
            full[i] = x
        out = call.primal(*full)
        return [out[i] for i in live]

    transpose = jax.linear_transpose(of_linear, *(operands[i].aval for i in linear))
    ct_operands: list[Any] = [None] * len(operands)
    for i, ct in zip(linear, transpose([cts[i] for i in live]), strict=True):
        ct_operands[i] = ct
    return ct_operands


def _batch(axis_data, operands, dims, *, call, lifetime):
    if all(dim is None for dim in dims):
        out = call_p.bind(*operands, call=call, lifetime=lifetime)
        return out, [None] * len(out)
    operands = [
        x if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    batched = [dim is not None for dim in dims]
    out, out_batched = call.vmap(axis_data, batched, *operands)
    return list(out), [0 if b else None for b in out_batched]


call_p.def_impl(_impl)
call_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose
batching.fancy_primitive_batchers[call_p] = _batch
mlir.register_lowering(call_p, mlir.lower_fun(_impl, multiple_results=True))
