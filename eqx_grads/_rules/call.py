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

from .._errors import name_of, place_of, rule_error, show_tree, type_of
from .._jaxprs.current_trace import CONFIG, in_precision, is_eager, is_in_shard_map
from .._jaxprs.varying import vary_tracers_alike
from .._tangent_spaces import as_array_list
from .._trees import prefix_leaves
from .call_primitive import bind_call, Call, invalid_tracer, WAY_OUT
from .rule import (
    AbstractRules,
    check_static_outputs,
    copy_in_use,
    outputs_of_function,
    require_same,
    running_rule,
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
    if is_eager(fn, args, kwargs):
        if convention.binds:
            return as_arrays(fn(*as_arrays(args), **kwargs))
        # A copy of the trees, as in JAX: the function may change its arguments.
        args, kwargs = jax.tree.map(lambda x: x, (args, kwargs))
        return fn(*args, **kwargs)
    flat, operands = FlatCall.of(fn, rules, args, kwargs, filled, signature.names)
    if rules.varies_alike and is_in_shard_map():
        # Inside `shard_map`, a rule then computes the cotangents of one device, and the
        # transpose of the cast sums those of a replicated operand, once.
        operands = vary_tracers_alike(operands)
    functions = _OfArrays(flat)
    run = functions.primal, functions.jvp, functions.vmap
    # Copies with other tracers share the cache.
    call = Call(flat.fn, len(operands), flat.n_args, rules.cache, *run)
    arrays = bind_call(call, operands)
    assert functions.outputs is not None
    return functions.outputs.tree(arrays)


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
        self.outputs, arrays = self._flat.call(as_array_list(operands))
        check_static_outputs(self._flat.fn, self.outputs)
        return arrays

    def jvp(self, primals, tangents):
        flat = self._flat
        ts = [t if t is None or isinstance(t, jax.Array) else jnp.asarray(t) for t in tangents]
        call = RuleCall.of(flat, as_array_list(primals), ts[: flat.n_args])
        # A value that only the rules close over does not change the output: its derivative is
        # zero here, and comes in where the rules themselves are differentiated.
        for i in range(flat.n_args, flat.n_args + flat.n_not_differentiable):
            if ts[i] is not None:
                raise _not_differentiable(call.fn, flat, i)
        try:
            with in_precision(self._precision):
                differentiated = call.rules.differentiate(call, self.outputs)
        except jax.errors.UnexpectedTracerError as error:
            raise invalid_tracer(name_of(flat.fn)) from error
        self.outputs, arrays, t_arrays = differentiated
        return arrays, t_arrays

    def vmap(self, axis_data, batched, operands):
        with in_precision(self._precision):
            result = apply_vmap_rule(self._flat, axis_data, batched, operands)
        if result is None:
            return None
        outputs, arrays, out_batched = result
        if self.outputs is None:  # otherwise they are those of one example, for the rules
            self.outputs = outputs
        return arrays, out_batched


def _not_differentiable(fn, flat, i):
    what, do = "a value that it closes over", WAY_OUT
    if i < flat.n_args + flat.n_kwargs:
        what, do = flat.rules.convention.configuration
    what = f"`{name_of(fn)}` was differentiated with respect to {what}."
    return rule_error(what, f"at {flat.path(i)}", place_of(fn), do=do)


def apply_vmap_rule(
    flat: FlatCall, axis_data: Any, batched: Sequence[bool], operands: Sequence[Any]
) -> tuple[OutputSpec, list[Any], list[bool]] | None:
    """The outputs, their arrays and which arrays are batched; `None` without a rule for this
    batch."""
    operands = as_array_list(operands)
    fn, rules, args, kwargs = flat.restore(operands)
    rule = rules.vmap_rule
    # The user's rule knows of positional arguments only.
    if rule is None or any(batched[flat.n_args :]):
        return None
    flags = flat.flags(batched[: flat.n_args], operands)
    with running_rule(fn, rules):
        result = rule(axis_data.size, flags, *args, **kwargs)
    if result is NotImplemented:
        return None
    do = "Return `out, out_batched`."
    out, prefix = rule.pair(result, "The batching rule", fn, do)
    try:
        leaves = prefix_leaves(prefix, out)  # the user may give a prefix of the tree
    except ValueError as error:
        raise rule_error(
            f"The batching rule `{rule.name}` of `{name_of(fn)}` did not say which of its "
            "outputs are batched.",
            f"the outputs are {show_tree(out)}, `out_batched` is {prefix}",
            rule.place,
            do="`out_batched` is a bool, or a tree of bools that is a prefix of the output.",
        ) from error
    outputs, arrays = OutputSpec.of(out, rules.convention.outputs)
    out_batched = [bool(leaves[i]) for i in outputs.split.indices]
    n, where = axis_data.size, "without the batch axis, which is in front where `out_batched`,"
    do = f"Return what `jax.vmap({name_of(fn)})` would."
    for x, is_batched in zip(arrays, out_batched, strict=True):
        if is_batched and jnp.shape(x)[:1] != (n,):
            what = f"The batching rule `{rule.name}` of `{name_of(fn)}` returned an output"
            given = f"it is {type_of(x)}, and there are {n} examples"
            raise rule_error(
                f"{what} without the batch axis in front.", given, rule.place, do=do
            )
    example = outputs_of_function(flat, list(map(_of_one, operands, batched)))
    of_one = OutputSpec(outputs.split, tuple(map(_of_one, arrays, out_batched)))
    where = f"{where} {prefix}, says so"
    require_same(rule, "The batching rule", fn, of_one, example, where, do=do)
    return outputs, arrays, out_batched


def _of_one(x, is_batched):
    """The type for one example."""
    shape = x.shape[1:] if is_batched else x.shape
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=getattr(x, "weak_type", False))
