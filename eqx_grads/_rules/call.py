"""A call of a function with rules: flattened, bound as a primitive, its rules run.

The Equinox wrappers are not underneath: their `filter_custom_jvp` takes functions of operands
only (clause 4 of the contract). It has no static outputs (clause 7) and no keyword for a
positional parameter (clause 1). Their `filter_custom_vjp` has no forward mode (clause 3).
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._errors import name_of, place_of, rule_error, show_tree
from .._errors.trees import prefix_leaves
from .._jaxprs.current_trace import CONFIG, in_precision, is_eager
from .._jaxprs.varying import vary_tracers_alike
from .._tangent_spaces import as_array_list
from .call_primitive import bind_call, invalid_tracer, WAY_OUT
from .call_record import Call, vmap_over
from .rule import (
    AbstractRules,
    check_static_outputs,
    copy_in_use,
    Rule,
    running_rule,
    trace_outputs,
)
from .tree_split import as_arrays, FlatCall, OutputSpec, RuleCall


def call_with_rules(
    fn: Callable[..., Any], rules: AbstractRules, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`fn(*args, **kwargs)`, with derivatives by `rules`, in the convention of the rules."""
    if type(fn) is not FunctionType:
        fn = copy_in_use(fn, rules)
    signature = rules.known_signature or rules.signature(fn)
    convention, filled = rules.convention, frozenset()
    if convention.binds:
        args, kwargs, filled = signature.bind(args, kwargs, convention.fills_defaults)
    if is_eager() and not _any_tracers(fn, args, kwargs):
        if convention.binds:
            return as_arrays(fn(*as_arrays(args), **kwargs))
        return fn(*args, **kwargs)
    flat, operands = FlatCall.of(fn, rules, args, kwargs, filled, signature.names)
    if rules.varies_alike:
        # Inside `shard_map`, a rule then computes the cotangents of one device, and the
        # transpose of the cast sums those of a replicated operand, once.
        operands = vary_tracers_alike(operands)
    functions = _OfArrays(flat)
    key = rules.cache  # shared by copies with other tracers
    run = functions.primal, functions.jvp, functions.vmap
    call = Call(flat.fn, len(operands), flat.n_args, key, *run)
    arrays = bind_call(call, operands)
    assert functions.outputs is not None
    return functions.outputs.tree(arrays)


def _any_tracers(*trees) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(trees))


class _OfArrays:
    """The function and its rules as functions of arrays. Refers to a `FlatCall` and never to
    its operands, as JAX keeps it for longer than the call."""

    def __init__(self, flat: FlatCall):
        self.outputs: OutputSpec | None = None
        self._flat = flat
        self._precision = CONFIG.jax_default_matmul_precision

    # Whichever of these runs first, depending on the transformation, sets `outputs`; the
    # others are checked against it.

    def primal(self, operands):
        self.outputs, arrays = self._primal(operands)
        return arrays

    def jvp(self, primals, tangents):
        call = self._rule_call(as_array_list(primals), tangents)
        try:
            with in_precision(self._precision):
                differentiated = call.rules.differentiate(call, self.outputs)
        except jax.errors.UnexpectedTracerError as error:
            raise invalid_tracer(name_of(self._flat.fn)) from error
        self.outputs, arrays, t_arrays = differentiated
        return arrays, t_arrays

    def vmap(self, axis_data, batched, operands):
        with in_precision(self._precision):
            result = apply_vmap_rule(self._flat, self._primal, axis_data, batched, operands)
        if result is None:
            return None
        outputs, arrays, out_batched = result
        if self.outputs is None:  # otherwise they are those of one example, for the rules
            self.outputs = outputs
        return arrays, out_batched

    def _primal(self, operands) -> tuple[OutputSpec, list[Any]]:
        outputs, arrays = self._flat.call(as_array_list(operands))
        check_static_outputs(self._flat.fn, outputs)
        return outputs, arrays

    def _rule_call(self, operands, tangents) -> RuleCall:
        flat = self._flat
        ts = [t if t is None or isinstance(t, jax.Array) else jnp.asarray(t) for t in tangents]
        call = RuleCall.of(flat, operands, ts[: flat.n_args])
        # A value that only the rules close over does not change the output: its derivative is
        # zero here, and comes in where the rules themselves are differentiated.
        for i in range(flat.n_args, flat.n_args + flat.n_not_differentiable):
            if ts[i] is not None:
                raise _not_differentiable(call.fn, flat, i)
        return call


def _not_differentiable(fn, flat, i):
    what, do = "a value that it closes over", WAY_OUT
    if i < flat.n_args + flat.n_kwargs:
        what, do = flat.rules.convention.configuration
    what = f"`{name_of(fn)}` was differentiated with respect to {what}."
    return rule_error(what, f"at {flat.path(i)}", place_of(fn), do=do)


def apply_vmap_rule(
    flat: FlatCall,
    primal: Callable[..., tuple[OutputSpec, list[Any]]],
    axis_data: Any,
    batched: Sequence[bool],
    operands: Sequence[Any],
) -> tuple[OutputSpec, list[Any], list[bool]] | None:
    """The outputs, their arrays and which arrays are batched; `None` without a rule for this
    batch. `primal` is the function of one example's operands."""
    operands = as_array_list(operands)
    fn, rules, args, kwargs = flat.restore(operands)
    n = flat.n_args
    # The user's rule knows of positional arguments only.
    if rules.vmap_rule is None or any(batched[n:]):
        return None
    rule = rules.vmap_rule
    flags = flat.flags(batched[:n], operands)
    with running_rule(fn, rules):
        result = rule(axis_data.size, flags, *args, **kwargs)
    if result is NotImplemented:
        return None
    result = rule.pair(result, "The batching rule", fn, "Return `out, out_batched`.")
    outputs, arrays = OutputSpec.of(result[0], rules.convention.outputs)
    out_batched = _out_batched(fn, rule, outputs, *result)
    expected = _expected(primal, axis_data, batched, operands, out_batched)
    if expected is not None:
        _check(fn, rule, axis_data, expected, outputs, result[1])
    return outputs, arrays, out_batched


def _out_batched(fn, rule: Rule, outputs: OutputSpec, out, prefix) -> list[bool]:
    """A flag for each array. The user may give a prefix of the tree."""
    try:
        flags = prefix_leaves(prefix, out)
    except ValueError as error:
        raise rule_error(
            f"The batching rule `{rule.name}` of `{name_of(fn)}` did not say which of its "
            "outputs are batched.",
            f"the outputs are {show_tree(out)}, `out_batched` is {prefix}",
            rule.place,
            do="`out_batched` is a bool, or a tree of bools that is a prefix of the output.",
        ) from error
    return [bool(flags[i]) for i in outputs.split.indices]


def _expected(primal, axis_data, batched, operands, out_batched) -> OutputSpec | None:
    """The outputs of the function for a batch; `None` if the function can't be traced."""
    axes = [0 if b else None for b in batched]
    traced = trace_outputs(primal, lambda one: vmap_over(axis_data)(one, axes), operands)
    if traced is None:
        return None
    outputs, types = traced
    flags = [*out_batched, *[True] * len(types)]  # the rule may have returned fewer arrays
    batched_types = [
        jax.ShapeDtypeStruct(t.shape if flag else t.shape[1:], t.dtype)
        for t, flag in zip(types, flags, strict=False)
    ]
    return OutputSpec(outputs.split, tuple(batched_types))


def _check(fn, rule, axis_data, expected, outputs, prefix) -> None:
    if expected.agrees(outputs):
        return
    name = name_of(fn)
    text = f"`{name}` would return {{}}, and `{rule.name}` returns {{}}"
    raise rule_error(
        f"The batching rule `{rule.name}` of `{name}` returned a different output than "
        f"`{name}` does for a batch of {axis_data.size}.",
        *expected.unlike(outputs, text),
        f"the batch axis is in front where `out_batched` says so, which is {prefix}",
        rule.place,
        do=f"Return what `jax.vmap({name})` would.",
    )
