"""The check `residuals`: the arrays that are kept for the backward pass."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import Literal

# Public, if little known: the pass with which JAX itself drops dead equations.
from jax.interpreters.partial_eval import dce_jaxpr

from .._rules.custom_vjp import custom_vjp
from ._case import Case
from ._outcome import outcome
from ._report import broke, failed, Finding, passed, skipped
from ._table import NO_REVERSE


class Residuals(NamedTuple):
    """The bytes of the residuals without the arguments, the residuals never read, and whether
    the cotangents that come out depend on the cotangents that go in."""

    total: int
    unread: list[str]
    is_derivative: bool


def residuals(case: Case) -> Iterator[Finding]:
    """Count the bytes of the residuals; fail if the backward pass never reads some of them."""
    if not case.has_reverse:
        yield from [skipped("residuals", NO_REVERSE)] * bool(case.outputs)
        return
    kept = outcome(_kept, case, case.own.f, isinstance(case.subject.fn, jax.custom_vjp))
    if isinstance(kept, Exception):
        yield broke("residuals", "the residuals", kept)
        return
    where = f"{kept.total} bytes per call, without the arguments"
    plain = outcome(_kept, case, case.own.plain)
    # And not `stop_gradient`, or rounding.
    if not isinstance(plain, Exception) and plain.is_derivative:
        where += f" (plain autodiff: {plain.total})"
    limit = case.options.max_residual_bytes
    # Inside other functions, JAX and the wrappers of rules keep residuals of their own.
    fn = case.subject.fn
    has_rule = isinstance(getattr(fn, "__func__", fn), custom_vjp)
    has_rule |= isinstance(fn, jax.custom_vjp | eqx.filter_custom_vjp)
    if kept.unread and has_rule:
        text = f"kept for the backward pass and never read: {', '.join(kept.unread[:4])}"
        cause = "the forward rule returns residuals that the backward rule ignores"
        yield failed("residuals", where, text, cause)
    elif limit is not None and kept.total > limit:
        text = f"{kept.total} bytes are kept, and `max_residual_bytes` is {limit}"
        yield failed("residuals", where, text)
    else:
        yield passed("residuals", where)


def _kept(case: Case, fn: Any, arguments_count: bool = False) -> Residuals:
    """The residuals of `fn`. Arguments are not counted, as the caller holds them anyway.

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
    arguments = {id(v) for v in jaxpr.invars}
    # Also for a NumPy array, since JAX has a copy.
    is_held = lambda x: any(
        x is y or (isinstance(y, np.ndarray) and np.array_equal(x, y))
        for y in case.subject.constants
    )
    captured = zip(jaxpr.constvars, program.consts, strict=True)
    arguments |= {id(v) for v, x in captured if is_held(x)}
    # The outputs are not kept; they come first.
    outvars = jaxpr.outvars[len(jax.tree.leaves(out)) :]
    pairs = {
        id(v): (v, r) for v, r in zip(outvars, read, strict=False) if not isinstance(v, Literal)
    }
    total, unread = 0, []
    for key, (var, is_read) in pairs.items():
        is_argument, aval = key in arguments, var.aval
        if not is_argument:
            total += int(np.prod(aval.shape)) * getattr(aval.dtype, "itemsize", 4)
        if not is_read and aval.size > 0 and (arguments_count or not is_argument):
            what = " (an argument, which is not in the bytes above)" if is_argument else ""
            unread.append(f"{aval.dtype}{list(aval.shape)}{what}")
    return Residuals(total, unread, any(read[len(kept) :]))
