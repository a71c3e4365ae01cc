"""The check `leaks`: no tracer is kept alive, and no eager call compiles again."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import equations
from ._case import Case
from ._oracle import At, rows_of
from ._outcome import outcome
from ._report import broke, failed, Finding, passed, skipped


# Primitives that JAX compiles again in each eager call, with or without a rule.
_COMPILED_ANEW = ("scan", "while", "cond", "callback", "shard_map", "custom_linear_solve")


def leaks(case: Case) -> Iterator[Finding]:
    """No leaked tracers, no repeated compilation."""
    # First of all: some leaks show in the first trace of a derivative only.
    where, mode, error = "under `jax.checking_leaks`", "vjp", _leak(case, case.own.f, "vjp")
    if error is not None and not _is_leak(error) and not case.has_reverse:
        mode, error = "jvp", _leak(case, case.own.f, "jvp")
    found = equations(case.own.program) if case.own.program else ()
    known = {name for e in found for name in (e.primitive.name, str(e.params.get("call")))}
    if error is None:
        yield passed("leaks", where)
    elif not _is_leak(error):
        yield broke("leaks", where, error)
    elif "linear_solve" not in known and _is_leak(_leak(case, case.own.plain, mode)):
        yield broke("leaks", where, error, "the function, without its rule, keeps a tracer")
    elif known & {"linear_solve", "_differentiable_solution"}:
        # `lineax.linear_solve` does so: in a run-time check, and from JAX 0.11 on for each
        # operator that is a function.
        yield skipped("leaks", "Lineax, with which `implicit` solves, keeps tracers")
    else:
        cause = "the rule keeps a tracer: in a list, a global, an attribute or a cache"
        yield broke("leaks", where, error, cause)
    if mode == "vjp":
        yield _compilations(case)


def _trace(case: Case, fn: Callable[..., Any], mode: str) -> ClosedJaxpr:
    """The steps of a loop with the derivative of a compiled function. Nothing is compiled:
    leaks happen in tracing."""
    t, w = case.tangents[0], case.cotangents[0]

    def step(xs, _):
        # A new function each time: JAX must not find the trace of an earlier one.
        run = jax.jit(lambda *xs: list(fn(*xs)))
        return xs, rows_of(run)[mode](At(xs, t, w))

    loop = lambda xs: jax.lax.scan(step, xs, None, length=2)
    return jax.make_jaxpr(loop)(case.subject.leaves)


def _leak(case: Case, fn: Callable[..., Any], mode: str) -> Exception | None:
    def checked():
        with jax.checking_leaks():
            _trace(case, fn, mode)

    error = outcome(checked)
    # The checker reports a leak in the place of an error whose traceback holds tracers.
    own = getattr(error, "__context__", None)
    is_hidden = isinstance(own, Exception) and _is_leak(error) and not _is_leak(own)
    return own if is_hidden else error


def _is_leak(error: Exception | None) -> bool:
    # Before Python 3.13, JAX's report of some leaks crashes: equinox#997.
    crashes = isinstance(error, IndexError) and "list index out of range" in str(error)
    is_known = isinstance(error, jax.errors.UnexpectedTracerError)
    return "eaked" in str(error) or is_known or crashes


def _compilations(case: Case) -> Finding:
    """The third eager call compiles nothing."""
    where = "compilation in repeated calls"
    program = outcome(_trace, case, case.own.f, "vjp")
    # The first equation is our own loop.
    found = list(equations(program))[1:] if isinstance(program, ClosedJaxpr) else ()
    if any(new in e.primitive.name for e in found for new in _COMPILED_ANEW):
        return skipped("leaks", "JAX compiles loops and callbacks in each eager call")
    call = [outcome(case.eager, "vjp", number) for number in range(3)][-1]
    if isinstance(call, Exception):
        return broke("leaks", where, call)
    if n := call.n_compiled:
        text = f"the third eager call still compiled {n} programs"
        cause = "the rule makes a new `jax.jit`, or a new static argument, in each call"
        return failed("leaks", where, text, cause)
    return passed("leaks", where)
