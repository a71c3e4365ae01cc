"""Apply a user's batching rule, and compare its outputs with the outputs of `vmap`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._errors import name_of, rule_error, show_tree
from .._errors.trees import prefix_leaves
from .._tangent_spaces import as_array_list
from .call_record import vmap_over
from .rule import Rule, running_rule, trace_outputs
from .tree_split import FlatCall, OutputSpec


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
    batched_types = [
        jax.ShapeDtypeStruct(t.shape if flag else t.shape[1:], t.dtype)
        for t, flag in zip(types, out_batched, strict=False)
    ]
    return OutputSpec(outputs.split, tuple(batched_types))


def _check(fn, rule, axis_data, expected, outputs, prefix) -> None:
    difference = expected.difference(outputs)
    if difference is None:
        return
    name = name_of(fn)
    raise rule_error(
        f"The batching rule `{rule.name}` of `{name}` returned another output than "
        f"`{name}` does for a batch of {axis_data.size}: {difference}.",
        f"expected {show_tree(expected.describe())}, with the batch axis in front where "
        f"`out_batched` says so, which is {prefix}",
        f"`{rule.name}` returns {show_tree(outputs.describe())}",
        rule.place,
        do=f"Return what `jax.vmap({name})` would.",
    )
