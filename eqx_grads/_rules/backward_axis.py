"""Whether a backward rule uses the named axis of a `vmap`, and so has to run by example."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._tangent_spaces import is_differentiable
from .abstract_call import AbstractCall
from .asked_rules import asking, AXES, is_asked
from .rule import try_to_trace


def backward_uses_axis(
    call: AbstractCall,
    bind: Callable[[AbstractCall, Sequence[Any]], list[Any]],
    axis_data: Any,
    operands: Sequence[Any],
) -> bool:
    """Whether the backward rule of `call` uses this axis, without which JAX would run it later.

    What the forward rule does with the axis is no matter: its residuals have the batch
    dimension then, and the backward rule is batched with them.
    """
    places = [i for i, x in enumerate(operands[: call.n_args]) if is_differentiable(x)]
    if not call.is_reverse or not places or is_asked(call, AXES):
        return False
    found: list[bool] = []

    def one(*xs):
        def of_differentiable(*live):
            full = list(xs)
            for i, x in zip(places, live, strict=True):
                full[i] = x
            return [x for x in bind(call, full) if is_differentiable(x)]

        out, pull_back = jax.vjp(of_differentiable, *(xs[i] for i in places))
        program = jax.make_jaxpr(pull_back)([jax.typeof(x) for x in out])
        found.append(axis_data.name in [getattr(e, "name", None) for e in program.effects])
        return ()

    vmapped = jax.vmap(one, None, axis_size=axis_data.size, axis_name=axis_data.name)
    with asking(call, AXES):
        # What the rule raises, if it does, is for the one who differentiates.
        try_to_trace(jax.eval_shape, vmapped, *operands)
    return any(found)
