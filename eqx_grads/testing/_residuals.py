"""The check `residuals`: the arrays that are kept for the backward pass."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

# Public, if little known: the pass with which JAX itself drops dead equations.
from jax.interpreters.partial_eval import dce_jaxpr

from .._jaxprs.structure import Call, Scan, structure
from .._rules.custom_vjp import custom_vjp
from ._case import Case
from ._outcome import outcome
from ._report import broke, failed, Finding, passed, skipped
from ._subject import is_output
from ._table import NO_REVERSE


_STEPS = 7  # no other axis is likely to have this length


class Residuals(NamedTuple):
    """The bytes of the residuals without the arguments, the residuals never read, and whether
    the cotangents that come out depend on those that go in."""

    total: int
    unread: list[str]
    is_derivative: bool


def residuals(case: Case) -> Iterator[Finding]:
    """Count the bytes of the residuals; fail if the backward pass never reads some of them."""
    if not case.outputs:
        yield skipped("residuals", "no output has a derivative")
        return
    if not case.has_reverse:
        yield skipped("residuals", NO_REVERSE)
        return
    kept = outcome(_kept, case, case.own.f, isinstance(case.subject.fn, jax.custom_vjp))
    if isinstance(kept, Exception):
        yield broke("residuals", "the residuals", kept)
        return
    kept, per_step = kept
    where = f"{kept.total} bytes per call, {per_step} per scan step, without the arguments"
    # Without the rule of `implicit` there is no derivative; of the solver there may be one.
    for fn in (case.own.plain, _decorated(case)):
        plain = outcome(_kept, case, fn)
        # And not `stop_gradient`, or rounding.
        if not isinstance(plain, Exception) and plain[0].is_derivative:
            where += f" (plain autodiff: {plain[0].total} per call, {plain[1]} per scan step)"
            break
    limit = case.options.max_residual_bytes
    if kept.unread and _has_backward_rule(case.subject.fn):
        text = f"kept for the backward pass and never read: {', '.join(kept.unread[:4])}"
        cause = "the forward rule returns residuals that the backward rule ignores"
        yield failed("residuals", where, text, cause)
    elif limit is not None and kept.total > limit:
        text = f"{kept.total} bytes are kept, and `max_residual_bytes` is {limit}"
        yield failed("residuals", where, text)
    else:
        yield passed("residuals", where)


def _kept(case: Case, fn, arguments_count: bool = False) -> tuple[Residuals, int]:
    """The residuals of a call, and the bytes of each step of a scan over the leaves."""
    leaves, held = case.subject.leaves, case.subject.constants
    kept = residuals_of(fn, leaves, held, arguments_count=arguments_count)
    scanned = lambda *xs: jax.lax.scan(lambda c, x: (c, list(fn(*x))), None, list(xs))[1]
    copies = [np.stack([x] * _STEPS) for x in leaves]
    return kept, residuals_of(scanned, copies, held).total // _STEPS


def _decorated(case: Case) -> Callable[..., list[Any]]:
    """The function that was decorated, called as the one that is checked."""

    def call(*leaves):
        fn, args = case.subject.tree(leaves)
        if hasattr(fn, "__func__"):
            fn, args = fn.__func__, (fn.__self__, *args)
        out = fn.fn(*args, **case.subject.kwargs)
        return [jnp.asarray(x) for x in jax.tree.leaves(out) if is_output(x)]

    return call


def _has_backward_rule(fn: Any) -> bool:
    """Whether the residuals are those that a forward rule of the user's returned. Inside other
    functions, JAX and the wrappers of rules keep residuals of their own."""
    if isinstance(fn, jax.custom_vjp | eqx.filter_custom_vjp):
        return True
    decorated = getattr(fn, "__func__", fn)
    return isinstance(decorated, custom_vjp)


def residuals_of(
    fn: Any, leaves: Sequence[Any], held: Sequence[Any] = (), *, arguments_count: bool = False
) -> Residuals:
    """The residuals of `fn`. Arguments are not counted, as the caller holds them anyway.

    `held`: those that are not perturbed, which `fn` captures.
    `arguments_count`: whether an argument that is kept and never read is reported. It is not
    the rule's fault if the wrapper always keeps the arguments (Equinox's and ours do).
    """
    # Under `jit`, because JAX then removes residuals of its own that nothing reads.
    jitted = jax.jit(lambda *xs: list(fn(*xs)))
    trace = jax.make_jaxpr(lambda *xs: jax.vjp(jitted, *xs), return_shape=True)
    program, (out, pull) = trace(*leaves)
    kept, treedef = jax.tree.flatten(pull)
    # The outputs are not kept; they come first.
    outvars = program.jaxpr.outvars[len(jax.tree.leaves(out)) :]
    jaxpr = program.jaxpr
    backward = lambda res, cts: jax.tree.unflatten(treedef, res)(cts)
    closed = jax.make_jaxpr(backward)(kept, out)
    _, read = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    captured = zip(jaxpr.constvars, program.consts, strict=True)
    arguments = {id(v) for v in jaxpr.invars}
    arguments |= {id(v) for v, x in captured if any(_is_same(x, y) for y in held)}
    arguments = _with_converted(jaxpr, arguments)
    seen: set[int] = set()
    total, unread = 0, []
    for var, aval, is_read in zip(outvars, kept, read, strict=False):
        if isinstance(var, Literal) or id(var) in seen:
            continue
        seen.add(id(var))
        if id(var) not in arguments:
            total += int(np.prod(aval.shape)) * _itemsize(aval.dtype)
        elif not arguments_count:
            continue
        if not is_read and aval.size > 0:
            is_argument = id(var) in arguments
            what = " (an argument, which is not in the bytes above)" if is_argument else ""
            unread.append(f"{aval.dtype}{list(aval.shape)}{what}")
    return Residuals(total, unread, any(read[len(kept) :]))


def _with_converted(jaxpr: Any, arguments: set[int]) -> set[int]:
    """The variables that are arguments, by their ids, and those that are a Python number among
    them: JAX makes an array of its own of a number, with the same value, before it computes
    with another array."""
    found = set(arguments)
    for eqn in jaxpr.eqns:
        known = structure(eqn)
        start = end = 0
        if isinstance(known, Scan):
            # Of what goes in, a slice in each step; of what comes out, one as well.
            start, end = known.n_consts + known.n_carry, known.n_carry
        if isinstance(known, Call | Scan):
            inner = known.programs[0].jaxpr
            pairs = zip(eqn.invars[start:], inner.invars[start:], strict=True)
            inside = _with_converted(inner, {id(v) for x, v in pairs if id(x) in found})
            outs = zip(eqn.outvars[end:], inner.outvars[end:], strict=True)
            found |= {id(x) for x, v in outs if id(v) in inside}
        elif eqn.primitive.name == "convert_element_type" and id(eqn.invars[0]) in found:
            (x,), (out,) = eqn.invars, eqn.outvars
            found |= {id(out)} if x.aval.weak_type and x.aval.dtype == out.aval.dtype else set()
    return found


def _is_same(x: Any, y: Any) -> bool:
    """Also of a NumPy array, of which JAX has a copy."""
    return x is y or (isinstance(y, np.ndarray) and np.array_equal(x, y))


def _itemsize(dtype) -> int:
    return getattr(dtype, "itemsize", 4)
