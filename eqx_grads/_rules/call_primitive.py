"""The primitive for a call with rules: its JVP, transpose, batching rule and lowering.

Neither of JAX's own will do. JAX batches a `jax.custom_jvp` by batching its rule, so a batching
rule of the user's never sees the call (clause 3 of the contract). In a staged call, the
function decides which outputs have the batch dimension, although a tangent may have it where
its output has not. Up to JAX 0.11 the second derivative of a call inside `lax.scan` comes from
the function, not from the rule. A `jax.custom_vjp` has no forward mode, and
`jax.custom_batching.custom_vmap` no reverse mode.
"""

import contextvars
import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import zero_from_primal
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Primitive
from jax.interpreters import ad, batching, mlir

from .._errors import code_of, name_of, rule_error, RuleError
from .._jaxprs.current_trace import is_of_innermost_trace, is_staged, is_valid, setting
from .._jaxprs.dependence import consts_as_inputs
from .._jaxprs.evaluate import trace
from .._jaxprs.linearity import CONSTANT, linear_in, MAYBE_ZERO, why_nonlinear
from .._jaxprs.operands import at, fill, flagged, restricted
from .._jaxprs.structure import (
    CallWithRule,
    equations,
    inner_programs,
    read_call,
    register,
)
from .._tangent_spaces import is_differentiable
from .linear_primitive import transpose_of, vmap_over, with_batch_in_front
from .rule import try_to_trace


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A function of arrays with rules. Hashed by identity; no tracers, as JAX keeps it for as
    long as it keeps the program.

    - `primal(operands)` returns the list of outputs.
    - `jvp(primals, tangents)` returns the outputs and their tangents. `None` is zero, in both
        lists of tangents.
    - `vmap(axis_data, batched, operands)` returns the outputs by the user's batching rule, and
        which of them are batched; `None` without a rule. The batch dimension is the first.
    - `fn` is the function that the user wrote, for errors. It may have placeholders.
    - `n_operands`: the number of operands. Only the first `n_args` can have a tangent.
    - `rules_key`: the same object for all calls with the same rules.
    """

    fn: Any
    n_operands: int
    n_args: int
    rules_key: Any
    primal: Callable[[Sequence[Any]], list[Any]]
    jvp: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    vmap: Callable[..., tuple[list[Any], list[bool]] | None]

    @property
    def name(self) -> str:
        return name_of(self.fn)

    def __repr__(self) -> str:  # what a jaxpr shows
        return self.name

    def with_more_operands(self, n: int, primal: Any, jvp: Any) -> "Call":
        """A call with `n` more operands in front, whose batching rule was tried before."""
        return dataclasses.replace(
            self,
            n_operands=n + self.n_operands,
            n_args=n + self.n_args,
            primal=primal,
            jvp=jvp,
            vmap=lambda axis_data, batched, operands: None,
        )


def bind_call(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Call `call` by way of JAX, so that transformations see its rules."""
    if not is_staged(operands):
        return call_p.bind(*operands, call=call, call_jaxpr=None, n_consts=0)
    # The function is traced here and never again: for its types, for batching, for lowering
    # and for the interpreters of other libraries.
    jaxpr = _trace(call, [jax.typeof(x) for x in operands])
    if not all(map(is_valid, jaxpr.consts)):
        raise invalid_tracer(call.name)
    consts, call_jaxpr = jaxpr.consts, consts_as_inputs(jaxpr)
    return call_p.bind(
        *consts, *operands, call=call, call_jaxpr=call_jaxpr, n_consts=len(consts)
    )


def invalid_tracer(name: str) -> RuleError:
    return rule_error(
        f"`{name}`, or one of its rules, holds a traced value that is no longer valid, where "
        "the library can't find it.",
        "closures, default arguments, attributes, containers and Modules were searched",
        do="Pass this value as an argument.",
    )


def _trace(call: Call, types: Sequence[Any]) -> ClosedJaxpr:
    code = code_of(call.fn)
    source = code and f"{call.name} at {code.co_filename}:{code.co_firstlineno}"
    return trace(lambda *operands: list(call.primal(operands)), types, source)


def _extended_call(call: Call, traced: ClosedJaxpr, n_extra: int, n_consts: int) -> Call:
    """A call whose function was transformed by another interpreter, with the same rules. The
    first operands and outputs are the interpreter's, for example the errors of checkify."""
    run, first = jaxpr_as_fun(traced), n_extra + n_consts

    def primal(operands):
        return list(run(*operands))

    def jvp(primals, tangents):
        out = primal(primals)
        _, t_out = call.jvp(primals[first:], tangents[first:])
        return out, [None] * (len(out) - len(t_out)) + t_out

    return call.with_more_operands(first, primal, jvp)


class _CallPrimitive(Primitive):
    """A primitive that also has the calling convention of JAX's own call primitives.

    An interpreter that enters functions (`jax.experimental.checkify`) takes `call_jaxpr` away,
    and binds its own function of more operands and more outputs in its place, as `subfuns`.
    """

    def bind(self, *operands, subfuns=None, **params):
        if subfuns is None:
            return Primitive.bind(self, *operands, **params)
        (fn,) = subfuns
        # Traced once: JAX's function objects keep what they learn in their only run.
        traced = trace(fn.call_wrapped, list(map(jax.typeof, operands)))
        call, n_consts = params["call"], params["n_consts"]
        n_extra = len(operands) - n_consts - call.n_operands
        return bind_call(_extended_call(call, traced, n_extra, n_consts), operands)

    def to_lojax(self, *operands, **params):
        """JAX 0.12 replaces a call by this before lowering, if its function has a "high"
        operation, such as a `jax.checkpoint` with the flag `jax_remat3`."""
        return _impl(*operands, **params)


call_p = _CallPrimitive("eqg_call")
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


def _jvp(primals, tangents, **params):
    call, n_consts = params["call"], params["n_consts"]
    ts = [
        None if type(t) is ad.Zero or not is_differentiable(x) else t
        for x, t in zip(primals, tangents, strict=True)
    ]
    if any(t is not None for t in ts[:n_consts]):
        raise _closed_over(call)
    if all(t is None for t in ts):  # JAX counts integers as perturbed in places
        out = call_p.bind(*primals, **params)
        t_out = [None] * len(out)
    else:
        out, t_out = call.jvp(primals[n_consts:], ts[n_consts:])
    return list(out), [
        ad.Zero(jax.typeof(x).to_tangent_aval()) if t is None else t
        for x, t in zip(out, t_out, strict=True)
    ]


WAY_OUT = (
    "A rule gives derivatives with respect to the leaves of its arguments. Make the value a "
    "positional parameter, or a leaf of one, as in an `eqx.Partial` or an `eqx.Module` "
    "(decorate its method: `self` is an argument), or close over `jax.lax.stop_gradient` of it."
)


def _closed_over(call: Call) -> RuleError:
    what = f"`{call.name}` was differentiated with respect to a value that it closes over."
    where = "at a value that was not found among its arguments, closures and attributes"
    return rule_error(what, where, do=WAY_OUT)


# The rules of the calls that are being transposed: a rule may call its own function.
_transposed = contextvars.ContextVar[frozenset[Any]]("transposed", default=frozenset())


def _transpose(cts, *operands, **params):
    """A linear function, applied to a tangent: transpose its derivative, which its rules give.

    The derivative of a linear function is the same everywhere. So the rules run at zero, the
    one point that is known here.
    """
    call, call_jaxpr, n_consts = params["call"], params["call_jaxpr"], params["n_consts"]
    linear = flagged(map(ad.is_undefined_primal, operands))
    if any(i < n_consts for i in linear):
        raise _closed_over(call)
    _check_linear(call, call_jaxpr, operands, flagged(type(ct) is not ad.Zero for ct in cts))
    zeros = [ad.zeros_like_aval(operands[i].aval) for i in linear]
    primals = fill(operands, linear, zeros)[n_consts:]

    def derivative(*xs):
        tangents = [x if i in linear else None for i, x in enumerate(xs)]
        out, t_out = call.jvp(primals, tangents[n_consts:])
        pairs = zip(out, t_out, strict=True)
        return [jnp.zeros_like(x) if t is None else t for x, t in pairs]

    # A forward rule may apply its own function to its tangents, and then says nothing of the
    # transpose.
    is_inner = call.rules_key in _transposed.get()
    run = ft.partial(_impl, **params) if is_inner else derivative
    with setting(_transposed, _transposed.get() | {call.rules_key}):
        return transpose_of(run, operands, cts)


def _check_linear(call, call_jaxpr, operands, used):
    """Raise if the function is seen not to be linear: its rules would still give something.

    An operand that is added may be zero: a forward rule of `w @ x + b` may call the function
    with the tangent of `x` and a zero `b`. JAX transposes each addition of an operand too.
    """
    flags = [ad.is_undefined_primal(x) for x in operands]
    if call_jaxpr is None:
        pairs = zip(operands, flags, strict=True)
        call_jaxpr = _trace(call, [x.aval if f else jax.typeof(x) for x, f in pairs])
    statuses = linear_in(call_jaxpr, flags, others=MAYBE_ZERO)
    dependent = [statuses[i] for i in used if statuses[i].rank > CONSTANT.rank]
    reason = why_nonlinear(dependent)
    if reason is not None:
        raise rule_error(
            f"`{call.name}` was transposed, and is not linear: {reason}.",
            do="Only a linear function has a transpose. `jax.vjp` gives the transpose of the "
            "derivative of any function.",
        )


def batched_call(
    call: Call,
    axis_data: Any,
    batched: Sequence[bool],
    call_jaxpr: ClosedJaxpr | None,
    n_consts: int,
) -> tuple[Call, list[bool]]:
    """A call for a whole batch: `vmap` of the function, and `vmap` of its rule. And which
    outputs have the batch dimension, a list that is filled when the function or the rule runs.

    An output that can have a tangent has the batch dimension: its tangent may have it although
    its value does not. (The value of `replace_gradient` depends on one operand, and its tangent
    on the other.) Other outputs have the batch dimension if `jax.vmap` gives it to them. No
    output has it if no operand has it: then the axis is there only for its name.
    """
    # The function of one example, where it was traced before.
    traced = None if call_jaxpr is None else jaxpr_as_fun(call_jaxpr)
    axes = [0 if b else None for b in batched]
    out_batched: list[bool] = []
    is_mapped = any(batched)
    vmap = ft.partial(vmap_over(axis_data), out_axes=0 if is_mapped else None)

    def decide(out):
        may_vary = lambda x: is_differentiable(x) or is_of_innermost_trace(x)
        out_batched[:] = [is_mapped and may_vary(x) for x in out]
        return out

    def as_decided(out):
        pairs = zip(out, out_batched, strict=True)
        return [x if b or not is_mapped else x[0] for x, b in pairs]

    def primal(operands):
        run = traced or (lambda *xs: call.primal(xs[n_consts:]))
        return as_decided(vmap(lambda *xs: decide(run(*xs)), axes)(*operands))

    def jvp(primals, tangents):
        t_axes = [None if t is None else a for t, a in zip(tangents, axes, strict=True)]

        def one(xs, ts):
            out, t_out = call.jvp(xs[n_consts:], ts[n_consts:])
            return decide(out), t_out

        out, t_out = vmap(one, (axes, t_axes))(list(primals), list(tangents))
        return as_decided(out), t_out

    return call.with_more_operands(n_consts, primal, jvp), out_batched


def _batch(axis_data, operands, dims, **params):
    call, call_jaxpr, n_consts = params["call"], params["call_jaxpr"], params["n_consts"]
    if all(dim is None for dim in dims):
        uses = _uses_of_axis(axis_data.name, call, call_jaxpr, operands[n_consts:])
        if not any(uses):
            out = call_p.bind(*operands, **params)
            return out, [None] * len(out)
        if uses[1] or not uses[0] <= _REDUCTIONS:
            copies = jax.vmap(lambda x: x, None, axis_size=axis_data.size)
            operands = [*operands[:n_consts], *map(copies, operands[n_consts:])]
            dims = [None if i < n_consts else 0 for i in range(len(operands))]
    operands = with_batch_in_front(operands, dims)
    batched = [dim is not None for dim in dims]
    result = None
    if any(batched) and not any(batched[:n_consts]):
        result = call.vmap(axis_data, batched[n_consts:], operands[n_consts:])
    if result is None:
        of_batch, out_batched = batched_call(call, axis_data, batched, call_jaxpr, n_consts)
        result = bind_call(of_batch, operands), out_batched
    out, out_batched = result
    return list(out), [0 if b else None for b in out_batched]


# Of operands without the batch dimension, their results have none.
_REDUCTIONS = {"psum", "pmax", "pmin"}


def _uses_of_axis(
    name: Any, call: Call, call_jaxpr: ClosedJaxpr | None, operands: Sequence[Any]
) -> tuple[set[str], set[str]]:
    """The primitives that use the axis of a `vmap`: in the function and the forward pass of its
    rules, and in the backward pass, where each example has its own cotangent."""
    if type(name) is object:  # as JAX does where the user gave no name
        return set(), set()
    types, backward = list(map(jax.typeof, operands)), []

    def forward(*xs):
        live = flagged(map(is_differentiable, xs[: call.n_args]))
        of_live = restricted(lambda *ys: bind_call(call, ys), xs, live)
        out, pull_back = jax.vjp(of_live, *at(xs, live))
        cts = list(map(zero_from_primal, out))
        backward.append(jax.make_jaxpr(lambda: pull_back(cts))())
        return out, pull_back  # which holds the residuals

    def uses(*programs):
        eqns = [eqn for p in programs if p is not None for eqn in equations(p)]
        has_name = lambda eqn: any(getattr(e, "name", None) == name for e in eqn.effects)
        return {e.primitive.name for e in eqns if has_name(e) and not inner_programs(e)}

    value = call_jaxpr or try_to_trace(_trace, call, types)
    # Nobody has differentiated yet, so an error in a rule must not surface here.
    return uses(value, try_to_trace(jax.make_jaxpr(forward), *types)), uses(*backward)


call_p.def_impl(_impl)
call_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose
batching.fancy_primitive_batchers[call_p] = _batch
mlir.register_lowering(call_p, mlir.lower_fun(_impl, multiple_results=True))
register(call_p.name, read_call(CallWithRule, "call_jaxpr", transposes=True))
