"""Which transformation is at work: operations run at once, are staged, or neither."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import find_top_trace, get_opaque_trace_state


def _state() -> Any:
    return get_opaque_trace_state(convention="flax")


def _staging_trace() -> type:
    found: list[type] = []
    jax.make_jaxpr(lambda: found.append(type(find_top_trace(()))))()
    return found[0]


with jax.ensure_compile_time_eval():
    _EAGER = _state()
_STAGING = _staging_trace()


def is_eager() -> bool:
    """Whether no transformation is at work: operations compute their values at once."""
    return _state() == _EAGER


def is_staged(operands: Sequence[Any]) -> bool:
    """Whether a primitive bound to `operands` now becomes an equation of a jaxpr.

    JAX hands a primitive to the innermost trace; one that none of the operands belongs to
    hands it on to the trace around it. There is no public way to ask which trace will take
    it (`jax.interpreters.partial_eval.custom_staging_rules`, which would do, is not public in
    JAX 0.10 to 0.12). A wrong answer costs time only: see `_rules/call_primitive.py`.
    """
    owners = {id(x._trace) for x in operands if isinstance(x, Tracer)}
    trace = find_top_trace(())
    while type(trace) is not _STAGING and id(trace) not in owners:
        trace = getattr(trace, "parent_trace", None)
        if trace is None:
            return False
    return type(trace) is _STAGING
