"""The check `residuals`: the arrays that are kept for the backward pass."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import Literal

# Public, if little known: the pass with which JAX itself drops dead equations.
from jax.interpreters.partial_eval import dce_jaxpr

from .._diagnosis._memory.residuals import bytes_of
from .._rules.custom_vjp import custom_vjp
from ._case import Case
from ._outcome import outcome
from ._report import broke, failed, Finding, passed, skipped
from ._table import NO_REVERSE


def residuals(case: Case) -> Iterator[Finding]:
    """Count the bytes of the residuals; fail if the backward pass never reads some of them."""
    if not case.has_reverse:
        yield skipped("residuals", NO_REVERSE)
        return
    fn, limit = case.subject.fn, case.options.max_residual_bytes
    kept = outcome(_kept, case, case.own.f, isinstance(fn, jax.custom_vjp))
    if isinstance(kept, Exception):
        yield broke("residuals", "the residuals", kept)
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
        yield failed("residuals", where, text, cause)
    elif limit is not None and total > limit:
        text = f"{total} bytes are kept, and `max_residual_bytes` is {limit}"
        yield failed("residuals", where, text)
    else:
        yield passed("residuals", where)


def _kept(case: Case, fn: Any, arguments_count: bool = False) -> tuple[int, list[str], bool]:
    """The bytes of the residuals of `fn` without the arguments, which the caller holds anyway;
    the residuals never read; and whether the cotangents that come out depend on the cotangents
    that go in.

    `arguments_count`: whether an argument that is kept and never read is reported. It is not
    the rule's fault if the wrapper always keeps the arguments (Equinox's and ours do).
    """
    # With a type that is not weak: JAX makes another array of a Python number, to compute with.
    leaves = [jax.lax.convert_element_type(x, x.dtype) for x in case.subject.leaves]
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
