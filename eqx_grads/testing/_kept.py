"""The checks `leaks` and `residuals`: what a rule keeps after a call.

No tracer stays alive, no eager call compiles again, and the backward pass reads each array that
is kept for it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

# Public, if little known: the pass with which JAX itself drops dead equations.
from jax.interpreters.partial_eval import dce_jaxpr

from .._diagnosis._memory.residuals import bytes_of
from .._jaxprs.structure import equations
from .._rules.custom_vjp import custom_vjp
from ._case import Case
from ._oracle import rows_of
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
        yield passed(where)
    elif not _is_leak(error):
        yield broke(where, error)
    elif "linear_solve" not in known and _is_leak(_leak(case, case.own.plain, mode)):
        yield broke(where, error, "the function, without its rule, keeps a tracer")
    elif known & {"linear_solve", "_differentiable_solution"}:
        # `lineax.linear_solve` does so: in a run-time check, and from JAX 0.11 on for each
        # operator that is a function.
        yield skipped("Lineax, with which `implicit` solves, keeps tracers")
    else:
        cause = "the rule keeps a tracer: in a list, a global, an attribute or a cache"
        yield broke(where, error, cause)
    if mode == "vjp":
        yield _compilations(case)


def _leak(case: Case, fn: Callable[..., Any], mode: str) -> Exception | None:
    """What `jax.checking_leaks` raises in a trace of the steps of a loop with the derivative of
    a compiled function. Nothing is compiled: leaks happen in tracing."""

    def step(xs, _):
        # A new function each time: JAX must not find the trace of an earlier one.
        run = jax.jit(lambda *xs: list(fn(*xs)))
        return xs, rows_of(run)[mode](case.at._replace(x=xs))

    def checked():
        with jax.checking_leaks():
            loop = lambda xs: jax.lax.scan(step, xs, None, length=2)
            jax.make_jaxpr(loop)(case.subject.leaves)

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
    program = case.own.trace("vjp", case.own.rows["vjp"], case.at)
    found = equations(program) if isinstance(program, ClosedJaxpr) else ()
    if any(new in e.primitive.name for e in found for new in _COMPILED_ANEW):
        return skipped("JAX compiles loops and callbacks in each eager call")
    call = [outcome(case.eager, "vjp", number) for number in range(3)][-1]
    if isinstance(call, Exception):
        return broke(where, call)
    if n := call.n_compiled:
        text = f"the third eager call still compiled {n} programs"
        cause = "the rule makes a new `jax.jit`, or a new static argument, in each call"
        return failed(where, text, cause)
    return passed(where)


def residuals(case: Case) -> Iterator[Finding]:
    """Count the bytes of the residuals; fail if the backward pass never reads some of them."""
    fn, limit = case.subject.fn, case.options.max_residual_bytes
    kept = outcome(_kept, case, case.own.f, isinstance(fn, jax.custom_vjp))
    if isinstance(kept, Exception):
        yield broke("the residuals", kept)
        return
    total, unread, _ = kept
    where = f"{total} bytes per call, without the arguments"
    plain = outcome(_kept, case, case.own.plain)
    # And not `stop_gradient`, or rounding.
    if not isinstance(plain, Exception) and plain[2]:
        where += f" (plain autodiff: {plain[0]})"
    # Inside other functions, JAX and the wrappers of rules keep residuals of their own.
    kinds = (custom_vjp, jax.custom_vjp, eqx.filter_custom_vjp)
    if unread and isinstance(getattr(fn, "__func__", fn), kinds):
        text = f"kept for the backward pass and never read: {', '.join(unread[:4])}"
        cause = "the forward rule returns residuals that the backward rule ignores"
        yield failed(where, text, cause)
    elif limit is not None and total > limit:
        text = f"{total} bytes are kept, and `max_residual_bytes` is {limit}"
        yield failed(where, text)
    else:
        yield passed(where)


def _kept(case: Case, fn: Any, arguments_count: bool = False) -> tuple[int, list[str], bool]:
    """The bytes of the residuals of `fn` without the arguments, which the caller holds anyway;
    the residuals never read; and whether the cotangents that come out depend on the cotangents
    that go in.

    `arguments_count`: whether an argument that is kept and never read is reported. It is not
    the rule's fault if the wrapper always keeps the arguments (Equinox's and ours do).
    """
    # With a type that is not weak: JAX makes another array of a Python number, to compute with.
    leaves = list(map(np.asarray, case.subject.leaves))
    # Under `jit`, because JAX then removes its own residuals that nothing reads.
    jitted = jax.jit(lambda *xs: list(fn(*xs)))
    trace = jax.make_jaxpr(lambda *xs: jax.vjp(jitted, *xs), return_shape=True)
    program, (out, pull) = trace(*leaves)
    kept, treedef = jax.tree.flatten(pull)
    jaxpr = program.jaxpr
    backward = jax.make_jaxpr(lambda res, cts: jax.tree.unflatten(treedef, res)(cts))
    closed = backward(kept, out)
    _, read = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    # Also for a NumPy array, since JAX has a copy.
    is_held = lambda x: any(
        x is y or (isinstance(y, np.ndarray) and np.array_equal(x, y))
        for y in case.subject.constants
    )
    captured = zip(jaxpr.constvars, program.consts, strict=True)
    arguments = {*jaxpr.invars, *(v for v, x in captured if is_held(x))}
    # The outputs are not kept; they come first. One array may be kept twice.
    outvars = zip(jaxpr.outvars[len(jax.tree.leaves(out)) :], read, strict=False)
    kept_vars = {v: is_read for v, is_read in outvars if not isinstance(v, Literal)}
    unread = [
        f"{v.aval.dtype}{list(v.aval.shape)}"
        + " (an argument, which is not in the bytes above)" * (v in arguments)
        for v, is_read in kept_vars.items()
        if not is_read and v.aval.size > 0 and (arguments_count or v not in arguments)
    ]
    total = sum(bytes_of(v.aval) for v in kept_vars if v not in arguments)
    return total, unread, any(read[len(kept) :])
