"""The check `leaks`: no tracer is kept alive, and no eager call compiles again."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import equations
from ._case import Case
from ._oracle import jvp, vjp
from ._outcome import outcome
from ._report import broke, failed, Finding, passed, skipped


# Primitives that JAX compiles again in each eager call, with or without a rule.
_COMPILED_ANEW = ("scan", "while", "cond", "callback", "shard_map", "custom_linear_solve")
_KEEPS = "the rule keeps a tracer: in a list, a global, an attribute or a cache"


def leaks(case: Case) -> Iterator[Finding]:
    """No leaked tracers, no repeated compilation."""
    if not case.outputs:
        return
    # The check for reverse mode comes last: a leak shows in the first trace.
    first = _leak(_traces(case, case.own.f, "vjp")["jit of the gradient"])
    is_right = first is None or _is_leak(first)
    mode = "vjp" if is_right or case.has_reverse else "jvp"
    found = equations(case.own.program) if case.own.program else ()
    known = {name for e in found for name in (e.primitive.name, str(e.params.get("call")))}
    plain = _traces(case, case.own.plain, mode)
    for name, run in _traces(case, case.own.f, mode).items():
        where = f"{name}, under `jax.checking_leaks`"
        error = first if (name, mode) == ("jit of the gradient", "vjp") else _leak(run)
        cause = _KEEPS if error is not None and _is_leak(error) else ""
        if cause and "linear_solve" not in known and _is_leak(_leak(plain[name])):
            cause = "the function, without its rule, keeps a tracer"
        elif cause and known & {"linear_solve", "_differentiable_solution"}:
            # `lineax.linear_solve` does so: in a run-time check, and from JAX 0.11 on for each
            # operator that is a function.
            yield skipped("leaks", "Lineax, with which `implicit` solves, keeps tracers")
            continue
        yield passed("leaks", where) if error is None else broke("leaks", where, error, cause)
    if mode == "vjp":
        yield _compilations(case)


def _traces(case: Case, fn: Callable[..., Any], mode: str) -> dict[str, Callable[[], Any]]:
    """Functions that trace a derivative of `fn`. Nothing is compiled: leaks happen in
    tracing."""
    leaves, w, t = case.subject.leaves, case.cotangents[0], case.tangents[0]

    def derive(fn, xs):
        run = lambda *ys: list(fn(*ys))
        if mode == "vjp":
            return vjp(run, xs, w)
        # In the place of the cotangents: all the tangents of the outputs, in one number.
        moved = jax.tree.reduce(lambda total, x: total + x.sum(), jvp(run, xs, t))
        return [x + moved.astype(x.dtype) for x in xs]

    def scan(xs):
        step = lambda carry, _: (carry, derive(fn, carry))
        return jax.lax.scan(step, xs, None, length=2)

    # New functions each time: JAX must not find the trace of an earlier one.
    jitted = lambda xs: derive(jax.jit(lambda *ys: list(fn(*ys))), xs)
    return {
        "jit of the gradient": lambda: jax.make_jaxpr(lambda xs: derive(fn, xs))(leaves),
        "gradient of jit": lambda: jax.make_jaxpr(jitted)(leaves),
        "scan": lambda: jax.make_jaxpr(scan)(leaves),
    }


def _leak(run) -> Exception | None:
    def checked():
        with jax.checking_leaks():
            run()

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
    program = outcome(_traces(case, case.own.f, "vjp")["jit of the gradient"])
    found = equations(program) if isinstance(program, ClosedJaxpr) else ()
    if any(new in e.primitive.name for e in found for new in _COMPILED_ANEW):
        return skipped("leaks", "JAX compiles loops and callbacks in each eager call")
    calls = [outcome(case.eager, "vjp", number) for number in range(3)]
    if isinstance(calls[2], Exception):
        return broke("leaks", where, calls[2])
    if n := calls[2].n_compiled:
        text = f"the third eager call still compiled {n} programs"
        cause = "the rule makes a new `jax.jit`, or a new static argument, in each call"
        return failed("leaks", where, text, cause)
    return passed("leaks", where)
