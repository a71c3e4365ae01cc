"""Whether JAX runs operations eagerly now, stages them into a jaxpr, or neither; whether it is
inside `shard_map`; and the precision of its matrix products."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.extend.core import find_top_trace, get_opaque_trace_state, set_current_trace
from jax.interpreters import partial_eval as pe


T = TypeVar("T")
CONFIG: Any = jax.config  # the flags are not in the declarations of types


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """In this context, a context variable has another value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _state() -> Any:
    return get_opaque_trace_state(convention="flax")


with jax.ensure_compile_time_eval():
    _EAGER = _state()
    _EVALUATING = find_top_trace(())
    _EVALUATION = type(_EVALUATING)
_STAGING: list[type] = []  # the class of a trace that makes equations
jax.make_jaxpr(lambda: _STAGING.append(type(find_top_trace(()))))()


def is_jit_disabled() -> bool:
    return CONFIG.jax_disable_jit


def is_in_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_eager(*trees: Any) -> bool:
    """Whether no transformation is at work, and no leaf is traced: operations compute their
    values at once."""
    return _state() == _EAGER and not any(isinstance(x, Tracer) for x in jax.tree.leaves(trees))


def _traces() -> Iterator[Any]:
    """The traces at work, the innermost one first."""
    trace = find_top_trace(())
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def staging_trace() -> Any:
    """The innermost trace that stages operations into a jaxpr, or `None`."""
    return next((trace for trace in _traces() if type(trace) in _STAGING), None)


def is_staged(operands: Sequence[Any]) -> bool:
    """Whether a primitive bound to `operands` now becomes an equation of a jaxpr.

    JAX gives a primitive to the innermost trace. A trace without any of the operands passes it
    to the trace around it. There is no public way to ask which trace will take it
    (`jax.interpreters.partial_eval.custom_staging_rules`, which would do, is not public in JAX
    0.10 to 0.12). An equation of a call that was thought not to be staged has no jaxpr of the
    function, which other interpreters need.
    """
    # `jax.ensure_compile_time_eval` evaluates a primitive without traced operands.
    if CONFIG.eager_constant_folding and not any(isinstance(x, Tracer) for x in operands):
        return False
    # Partial evaluation passes on the known values.
    owners = {
        id(x._trace)
        for x in operands
        if isinstance(x, Tracer) and not (isinstance(x, pe.JaxprTracer) and x.is_known())
    }
    for trace in _traces():
        if type(trace) in _STAGING or id(trace) in owners:
            return type(trace) in _STAGING
    return False


def is_valid(x: Any) -> bool:
    """False for a tracer of a transformation that is surely over.

    The traces at work form a chain. JAX cuts it where it traces a part of a program again, for
    example the body of a scan to differentiate it.
    """
    if not isinstance(x, Tracer):
        return True
    ends = lambda trace: trace is x._trace or type(trace) is _EVALUATION
    return next(filter(ends, _traces()), x._trace) is x._trace


def is_of_innermost_trace(x: Any) -> bool:
    """Whether the innermost transformation transforms `x`. Inside `jax.vmap`: whether `x` has
    the batch dimension."""
    return isinstance(x, Tracer) and x._trace is find_top_trace(())


def outside_of_transformations() -> contextlib.AbstractContextManager[Any]:
    """Compute at once with what is not traced. `jax.ensure_compile_time_eval` does not do so
    where `jax.grad` linearizes."""
    return set_current_trace(_EVALUATING)


def outside_of_linearization(values: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Compute with `values`, which are not tangents, as if nothing were being linearized.

    `jax.grad` runs the forward rule of a primitive under partial evaluation. There each
    operation looks whether its operands are known, which takes as long as the operation itself.
    """
    trace = _linearization(values)
    return _NOTHING if trace is None else set_current_trace(trace.parent_trace)


_NOTHING = contextlib.nullcontext()


def _linearization(values: Sequence[Any]) -> Any:
    """The partial evaluation under which `jax.grad` runs a rule at `values`; `None` outside."""
    trace = find_top_trace(())
    owners = {id(x._trace) for x in values if isinstance(x, Tracer)}
    is_one = type(trace).__name__ == "JaxprTrace" and id(trace) not in owners
    return trace if is_one else None


def in_precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    """Trace a rule with the precision of matrix products that its function was called with.

    `jax.default_matmul_precision` holds while a program is traced, and JAX keeps it in each
    matrix product. But a rule is traced where JAX differentiates, which may be outside of the
    context in which the function was called. JAX's own rules get the precision that holds
    there: on a GPU, the gradient of a function in "highest" precision has products in TF32. (No
    upstream issue was found; `UPSTREAM.md` has a reproduction.)
    """
    if precision == CONFIG.jax_default_matmul_precision:
        return _NOTHING
    return jax.default_matmul_precision(precision)
