"""The primitive for a call of a function with rules.

Neither of JAX's own will do. A `jax.custom_jvp` is batched by batching its rule, so a batching
rule of the user's never sees the call (clause 3 of the contract); when a staged one is batched,
the function decides which outputs have the batch dimension, although a tangent may have it
where its output has not; and up to JAX 0.11 the second derivative of a call inside `lax.scan`
is that of the function, not of the rule. A `jax.custom_vjp` has no forward mode, and
`jax.custom_batching.custom_vmap` no reverse mode.
"""

import abc
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Literal, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from .._errors import rule_error
from .._jaxprs.current_trace import is_staged
from .._jaxprs.dependence import depends
from .._tangent_spaces import is_differentiable
from .rule import NEEDS_VALUES


class AbstractCall(abc.ABC):
    """A function of arrays with rules, all of them flat. Hashed by identity; no tracers, as
    JAX keeps it for as long as it keeps the program."""

    name: str
    n_args: int  # so many of the operands, the first ones, can have a tangent
    # Whether a tangent may depend on operands that its output does not depend on, in a way
    # that `jvp` does not show: the backward rule of a `custom_vjp` returns all cotangents.
    is_reverse: bool

    @abc.abstractmethod
    def primal(self, operands: Sequence[Any]) -> list[Any]:
        """The outputs of the function."""

    @abc.abstractmethod
    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The outputs and their tangents; `None` is zero, in both lists."""

    @abc.abstractmethod
    def vmap(
        self, axis_data: Any, batched: Sequence[bool], operands: Sequence[Any]
    ) -> tuple[list[Any], list[bool]] | None:
        """The outputs by the user's batching rule, and which of them are batched; `None` if
        there is no rule. The batch dimension is the first."""

    def __repr__(self) -> str:  # what a jaxpr shows
        return self.name


def bind_call(call: AbstractCall, operands: Sequence[Any]) -> list[Any]:
    """Call `call` by way of JAX, so that transformations see its rules."""
    if not is_staged(operands):
        return call_p.bind(*operands, call=call, call_jaxpr=None, n_consts=0)
    # The function is traced here and never again: for its types, for batching, for lowering
    # and for the interpreters of other libraries.
    jaxpr = _trace(call, [jax.typeof(x) for x in operands])
    consts, call_jaxpr = jaxpr.consts, _consts_as_inputs(jaxpr)
    return call_p.bind(
        *consts, *operands, call=call, call_jaxpr=call_jaxpr, n_consts=len(consts)
    )


def _trace(call: AbstractCall, types: Sequence[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda *operands: list(call.primal(operands)))(*types)


def _consts_as_inputs(closed: ClosedJaxpr) -> ClosedJaxpr:
    """As JAX does it: what is constant for the function may not be so for the program that it
    is in, and is to be stored there once."""
    if not closed.consts:
        return closed
    consts = closed.consts
    types = [*map(jax.typeof, consts), *closed.in_avals]
    with_consts = lambda *args: jax.core.eval_jaxpr(
        closed.jaxpr, args[: len(consts)], *args[len(consts) :]
    )
    return jax.make_jaxpr(with_consts)(*types)


call_p = Primitive("eqg_call")
call_p.multiple_results = True


def _impl(*operands, call, call_jaxpr, n_consts):
    del n_consts
    if call_jaxpr is None:
        return call.primal(operands)
    return jaxpr_as_fun(call_jaxpr)(*operands)


def _abstract_eval(*types, call, call_jaxpr, n_consts):
    del n_consts
    # Only a trace that `is_staged` does not know of leaves the jaxpr to be made here.
    jaxpr = _trace(call, types) if call_jaxpr is None else call_jaxpr
    return jaxpr.out_avals, jaxpr.effects


def _jvp(primals, tangents, *, call, call_jaxpr, n_consts):
    ts = [
        None if type(t) is ad.Zero or not is_differentiable(x) else t
        for x, t in zip(primals, tangents, strict=True)
    ]
    if any(t is not None for t in ts[:n_consts]):
        raise rule_error(
            f"`{call.name}` was differentiated with respect to a value that it closes over.",
            "at a value that was not found among its arguments, closures and attributes",
            do="A rule gives derivatives with respect to arguments. Make the value a "
            "positional parameter, or close over `jax.lax.stop_gradient` of it.",
        )
    if all(t is None for t in ts):  # JAX counts integers as perturbed in places
        out = call_p.bind(*primals, call=call, call_jaxpr=call_jaxpr, n_consts=n_consts)
        t_out = [None] * len(out)
    else:
        out, t_out = call.jvp(primals[n_consts:], ts[n_consts:])
    return list(out), [
        ad.Zero(jax.typeof(x).to_tangent_aval()) if t is None else t
        for x, t in zip(out, t_out, strict=True)
    ]


def _transpose(cts, *operands, call, call_jaxpr, n_consts):
    """A linear function, applied to a tangent: transpose what it does."""
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    used = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]

    def of_linear(*xs):
        full = list(operands)
        for i, x in zip(linear, xs, strict=True):
            full[i] = x
        out = _impl(*full, call=call, call_jaxpr=call_jaxpr, n_consts=n_consts)
        return [out[i] for i in used]

    transpose = jax.linear_transpose(of_linear, *(operands[i].aval for i in linear))
    ct_operands: list[Any] = [None] * len(operands)
    for i, ct in zip(linear, transpose([cts[i] for i in used]), strict=True):
        ct_operands[i] = ct
    return ct_operands


def _batch(axis_data, operands, dims, *, call, call_jaxpr, n_consts):
    if all(dim is None for dim in dims):
        out = call_p.bind(*operands, call=call, call_jaxpr=call_jaxpr, n_consts=n_consts)
        return out, [None] * len(out)
    operands = [
        x if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    batched = [dim is not None for dim in dims]
    result = None
    if not any(batched[:n_consts]):
        result = call.vmap(axis_data, batched[n_consts:], operands[n_consts:])
    if result is None:
        batched_call = _BatchedCall(call, axis_data, batched, call_jaxpr, n_consts)
        out = bind_call(batched_call, operands)
        assert batched_call.out_batched is not None
        result = out, batched_call.out_batched
    out, out_batched = result
    return list(out), [0 if b else None for b in out_batched]


class _BatchedCall(AbstractCall):
    """A call for a whole batch: `vmap` of the function, and `vmap` of its rule.

    `out_batched` says which outputs have the batch dimension: those whose value depends on a
    batched operand, and those whose tangent does. It is decided by the first trace of the
    function or of the rule, and kept for later ones.
    """

    def __init__(self, call, axis_data, batched, call_jaxpr, n_consts):
        self.name = call.name
        self.n_args = n_consts + call.n_args
        self.is_reverse = call.is_reverse
        self.out_batched: list[bool] | None = None
        self._call = call
        self._batched = batched
        self._n_consts = n_consts
        self._example: ClosedJaxpr | None = call_jaxpr  # the function of one example
        self._axes = [0 if b else None for b in batched]
        self._vmap = ft.partial(
            jax.vmap,
            axis_size=axis_data.size,
            axis_name=axis_data.name,
            spmd_axis_name=axis_data.spmd_name,
        )

    def primal(self, operands):
        try:
            example = self._trace_example(operands)
        except NEEDS_VALUES:  # of operands that are not batched, which is fine eagerly
            out = self._vmap(self._primal_of_example, self._axes)(*operands)
            self.out_batched = [True] * len(out)
            return out
        if self.out_batched is None:
            self.out_batched = self._depends_on_batch(example, operands)
        out = self._vmap(jaxpr_as_fun(example), self._axes)(*operands)
        return _select(out, self.out_batched)

    def jvp(self, primals, tangents):
        perturbed = [i for i, t in enumerate(tangents) if t is not None]
        has_tangent: list[bool] = []

        def one(xs, ts):
            full: list[Any] = [None] * len(xs)
            for i, t in zip(perturbed, ts, strict=True):
                full[i] = t
            out, t_out = self._call.jvp(xs[self._n_consts :], full[self._n_consts :])
            has_tangent[:] = [t is not None for t in t_out]
            return out, [t for t in t_out if t is not None]

        axes = (self._axes, [self._axes[i] for i in perturbed])
        out, ts = self._vmap(one, axes)(list(primals), [tangents[i] for i in perturbed])
        ts = iter(ts)
        t_out = [next(ts) if has else None for has in has_tangent]
        if self.out_batched is None:
            if all(map(is_differentiable, out)) and (self.is_reverse or len(out) == 1):
                self.out_batched = [True] * len(out)
            else:
                example = self._trace_example(primals)
                self.out_batched = self._depends_on_batch(example, primals)
        return _select(out, self.out_batched), _select(t_out, self.out_batched)

    def vmap(self, axis_data, batched, operands):
        return None  # a batching rule of the user's has had its turn

    def _primal_of_example(self, *operands):
        return self._call.primal(operands[self._n_consts :])

    def _trace_example(self, operands) -> ClosedJaxpr:
        if self._example is None:
            self._example = self._trace(self._primal_of_example, operands, self._axes)
        return self._example

    def _trace(self, fn, operands, axes) -> ClosedJaxpr:
        """`fn` of one example as a jaxpr. Traced inside `vmap`, where its axis has a name."""
        traced: list[ClosedJaxpr] = []

        def one(*xs):
            traced.append(jax.make_jaxpr(fn)(*map(jax.typeof, xs)))
            return ()

        jax.eval_shape(self._vmap(one, axes), *operands)
        return traced[0]

    def _depends_on_batch(self, example, operands) -> list[bool]:
        values = _depending(example, self._batched)
        inexact = [is_differentiable(t) for t in example.out_avals]
        if self.is_reverse:
            return [v or x for v, x in zip(values, inexact, strict=True)]
        if all(v or not x for v, x in zip(values, inexact, strict=True)):
            return values
        # The rule may say otherwise: the value of `replace_gradient` depends on one operand,
        # its tangent on the other.
        first, last = self._n_consts, self._n_consts + self._call.n_args
        args = [i for i in range(first, last) if is_differentiable(operands[i])]
        indices = [*range(len(operands)), *args]
        try:
            tangents = self._trace(
                ft.partial(_tangents, self._call, first, args),
                [operands[i] for i in indices],
                [self._axes[i] for i in indices],
            )
        except NEEDS_VALUES:
            return [v or x for v, x in zip(values, inexact, strict=True)]
        moves = _depending(tangents, [self._batched[i] for i in indices])
        return [v or t for v, t in zip(values, moves, strict=True)]


def _tangents(call, n_consts, args, *values):
    """The tangents of a call, as a function of the operands and the tangents of `args`; an
    empty array where there is none."""
    n = len(values) - len(args)
    ts: list[Any] = [None] * n
    for i, t in zip(args, values[n:], strict=True):
        ts[i] = t
    _, t_out = call.jvp(values[n_consts:n], ts[n_consts:])
    return [jnp.zeros(0) if t is None else t for t in t_out]


class _PrunedCall(AbstractCall):
    """A call without the outputs that nobody uses, and the operands that only these need."""

    def __init__(self, call, n_consts, used_outputs, used_operands, types):
        self.name = call.name
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


def _dce(used_outputs, eqn):
    """Drop the outputs that nobody uses, and the operands that only these need."""
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
    call = _PrunedCall(call, n_consts, used_outputs, used, call_jaxpr.in_avals)
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
    trace = jax.make_jaxpr(ft.partial(_tangents, call, n_consts, args))
    try:
        tangents = trace(*types, *(types[i].to_tangent_aval() for i in args))
    except NameError:  # the axis of a `vmap` or a mesh, which is not known out here
        return [True] * len(types)
    flags = [i in kept for i in range(len(used_outputs))]
    _, used = pe.dce_jaxpr(tangents.jaxpr, flags)
    used_tangents = {i for i, flag in zip(args, used[len(types) :], strict=True) if flag}
    return [flag or i in used_tangents for i, flag in enumerate(used[: len(types)])]


def _depending(jaxpr: ClosedJaxpr, flags: Sequence[bool]) -> list[bool]:
    """Which outputs depend on a flagged input."""
    flagged = depends(jaxpr, flags)
    return [not isinstance(v, Literal) and v in flagged for v in jaxpr.jaxpr.outvars]


def _select(values, batched):
    """`values`, of which all have the batch dimension, without it where not `batched`."""
    return [x if b or x is None else x[0] for x, b in zip(values, batched, strict=True)]


call_p.def_impl(_impl)
call_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose
batching.fancy_primitive_batchers[call_p] = _batch
mlir.register_lowering(call_p, mlir.lower_fun(_impl, multiple_results=True))
pe.dce_rules[call_p] = _dce
