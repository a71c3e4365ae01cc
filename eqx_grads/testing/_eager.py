"""An eager call of a function with a derivative, as a user makes it.

JAX compiles a loop again in each eager call, so that they take most of the time of some checks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax import monitoring

from ._outcome import outcome
from ._subject import FlatFunction, is_output


_COMPILED = "/jax/core/compile/backend_compile_duration"


class Call(NamedTuple):
    """The result of one differentiated call.

    - `value`: the whole output, static leaves included.
    - `outputs`: its arrays that have a derivative.
    - `derivative`: the tangents of the outputs, or the cotangents of the leaves. An exception
        if the backward pass raises one.
    - `n_compiled`: the number of programs that JAX compiled in the call.
    """

    value: Any
    outputs: list[Any]
    derivative: Any
    n_compiled: int


def eager_call(subject: FlatFunction, mode: str, direction: Sequence[Any]) -> Call:
    """The call in forward mode (`"jvp"`) or reverse mode (`"vjp"`) along random directions."""
    kept: dict[str, Any] = {}

    def run(*leaves):
        flat, kept["tree"] = jax.tree.flatten(subject.call(leaves))
        outs, rest = eqx.partition(flat, is_output)
        arrays, kept["static"] = eqx.partition(rest, lambda x: isinstance(x, jax.Array))
        kept["at"] = [i for i, x in enumerate(outs) if x is not None]
        return [outs[i] for i in kept["at"]], arrays

    compiled: list[str] = []
    count = lambda event, duration_secs, **_: compiled.extend([event] * (event == _COMPILED))
    monitoring.register_event_duration_secs_listener(count)
    try:
        if mode == "jvp":
            out, derivative, rest = jax.jvp(run, subject.leaves, direction, has_aux=True)
        else:
            out, pull, rest = jax.vjp(run, *subject.leaves, has_aux=True)
            # The rule may return another value than the function, which `primal` reports.
            fits = [x.shape for x in out] == [w.shape for w in direction]
            w = direction if fits else [x.at[...].set(1) for x in out]
            derivative = outcome(lambda: list(pull(w)))
        jax.block_until_ready((out, [] if isinstance(derivative, Exception) else derivative))
    finally:
        monitoring.unregister_event_duration_listener(count)
    flat = eqx.combine(rest, kept["static"])
    for i, x in zip(kept["at"], out, strict=True):
        flat[i] = x
    return Call(jax.tree.unflatten(kept["tree"], flat), list(out), derivative, len(compiled))
