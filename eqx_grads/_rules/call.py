"""A function with its rules, as JAX sees it: a `jax.custom_jvp` of a list of arrays.

The Equinox wrappers are not underneath: their `filter_custom_jvp` takes functions of
operands only (clause 4 of the contract), has no static outputs (clause 7) and no keyword for
a positional parameter (clause 1), and `filter_custom_vjp` has no forward mode (clause 3).
"""

import abc
import functools as ft
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from .._errors import name_of, place_of, rule_error, show_tree
from .._tangent_spaces import as_array_list
from .batch_alike import batch_alike
from .call_primitive import vmap_call, VmapCall
from .closure_convert import Copyable
from .flatten_call import (
    as_arrays,
    is_eager,
    is_inexact,
    Outputs,
    ParameterNames,
    Recipe,
    Signature,
)
from .rule import (
    CallWatch,
    check_no_tracers,
    check_outputs,
    NEEDS_VALUES,
    Rule,
    RuleCall,
    Seen,
)


class AbstractDefinition(Copyable, abc.ABC):
    """A function and its rules.

    Not a Module: every call goes through here, and looking up the methods of a Module takes
    as long as a small JAX operation.
    """

    def __init__(self, fn: Callable[..., Any], batches_alike: bool):
        self.fn = fn
        self.batches_alike = batches_alike  # see `batch_alike.py`
        self.fill_defaults = True  # hand a rule the positional arguments left out, too
        self.vmap_rule: Rule | None = None
        # Shared by the copies that have traced values filled in, and so their identity too.
        self.seen = Seen()

    @abc.abstractmethod
    def check_complete(self) -> None:
        """Raise if a rule is missing."""

    @abc.abstractmethod
    def differentiate(self, call: RuleCall) -> tuple[Outputs, list[Any], list[Any]]:
        """The outputs, their arrays, and the tangents of these (`None` for zero)."""

    @abc.abstractmethod
    def primal_rule(self) -> Rule:
        """The rule that also returns the value."""

    @ft.cached_property
    def signature(self) -> Signature:
        return Signature(self.fn)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_complete()
        args, kwargs, filled = self.signature.bind(args, kwargs, self.fill_defaults)
        if is_eager() and not _any_tracers(args, kwargs):
            return as_arrays(self.fn(*as_arrays(args), **kwargs))
        CallWatch.note(self.seen)
        recipe, operands = Recipe.of(self, args, kwargs, filled)
        return _transformable_call(recipe, self.signature.names, operands)


def _any_tracers(args, kwargs) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))


_FLAT_SIGNATURE = inspect.signature(lambda *operands: None)


def _transformable_call(recipe: Recipe, names: ParameterNames, operands: Sequence[Any]):
    """Call by way of JAX, so that transformations see the rules.

    What is defined in here outlives the call, so it may refer to `recipe`, but never to
    `operands`.
    """
    name = name_of(recipe.definition.fn)
    # Whoever runs first (the function or a rule, depending on the transformation) leaves
    # here what is not an array; later runs are held to it.
    box: list[Outputs] = []
    # A value that only a rule closes over can make a tangent batched on its own.
    alike = recipe.definition.batches_alike or recipe.rules_hold_more

    def primal(*operands):
        definition, args, kwargs = recipe.restore(as_array_list(operands))
        outputs, arrays = Outputs.of(definition.fn(*args, **kwargs))
        check_no_tracers(definition.fn, outputs)
        box[:] = [outputs]
        return batch_alike(arrays, operands) if alike else arrays

    def jvp(primals, tangents):
        call = _rule_call(recipe, names, as_array_list(primals), tangents)
        if call.live():
            outputs, arrays, t_arrays = call.definition.differentiate(call)
            rule = call.definition.primal_rule()
            check_no_tracers(rule.fn, outputs)
            check_outputs(call, rule, outputs, box)
        else:  # JAX counts integers as perturbed in places
            outputs, arrays = Outputs.of(call.definition.fn(*call.args, **call.kwargs))
            t_arrays = [None] * len(arrays)
        box[:] = [outputs]
        if alike:
            arrays = batch_alike(arrays, primals)
        return arrays, [
            SymbolicZero(jax.typeof(x).to_tangent_aval()) if t is None else t
            for x, t in zip(arrays, t_arrays, strict=True)
        ]

    primal.__name__, jvp.__name__ = name, f"{name}_jvp"
    if isinstance(recipe.definition.fn, types.FunctionType):
        # For jaxprs, and for errors that JAX raises: the user's file and line.
        vars(primal).update(__signature__=_FLAT_SIGNATURE, __wrapped__=recipe.definition.fn)
    plain = jax.custom_jvp(primal)
    plain.defjvp(jvp, symbolic_zeros=True)
    if recipe.definition.vmap_rule is None:
        return _first(plain(*operands), box)
    vmap = ft.partial(_vmap, recipe, plain, box)
    return _first(vmap_call(VmapCall(name, primal, jvp, vmap), operands), box)


def _first(arrays, box):
    return box[0].tree(arrays)


def _rule_call(recipe, names, operands, tangents) -> RuleCall:
    ts = [
        None
        if isinstance(t, SymbolicZero) or not is_inexact(x)
        else (t if isinstance(t, jax.Array) else jnp.asarray(t))
        for x, t in zip(operands, tangents, strict=True)
    ]
    definition, args, kwargs = recipe.restore(operands)
    # What only the rules close over does not move the value: its derivative is zero here,
    # and comes in where the rules themselves are differentiated.
    for i in range(recipe.n_args, recipe.n_args + recipe.n_not_differentiable):
        if ts[i] is not None:
            raise _not_differentiable(definition.fn, recipe, names, i)
    return RuleCall(definition, args, kwargs, operands, ts[: recipe.n_args], recipe, names)


def _not_differentiable(fn, recipe, names, i):
    name, leaf = name_of(fn), recipe.path(i, names)
    if i < recipe.n_args + recipe.n_kwargs:
        return rule_error(
            f"`{name}` was differentiated with respect to a keyword-only argument.",
            f"at {leaf}",
            place_of(fn),
            do="Keyword-only arguments are configuration. Make it a positional parameter "
            "to give it a derivative, or pass `jax.lax.stop_gradient` of it.",
        )
    return rule_error(
        f"`{name}` was differentiated with respect to a value that it closes over.",
        f"at {leaf}",
        place_of(fn),
        do="A rule gives derivatives with respect to arguments. Make the value a "
        "positional parameter, or close over `jax.lax.stop_gradient` of it.",
    )


def _vmap(recipe, plain, box, axis_data, batched, *operands):
    """The user's batching rule, flat."""

    vmapped = jax.vmap(
        plain,
        [0 if b else None for b in batched],
        axis_size=axis_data.size,
        axis_name=axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )

    def batch_plain():
        """Batch the derivative rules, as without a batching rule."""
        out = vmapped(*operands)
        return out, [True] * len(out)

    n = recipe.n_args
    if any(batched[n:]):  # the user's rule knows of positional arguments only
        return batch_plain()
    definition, args, kwargs = recipe.restore(as_array_list(operands))
    rule = definition.vmap_rule
    flags = recipe.args.tree(batched[:n], [False] * len(recipe.args.static))
    result = rule.fn(axis_data.size, flags, *args, **kwargs)
    if result is NotImplemented:
        return batch_plain()
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise rule_error(
            f"The batching rule `{rule.name}` of `{name_of(definition.fn)}` did not "
            "return a pair.",
            f"it returned {show_tree(result)}",
            rule.place,
            do="Return `out, out_batched`.",
        )
    outputs, arrays = Outputs.of(result[0])
    try:
        out_batched = _broadcast_prefix(result[1], result[0])
    except ValueError as error:
        raise rule_error(
            f"The batching rule `{rule.name}` of `{name_of(definition.fn)}` did not "
            "say which of its outputs are batched.",
            f"the outputs are {show_tree(result[0])}, `out_batched` is {result[1]}",
            rule.place,
            do="`out_batched` is a bool, or a tree of bools that is a prefix of the output.",
        ) from error
    flat_batched = [out_batched[i] for i in outputs.rest.places]
    try:
        types = jax.eval_shape(vmapped, *operands)
    except NEEDS_VALUES:  # the function can't be traced: nothing to compare with
        box[:] = [outputs]
        return arrays, flat_batched
    # The trace has left in the box what the function returns for one example.
    batched_types = [
        jax.ShapeDtypeStruct(t.shape if flag else t.shape[1:], t.dtype)
        for t, flag in zip(types, flat_batched, strict=False)
    ]
    expected = Outputs(box[0].rest, tuple(batched_types))
    difference = expected.difference(outputs)
    if difference is not None:
        name = name_of(definition.fn)
        raise rule_error(
            f"The batching rule `{rule.name}` of `{name}` returned another output than "
            f"`{name}` does for a batch of {axis_data.size}: {difference}.",
            f"expected {show_tree(expected.describe())}, with the batch axis in front where "
            f"`out_batched` says so, which is {result[1]}",
            f"`{rule.name}` returns {show_tree(outputs.describe())}",
            rule.place,
            do=f"Return what `jax.vmap({name})` would.",
        )
    return arrays, flat_batched


def _broadcast_prefix(prefix, tree) -> list[bool]:
    filled = jax.tree.map(
        lambda flag, branch: jax.tree.map(lambda _: bool(flag), branch), prefix, tree
    )
    return jax.tree.leaves(filled)
