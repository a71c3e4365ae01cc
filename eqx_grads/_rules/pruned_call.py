"""The DCE rule of the call primitive: drop unused outputs, and operands only they need."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval as pe

from .._jaxprs.dependence import variables
from .._tangent_spaces import is_differentiable
from .abstract_call import AbstractCall, tangents_of_call


def prune(used_outputs, *live_and_eqn):
    """Drop the outputs that nobody uses, and the operands that only these need."""
    eqn = live_and_eqn[-1]  # JAX 0.11 added an argument before it
    if not any(used_outputs) and not eqn.effects:
        return [False] * len(eqn.invars), None
    call_jaxpr = eqn.params["call_jaxpr"]
    if call_jaxpr is None or all(used_outputs):
        return [True] * len(eqn.invars), eqn
    used = _used_operands(eqn.params, used_outputs, frozenset())
    jaxpr, _ = pe.dce_jaxpr(call_jaxpr.jaxpr, used_outputs, used)
    call, n_consts = eqn.params["call"], eqn.params["n_consts"]
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


def _used_operands(params, used_outputs, visited: frozenset[Any]) -> list[bool]:
    """Which operands of a call the used outputs need, and their tangents: a program may be
    differentiated after it was pruned.

    A rule usually calls its own function, for the value. The rules in `visited` are being
    looked at, and not looked at once more.
    """
    call, call_jaxpr = params["call"], params["call_jaxpr"]
    used = _used_inputs(call_jaxpr, used_outputs, visited)
    outputs = zip(used_outputs, call_jaxpr.out_avals, strict=True)
    if all(used) or call.rules_key in visited:
        return used
    if not any(flag and is_differentiable(t) for flag, t in outputs):
        return used
    if call.is_reverse:  # its backward rule gets all of the residuals and cotangents
        return [True] * len(used)
    types, n_consts = call_jaxpr.in_avals, params["n_consts"]
    args = [i for i in range(n_consts, n_consts + call.n_args) if is_differentiable(types[i])]
    trace = jax.make_jaxpr(ft.partial(tangents_of_call, call, n_consts, args))
    try:
        rule = trace(*types, *(types[i].to_tangent_aval() for i in args))
    except Exception:
        # The rule has not been asked for: what it raises is for the one who differentiates.
        return [True] * len(used)
    twice = [*used_outputs, *used_outputs]
    by_rule = _used_inputs(rule, twice, visited | {call.rules_key})
    tangents = {i for i, flag in zip(args, by_rule[len(types) :], strict=True) if flag}
    by_rule = [flag or i in tangents for i, flag in enumerate(by_rule[: len(types)])]
    return [a or b for a, b in zip(used, by_rule, strict=True)]


def _used_inputs(program, used_outputs, visited) -> list[bool]:
    """Which inputs of a program the used outputs need."""
    jaxpr = program.jaxpr
    outvars = zip(jaxpr.outvars, used_outputs, strict=True)
    wanted = set(variables(v for v, flag in outvars if flag))
    for eqn in reversed(jaxpr.eqns):
        used = [v in wanted for v in eqn.outvars]
        if not any(used) and not eqn.effects:
            continue
        flags = [True] * len(eqn.invars)
        if eqn.primitive.name == "eqg_call" and eqn.params["call_jaxpr"] is not None:
            flags = _used_operands(eqn.params, used, visited)
        used_invars = [v for v, flag in zip(eqn.invars, flags, strict=True) if flag]
        wanted.update(variables(used_invars))
    return [v in wanted for v in jaxpr.invars]


class PrunedCall(AbstractCall):
    """A call without the outputs that nobody uses, and the operands that only these need."""

    def __init__(self, call, n_consts, used_outputs, used_operands, types):
        self.name = call.name
        used_operands = used_operands[n_consts:]
        self.n_operands = sum(used_operands)
        self.n_args = sum(used_operands[: call.n_args])
        self.is_reverse = call.is_reverse
        self.rules_key = call.rules_key
        self._call = call
        self._outputs = [i for i, used in enumerate(used_outputs) if used]
        self._operands = [i for i, used in enumerate(used_operands) if used]
        self._types = types[n_consts:]

    def primal(self, operands):
        out = self._call.primal(self._all_operands(operands))
        return [out[i] for i in self._outputs]

    def jvp(self, primals, tangents):
        ts: list[Any] = [None] * len(self._types)
        for i, t in zip(self._operands, tangents, strict=True):
            ts[i] = t
        out, t_out = self._call.jvp(self._all_operands(primals), ts)
        return [out[i] for i in self._outputs], [t_out[i] for i in self._outputs]

    def vmap(self, axis_data, batched, operands):
        flags = [False] * len(self._types)
        for i, flag in zip(self._operands, batched, strict=True):
            flags[i] = flag
        result = self._call.vmap(axis_data, flags, self._all_operands(operands))
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
        ]
