"""Trace the loss of a model to a program, with the path of the layer at every equation."""

import contextlib
import dataclasses
import functools as ft
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from .._control_flow.checkpoint import filter_checkpoint
from .._control_flow.visible_steps import visible_steps
from .._errors import (
    check_function,
    first_line,
    name_of,
    place_of,
    rule_error,
    show_path,
    show_tree,
)
from .._jaxprs.evaluate import evaluate, keeping_tracebacks
from .._jaxprs.structure import holds, is_reference
from .._tangent_spaces import is_differentiable
from .layers import own_cells, wrap_layers


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss as a program of arrays.

    The inputs of the program are the inexact arrays of the model and then all other arrays. Its
    output is the loss. `leaves` are the paths of the inexact arrays of the model, and `inputs`
    names all inputs of the program. `values` are the inputs.

    `layers` are the paths of the layers of the model. The name stack of an equation has
    `eqg_layer_2_call_17` where the equation is in a call of `layers[2]`; see `layer_calls`.
    """

    program: ClosedJaxpr
    values: Sequence[Any]
    leaves: Sequence[str]
    inputs: Sequence[str]
    layers: Sequence[str]

    def loss(self, leaves: Sequence[Any], others: Sequence[Any]) -> Any:
        return evaluate(self.program, [*leaves, *others])[0]

    @ft.cached_property
    def reverse(self) -> Callable[[Any, Sequence[Any]], tuple[Any, Sequence[Any]]]:
        """The loss and its gradient, traced and compiled once: a function of a seed and of the
        values. With a known seed, XLA would simplify values that are NaN operation by
        operation."""
        program, n = self.program, len(self.leaves)  # `self` would be part of a cycle

        def loss_and_gradient(seed, values):
            loss = lambda leaves: evaluate(program, [*leaves, *values[n:]])[0]
            value, pull = jax.vjp(loss, values[:n])
            return value, pull(seed)[0]

        return jax.jit(loss_and_gradient)


def trace_loss(
    caller: str,
    loss: Callable[..., Any],
    model: PyTree,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    steps_are_visible: bool = True,
    checkpointed: frozenset[int] = frozenset(),
) -> TracedLoss:
    """Trace `loss(model, *args, **kwargs)`.

    - `caller`: the public function, for its errors.
    - `steps_are_visible`: whether the steps of `filter_scan` are equations of the program, and
        not calls with a rule.
    - `checkpointed`: the indices of layers that are called in a `filter_checkpoint`.
    """
    check_function(loss, "loss", caller)
    names, given, n = _names(loss, args, kwargs), [*args, *kwargs.values()], len(args)
    flat, treedef = jax.tree_util.tree_flatten_with_path((model, given))
    # The arrays of floats of the model, and then all other arrays.
    is_first = [path[0].idx == 0 and eqx.is_inexact_array(x) for path, x in flat]
    first = [i for i, is_one in enumerate(is_first) if is_one]
    others = [i for i, (_, x) in enumerate(flat) if eqx.is_array(x) and not is_first[i]]
    values = [flat[i][1] for i in first + others]
    _check_inputs(caller, model, values, bool(first))
    static = [None if eqx.is_array(x) else x for _, x in flat]
    layers: list[str] = []

    def flat_loss(values, wrap):
        full = list(static)
        for i, x in zip(first + others, values, strict=True):
            full[i] = x
        model, given = jax.tree.unflatten(treedef, full)
        if wrap:
            # A layer with its own backward pass runs plain cells without calling them.
            own = set() if steps_are_visible else set(map(id, own_cells(model)))
            selects = lambda layer: id(layer) not in own
            layers[:], model = wrap_layers(model, selects, _around(checkpointed))
        by_name = dict(zip(kwargs, given[n:], strict=True))
        return check_scalar(caller, loss, loss(model, *given[:n], **by_name))

    paths = [flat[i][0] for i in first + others]
    leaves = [show_path(path[1:]).removeprefix(".") or "model" for path in paths[: len(first)]]
    inputs = [
        f"model{show_path(path[1:])}"
        if path[0].idx == 0
        else names[path[1].idx] + show_path(path[2:])
        for path in paths
    ]
    visible = visible_steps if steps_are_visible else contextlib.nullcontext
    traced = None
    # The loss may need the very types of its layers, or raise without them too.
    with visible(), keeping_tracebacks(), contextlib.suppress(Exception):
        program = jax.make_jaxpr(lambda values: flat_loss(values, True))(values)
        traced = TracedLoss(program, values, leaves, inputs, layers)
    if traced is None or _wrapping_breaks_a_rule(traced, flat_loss):
        with visible(), keeping_tracebacks():
            program = _trace_unwrapped(caller, loss, flat_loss, values)
        traced = TracedLoss(program, values, leaves, inputs, [])  # of unknown layers
    return traced


def _check_inputs(caller, model, values, has_leaves: bool) -> None:
    if not has_leaves:
        raise rule_error(
            f"`{caller}` was given a model without inexact arrays.",
            f"it is {show_tree(model)}",
            do="It differentiates with respect to the arrays of floats in `model`, the first "
            "argument of the loss. A Python number is not an array: pass `jnp.array(0.5)`.",
        )
    if any(isinstance(x, Tracer) for x in values):
        raise rule_error(
            f"`{caller}` was called inside a transformed function.",
            "the model or an argument holds a traced array",
            do=f"Call `{caller}` outside of `jax.jit`, `jax.grad` and `jax.vmap`: it applies "
            "these itself, and looks at the values.",
        )


def _trace_unwrapped(caller, loss, flat_loss, values) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(lambda values: flat_loss(values, False))(values)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise rule_error(
            f"`{caller}` can't trace the loss `{name_of(loss)}`.",
            first_line(error),
            place_of(loss),
            do="It traces the loss as `jax.jit` does. Use `jax.lax.cond` or `jnp.where` for "
            "decisions that depend on arrays, and `jax.pure_callback` for NumPy.",
        ) from error


def check_no_references(caller: str, loss: Callable[..., Any], program: ClosedJaxpr) -> None:
    """Raise if the loss makes a reference, or holds one: a value that is written to it and read
    later is not the output of an equation, and could not be followed."""
    inputs = [*program.jaxpr.constvars, *program.jaxpr.invars]
    if holds(program, "new_ref") or any(is_reference(v.aval) for v in inputs):
        raise rule_error(
            f"`{caller}` can't follow what the loss `{name_of(loss)}` writes to a reference.",
            "it uses a `jax.new_ref`",
            place_of(loss),
            do="Pass a loss that returns these values, or carries them through its loops, "
            "instead of writing them to a reference.",
        )


def layer_calls(eqn: Any) -> list[tuple[int, int]]:
    """The calls of layers that an equation is in, outermost first: the index of the layer, and
    the number of the call."""
    names = re.findall(r"eqg_layer_(\d+)_call_(\d+)", str(eqn.source_info.name_stack))
    return [(int(layer), int(call)) for layer, call in names]


def _wrapping_breaks_a_rule(traced: TracedLoss, flat_loss: Callable[..., Any]) -> bool:
    """Whether a rule needs the very types of layers, as one that returns a cotangent of a layer
    that is a field of its Module."""
    if not holds(traced.program, "eqg_call", "custom_vjp_call", "call_hi_primitive"):
        return False
    values, n = traced.values, len(traced.leaves)
    unwrapped = jax.grad(lambda leaves: flat_loss([*leaves, *values[n:]], False))

    def has_types(fn, *args):
        with contextlib.suppress(Exception):
            jax.eval_shape(fn, *args)
            return True
        return False

    # JAX keeps what it traces here, for a gradient that is computed later.
    seed = np.ones((), traced.program.out_avals[0].dtype)
    return not has_types(traced.reverse, seed, values) and has_types(unwrapped, values[:n])


@ft.cache  # a static field of the wrapped layers: the same function for each trace
def _around(checkpointed):
    def call(layer, index, *args, **kwargs):
        run = filter_checkpoint(layer) if index in checkpointed else layer
        # The number of the call tells two calls of one layer apart.
        with jax.named_scope(f"eqg_layer_{index}_call_{next(_CALLS)}"):
            return run(*args, **kwargs)

    return call


_CALLS = itertools.count()


def check_scalar(caller: str, loss: Callable[..., Any], out: Any) -> Any:
    """The value of a loss, if that is a real scalar."""
    if not is_differentiable(out) or jnp.shape(out) != () or jnp.iscomplexobj(out):
        name = name_of(loss)
        called = "loss" if "<" in name else name  # a lambda has no name to call it by
        raise rule_error(
            f"The loss `{name}` did not return a real scalar.",
            f"it returned {show_tree(out)}",
            place_of(loss),
            do=f"`{caller}` differentiates one real number. Take the mean or the sum of an "
            f"array. If it has other outputs, pass `lambda *a, **k: {called}(*a, **k)[0]`; if "
            "it is decorated with `value_and_grad`, pass the function inside.",
        )
    return out


def _names(loss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the arguments but the model."""
    try:
        parameters = list(inspect.signature(loss).parameters.values())[1:]
    except (TypeError, ValueError):  # some functions in C have no signature
        parameters = []
    names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
    names += [f"{rest}[{i}]" for i in range(len(args))]
    names = [*names[: len(args)], *kwargs]
    return [f"args[{i}]" if name == "model" else name for i, name in enumerate(names)]
