"""The rules of a host function as functions of flat lists of NumPy arrays."""

import abc
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._errors import rule_error, RuleError, show_tree
from .._errors.trees import mirror_of
from .._rules.rule import advice_on_cotangents, Rule
from .._tangent_spaces import broadcasts_to, is_none, match_leaves, sum_dtype
from .host_callback import AbstractHostOp, batch_shape, check_shape, read_only
from .host_ops import is_array_leaf, is_complex, is_inexact, path_of_leaf, PrimalOp, Types
from .host_residual_cache import digest_key


class _AbstractRuleOp(AbstractHostOp):
    """A call of one of the user's rules."""

    @property
    @abc.abstractmethod
    def rule(self) -> Rule: ...

    @property
    def name(self):
        return self.rule.name

    @property
    def place(self):
        return self.rule.place

    @property
    def vmap_method(self):
        return self.call.vmap_method

    def pair(self, result: Any, do: str) -> tuple[Any, Any]:
        """What a forward rule returned."""
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise rule_error(
                f"The forward rule `{self.name}` of `{self.call.name}` did not return a pair.",
                f"it returned {show_tree(result)}",
                self.place,
                do=do,
            )
        return result[0], result[1]


@dataclasses.dataclass(frozen=True)
class ForwardOp(_AbstractRuleOp):
    """A call of the forward rule: the outputs, then the residuals that are passed through
    (`residual_treedef` is `None` if they stay on the host)."""

    call: PrimalOp
    residual_treedef: Any
    residual_types: Types

    @property
    def rule(self) -> Rule:
        assert self.call.code.fwd is not None
        return self.call.code.fwd

    @ft.cached_property
    def in_types(self):
        return self.call.in_types

    @ft.cached_property
    def out_types(self):
        return self.call.out_types + self.residual_types

    def out_path(self, i):
        n = len(self.call.out_types)
        if i < n:
            return self.call.out_path(i)
        return "residuals" + path_of_leaf(self.residual_treedef, i - n).removeprefix("out")

    def run(self, leaves):
        out, residuals = self.call_rule(leaves)
        flat = self.call.flatten_out(out, self)
        if self.residual_treedef is None:
            self.call.code.kept.put(digest_key(self.call, leaves), residuals)
            return flat
        arrays, treedef = jax.tree.flatten(residuals)
        if treedef != self.residual_treedef:
            promised = mirror_of(self.residual_treedef, self.residual_types)
            raise rule_error(
                f"`{self.name}` returned residuals of another structure than was promised.",
                f"promised was {show_tree(promised)}",
                f"returned was {show_tree(residuals)}",
                self.place,
                do="Return what `def_fwd(residuals=...)` says, or leave that out: then the "
                "residuals may be anything, and stay on the host.",
            )
        return [*flat, *arrays]

    def call_rule(self, leaves) -> tuple[Any, Any]:
        args, kwargs = self.call.rule_arguments(leaves)
        result = self.rule(*args, **self.call.keywords(self.rule, args, kwargs))
        do = "Return `out, residuals`: the value, and what the backward rule needs."
        return self.pair(result, do)


@dataclasses.dataclass(frozen=True)
class TangentOp(_AbstractRuleOp):
    """A call of `def_jvp`'s rule. The inputs are those of the function, then the tangents of
    the inputs `live`; the outputs are the tangents of the inexact outputs."""

    call: PrimalOp
    live: tuple[int, ...]

    @property
    def rule(self) -> Rule:
        assert self.call.code.jvp is not None
        return self.call.code.jvp

    @ft.cached_property
    def in_types(self):
        return self.call.in_types + tuple(self.call.in_types[i] for i in self.live)

    @ft.cached_property
    def out_types(self):
        return tuple(self.call.out_types[i] for i in self.call.out_inexact)

    def out_path(self, i):
        return "the tangent of " + self.call.out_path(self.call.out_inexact[i])

    def run(self, leaves):
        call, n = self.call, len(self.call.in_types)
        primals, given = list(leaves[:n]), dict(zip(self.live, leaves[n:], strict=True))
        zero = lambda x: read_only(np.zeros_like(x)) if is_inexact(x) else None
        ts = [given.get(i, zero(x)) for i, x in enumerate(primals[: call.n_args])]
        args, kwargs = call.rule_arguments(primals)
        kwargs = call.keywords(self.rule, args, kwargs)
        try:
            result = self.rule.of_tangents(args, call.tangents(ts, zero), **kwargs)
        except ValueError as error:
            self.rule.note_defaults(error, "`primals` and `tangents`", call.names)
            raise
        value, tangent = self.pair(result, "Return `out, t_out`: the value and its tangent.")
        call.flatten_out(value, self)
        fail = _misfit(self, "a tangent that does not have the structure of its output")
        leaves_out = jax.tree.leaves(value, is_leaf=is_none)
        matched = match_leaves(tangent, value, "out", fail)
        t_out = [t for t, x in zip(matched, leaves_out, strict=True) if x is not None]
        batch = batch_shape(self, leaves)
        return [
            np.zeros(batch + t.shape, t.dtype) if t_out[i] is None else t_out[i]
            for i, t in ((i, call.out_types[i]) for i in call.out_inexact)
        ]


@dataclasses.dataclass(frozen=True)
class CotangentOp(_AbstractRuleOp):
    """A call of `def_bwd`'s rule. The inputs are those of the function, then the residuals that
    were passed through, then the cotangents of the inexact outputs; the outputs are the
    cotangents of the inputs `live`.

    With `recompute`, the residuals are computed again, so that this is a function of the
    arguments, of which differences can be taken.
    """

    forward: ForwardOp
    live: tuple[int, ...]
    recompute: bool = False

    @property
    def call(self) -> PrimalOp:
        return self.forward.call

    @property
    def rule(self) -> Rule:
        assert self.call.code.bwd is not None
        return self.call.code.bwd

    @ft.cached_property
    def in_types(self):
        cts = tuple(self.call.out_types[i] for i in self.call.out_inexact)
        return self.call.in_types + self.forward.residual_types + cts

    @ft.cached_property
    def out_types(self):
        return tuple(self.call.in_types[i] for i in self.live)

    def out_path(self, i):
        return "the cotangent of " + self.call.in_path(self.live[i])

    def run(self, leaves):
        call, n = self.call, len(self.call.in_types)
        m = n + len(self.forward.residual_types)
        primals = list(leaves[:n])
        ct: list[Any] = [None] * len(call.out_types)
        for i, x in zip(call.out_inexact, leaves[m:], strict=True):
            ct[i] = x
        residuals = self._residuals(primals, leaves[n:m])
        args, kwargs = call.rule_arguments(primals)
        if self.rule.keyword_only:
            flags = [i in self.live for i in range(call.n_args)]
            perturbed = call.flags(flags, primals)
            kwargs = call.keywords(self.rule, args, kwargs)
            kwargs = self.rule.asked_for({"perturbed": perturbed, **kwargs})
        else:
            kwargs = {}
        ct = jax.tree.unflatten(call.out_treedef, ct)
        try:
            result = self.rule.of_tangents(residuals, ct, **kwargs)
        except ValueError as error:
            if call.code.fwd is None:  # the residuals are the arguments
                self.rule.note_defaults(error, "`residuals`", call.names)
            raise
        cts = self._flatten(result, args)
        return [self._fit(k, i, cts[i], leaves) for k, i in enumerate(self.live)]

    def _residuals(self, primals, passed):
        call, forward = self.call, self.forward
        if call.code.fwd is None:
            return call.rule_arguments(primals)[0]
        compute = lambda: forward.call_rule(primals)[1]
        if self.recompute:  # at another point each time, so that nothing is kept
            return compute()
        if forward.residual_treedef is not None:
            return jax.tree.unflatten(forward.residual_treedef, passed)
        return call.code.kept.get(digest_key(call, primals), compute)

    def _flatten(self, result, args) -> list[Any]:
        """The cotangents of the arrays among the arguments."""
        call = self.call
        if not isinstance(result, tuple | list) or len(result) != len(args):
            names = ", ".join(f"`{name}`" for name in call.names)
            raise rule_error(
                f"The backward rule `{self.name}` of `{call.name}` did not return one "
                "cotangent for each argument.",
                f"`{call.name}` has {len(args)}: {names}",
                f"the rule returned {show_tree(result)}",
                self.place,
                do=advice_on_cotangents(result),
            )
        fail = _misfit(self, "a cotangent that does not have the structure of its argument")
        cts = []
        for i, (ct, arg) in enumerate(zip(result, args, strict=True)):
            if isinstance(ct, np.ndarray) and isinstance(arg, np.ndarray):
                cts.append(ct)
                continue
            leaves = jax.tree.leaves(arg, is_leaf=is_none)
            matched = match_leaves(ct, arg, call.code.signature.names[i], fail)
            cts.extend(c for c, x in zip(matched, leaves, strict=True) if is_array_leaf(x))
        return cts

    def _fit(self, k, i, ct, leaves):
        t, batch = self.call.in_types[i], batch_shape(self, leaves)
        if ct is None:
            return np.zeros(batch + t.shape, t.dtype)
        do = "Return a cotangent of the shape of its argument, or of one that the argument "
        do += "broadcasts to. Did a sum drop an axis, or is a transpose missing?"
        ct = check_shape(self, k, _summed(np.asarray(ct), batch, t.shape), leaves, do)
        # The cotangent of a real value is real, as in all rules of this library.
        return np.real(ct) if np.iscomplexobj(ct) and not is_complex(t) else ct


def _summed(ct: np.ndarray, batch: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """A cotangent summed over the axes that its argument was broadcast over. The axes of `vmap`
    are in front of these, unless the cotangent is already as it should be."""
    own = ct.shape[len(batch) :]
    if ct.shape[ct.ndim - len(shape) :] == shape and ct.ndim <= len(batch) + len(shape):
        return ct
    if not broadcasts_to(shape, own) or not is_inexact(ct):
        return ct
    padded = (1,) * (len(own) - len(shape)) + shape
    axes = tuple(
        len(batch) + i for i, (p, n) in enumerate(zip(padded, own, strict=True)) if p != n
    )
    total = np.sum(ct, axes, dtype=sum_dtype(ct.dtype), keepdims=True).astype(ct.dtype)
    return total.reshape(ct.shape[: len(batch)] + shape)


def _misfit(op, what) -> Callable[..., RuleError]:
    def fail(*where, do):
        message = f"The rule `{op.name}` of `{op.call.name}` returned {what}."
        return rule_error(message, *where, op.place, do=do)

    return fail
