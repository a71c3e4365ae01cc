"""The rules of a host function as functions of flat arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import pair_of, rule_error, RuleError, show_tree
from .._rules.rule import advice_on_cotangents
from .._tangent_spaces import broadcasts_to, is_none, match_leaves, sum_dtype
from .host_call import HostCall
from .host_op import HostOp, inexact, is_complex, is_inexact, read_only
from .promised_types import is_array_leaf
from .residual_cache import digest_key


def forward_op(call: HostCall) -> HostOp:
    """The forward rule. Its residuals stay on the host."""
    return dataclasses.replace(call.op, run=run_fwd, source=call.code.fwd)


def run_fwd(op, leaves):
    out, residuals = _forward(op, leaves)
    op.call.code.kept.put(digest_key(op.call, leaves), residuals)
    return op.call.flat_out(op, out)


def _forward(op, leaves) -> tuple[Any, Any]:
    args, kwargs = op.call.rule_arguments(leaves, op.source)
    do = "Return `out, residuals`: the value, and what the backward rule needs."
    return pair_of(op.source(*args, **kwargs), f"The rule {op.described}", op.place, do)


def tangent_op(call: HostCall, live: tuple[int, ...]) -> HostOp:
    """The rule of `def_jvp`. Its inputs are the inputs of the function, then the tangents of
    the inputs `live`. Its outputs are the tangents of the inexact outputs."""
    places = [i for i, t in enumerate(call.out_types) if is_inexact(t)]
    return HostOp(
        run_jvp,
        call,
        (live,),
        call.code.jvp,
        call.in_types + tuple(call.in_types[i] for i in live),
        inexact(call.out_types),
        lambda i: "the tangent of " + call.out_path(places[i]),
    )


def run_jvp(op, leaves):
    call, rule, n = op.call, op.source, len(op.call.in_types)
    primals, given = list(leaves[:n]), dict(zip(op.parts[0], leaves[n:], strict=True))
    zero = lambda x: read_only(np.zeros_like(x)) if is_inexact(x) else None
    ts = [given.get(i, zero(x)) for i, x in enumerate(primals[: call.n_args])]
    args, kwargs = call.rule_arguments(primals, rule)
    result = rule(args, call.tangents(ts), **kwargs)
    do = "Return `out, t_out`: the value and its tangent."
    value, tangent = pair_of(result, f"The rule {op.described}", op.place, do)
    call.flat_out(op, value)
    fail = _misfit(op, "a tangent that does not have the structure of its output")
    matched = match_leaves(tangent, value, "out", fail)
    leaves_out = jax.tree.leaves(value, is_leaf=is_none)
    t_out = [t for t, x in zip(matched, leaves_out, strict=True) if x is not None]
    pairs = [p for p in zip(t_out, call.out_types, strict=True) if is_inexact(p[1])]
    zeros = lambda t: np.zeros(op.batch(leaves) + t.shape, t.dtype)
    return [zeros(t) if t_leaf is None else t_leaf for t_leaf, t in pairs]


def cotangent_op(call: HostCall, live: tuple[int, ...]) -> HostOp:
    """The rule of `def_bwd`. Its inputs are the inputs of the function, then the cotangents of
    the inexact outputs. Its outputs are the cotangents of the inputs `live`."""
    return HostOp(
        run_bwd,
        call,
        (live,),
        call.code.bwd,
        call.in_types + inexact(call.out_types),
        tuple(call.in_types[i] for i in live),
        lambda i: "the cotangent of " + call.in_path(live[i]),
    )


def run_bwd(op, leaves):
    call, rule, live, n = op.call, op.source, op.parts[0], len(op.call.in_types)
    primals, cts = list(leaves[:n]), iter(leaves[n:])
    ct = [next(cts) if is_inexact(t) else None for t in call.out_types]
    ct = jax.tree.unflatten(call.out_treedef, ct)
    args, kwargs = call.rule_arguments(primals, rule)
    residuals = args
    if call.code.fwd is not None:
        compute = lambda: _forward(forward_op(call), primals)[1]
        residuals = call.code.kept.get(digest_key(call, primals), compute)
    if "perturbed" in rule.keyword_only:
        flags = [i in live for i in range(call.n_args)]
        kwargs = {"perturbed": call.flags(flags, primals), **kwargs}
    result = rule(residuals, ct, **rule.asked_for(kwargs))
    cts = _flat_cotangents(op, result, args)
    return [_fit(op, k, cts[i], leaves) for k, i in enumerate(live)]


def _flat_cotangents(op, result, args) -> list[Any]:
    """The cotangents of the arrays among the arguments."""
    if not isinstance(result, tuple | list) or len(result) != len(args):
        names = ", ".join(f"`{name}`" for name in op.call.names)
        raise rule_error(
            f"The backward rule {op.described} did not return one cotangent for each argument.",
            f"`{op.call.name}` has {len(args)}: {names}",
            f"the rule returned {show_tree(result)}",
            op.place,
            do=advice_on_cotangents(result),
        )
    fail = _misfit(op, "a cotangent that does not have the structure of its argument")
    cts = []
    for ct, arg, name in zip(result, args, op.call.names, strict=True):
        leaves = jax.tree.leaves(arg, is_leaf=is_none)
        matched = match_leaves(ct, arg, name, fail)
        cts.extend(c for c, x in zip(matched, leaves, strict=True) if is_array_leaf(x))
    return cts


def _fit(op, i, ct, leaves):
    t, batch = op.out_types[i], op.batch(leaves)
    if ct is None:
        return np.zeros(batch + t.shape, t.dtype)
    do = "Return a cotangent of the shape of its argument, or of one that the argument "
    do += "broadcasts to. Did a sum drop an axis, or is a transpose missing?"
    ct = op.fitted(i, _summed(np.asarray(ct), batch, t.shape), leaves, do)
    # The cotangent of a real value is real, as in all rules of this library.
    return ct if is_complex(t) else np.real(ct)


def _summed(ct: np.ndarray, batch: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """A cotangent summed over the axes that its argument was broadcast over. The axes of `vmap`
    come first."""
    own = ct.shape[len(batch) :]
    if own == shape or not broadcasts_to(shape, own) or not is_inexact(ct):
        return ct
    from_end = range(-len(own), 0)
    axes = tuple(i for i in from_end if i < -len(shape) or own[i] != shape[i])
    total = np.sum(ct, axes, dtype=sum_dtype(ct.dtype), keepdims=True)
    return total.reshape((*ct.shape[: len(batch)], *shape))


def _misfit(op, what) -> Callable[..., RuleError]:
    def fail(*where, do):
        return rule_error(f"The rule {op.described} returned {what}.", *where, op.place, do=do)

    return fail
