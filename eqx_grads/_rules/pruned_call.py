"""A call without the outputs that nobody uses: dead-code elimination for the primitive."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval as pe

from .._tangent_spaces import is_differentiable
from .abstract_call import AbstractCall, tangents_of_call


def prune(used_outputs, *live_and_eqn):
    """Drop the outputs that nobody uses, and the operands that only these need."""
    eqn = live_and_eqn[-1]  # JAX 0.11 added an argument before it
    if not any(used_outputs) and not eqn.effects:
        return [False] * len(eqn.invars), None
    call, call_jaxpr, n_consts = (eqn.params[k] for k in ("call", "call_jaxpr", "n_consts"))
    if call_jaxpr is None or all(used_outputs):
        return [True] * len(eqn.invars), eqn
    jaxpr = call_jaxpr.jaxpr
    _, used = pe.dce_jaxpr(jaxpr, used_outputs)
    if not all(used):
        by_rule = _used_by_rule(call, call_jaxpr, n_consts, used_outputs)
        used = [a or b for a, b in zip(used, by_rule, strict=True)]
    jaxpr, _ = pe.dce_jaxpr(jaxpr, used_outputs, used)
    call = PrunedCall(call, n_consts, used_outputs, used, call_jaxpr.in_avals)
    new_eqn = eqn.replace(
        invars=[v for v, flag in zip(eqn.invars, used, strict=True) if flag],
        outvars=[v for v, flag in zip(eqn.outvars, used_outputs, strict=True) if flag],
        params={
            "call": call,
            "call_jaxpr": ClosedJaxpr(jaxpr, ()),
            "n_consts": sum(used[:n_consts]),
        },
        effects=jaxpr.effects,
    )
    return used, new_eqn


def _used_by_rule(call, call_jaxpr, n_consts, used_outputs) -> list[bool]:
    """Which operands the tangents of the used outputs need. A program may be differentiated
    after it was pruned."""
    types = call_jaxpr.in_avals
    kept = [
        i
        for i, (used, t) in enumerate(zip(used_outputs, call_jaxpr.out_avals, strict=True))
        if used and is_differentiable(t)
    ]
    if not kept:
        return [False] * len(types)
    if call.is_reverse:  # its backward rule gets all of the residuals and cotangents
        return [True] * len(types)
    args = [i for i in range(n_consts, n_consts + call.n_args) if is_differentiable(types[i])]
    trace = jax.make_jaxpr(ft.partial(tangents_of_call, call, n_consts, args))
    try:
        tangents = trace(*types, *(types[i].to_tangent_aval() for i in args))
    except NameError:  # the axis of a `vmap` or a mesh, which is not known out here
        return [True] * len(types)
    flags = [i in kept for i in range(len(used_outputs))]
    _, used = pe.dce_jaxpr(tangents.jaxpr, flags)
    used_tangents = {i for i, flag in zip(args, used[len(types) :], strict=True) if flag}
    return [flag or i in used_tangents for i, flag in enumerate(used[: len(types)])]


class PrunedCall(AbstractCall):
    """A call without the outputs that nobody uses, and the operands that only these need."""

    def __init__(self, call, n_consts, used_outputs, used_operands, types):
        self.name = call.name
        self.n_operands = sum(used_operands)
        self.n_args = sum(used_operands[: n_consts + call.n_args])
        self.is_reverse = call.is_reverse
        self._call = call
        self._n_consts = n_consts
        self._outputs = [i for i, used in enumerate(used_outputs) if used]
        self._operands = [i for i, used in enumerate(used_operands) if used]
        self._types = types

    def primal(self, operands):
        out = self._call.primal(self._all_operands(operands))
        return [out[i] for i in self._outputs]

    def jvp(self, primals, tangents):
        ts: list[Any] = [None] * len(self._types)
        for i, t in zip(self._operands, tangents, strict=True):
            ts[i] = t
        out, t_out = self._call.jvp(self._all_operands(primals), ts[self._n_consts :])
        return [out[i] for i in self._outputs], [t_out[i] for i in self._outputs]

    def vmap(self, axis_data, batched, operands):
        flags = [False] * len(self._types)
        for i, flag in zip(self._operands, batched, strict=True):
            flags[i] = flag
        if any(flags[: self._n_consts]):
            return None
        all_operands = self._all_operands(operands)
        result = self._call.vmap(axis_data, flags[self._n_consts :], all_operands)
        if result is None:
            return None
        out, out_batched = result
        return [out[i] for i in self._outputs], [out_batched[i] for i in self._outputs]

    def _all_operands(self, operands):
        # Nothing that is kept depends on what zeros stand for.
        full = dict(zip(self._operands, operands, strict=True))
        return [
            full[i] if i in full else jnp.zeros(t.shape, t.dtype)
            for i, t in enumerate(self._types)
        ][self._n_consts :]
