"""A host function and its rules as functions of flat lists of NumPy arrays."""

import collections
import dataclasses
import functools as ft
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import name_of, place_of, rule_error, RuleError, show_tree, type_of
from .._rules.closure_convert import Opaque
from .._rules.flatten_call import Signature
from .._rules.rule import Rule
from .._tangent_spaces import is_none, match_leaves
from .host_callback import AbstractHostOp, batch_shape, check_shape


Types = tuple[jax.ShapeDtypeStruct, ...]


class HostCode(Opaque):
    """The user's function, its rules and its options. Static data for JAX: compared by
    identity. A rule may be given, or replaced, at any time."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        vmap_method: str,
        out: Any = None,
        example: Any = None,
        finite_difference: str | None = None,
        step: Any = None,
        max_rule_calls: int = 0,
        is_linear: bool = False,
    ):
        self.fn = fn
        self.out = out
        self.example = example
        self.finite_difference = finite_difference
        self.step = step
        self.max_rule_calls = max_rule_calls
        self.vmap_method = vmap_method
        self.is_linear = is_linear  # in its first argument, which has its derivative elsewhere
        self.name = name_of(fn)
        self.place = place_of(fn)
        self.signature = Signature(fn)
        self.fwd: Rule | None = None
        self.bwd: Rule | None = None
        self.jvp: Rule | None = None
        self.residuals: Any = None  # what `def_fwd` was told of them
        self.kept = ResidualCache(0)
        self.example_out: Any = None


def is_inexact(t: Any) -> bool:
    return jnp.issubdtype(t.dtype, jnp.inexact)


def is_array_leaf(x: Any) -> bool:
    """What is an operand: all but Python's integers, strings, functions and the like."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)


@dataclasses.dataclass(frozen=True)
class PrimalOp(AbstractHostOp):
    """A call of the user's function.

    - `treedef`, `statics`: the tree `(args, kwargs)`, and its leaves that are no arrays, with
        `None` in the place of the arrays.
    - `n_args`: how many of the arrays are in `args`, and can be differentiated.
    """

    code: HostCode
    treedef: Any
    statics: tuple[Any, ...]
    n_args: int
    in_types: Types
    out_treedef: Any
    out_types: Types
    steps: tuple[float | None, ...]

    @property
    def name(self):
        return self.code.name

    @property
    def place(self):
        return self.code.place

    @property
    def vmap_method(self):
        return self.code.vmap_method

    def out_path(self, i):
        return _path_of_leaf(self.out_treedef, i)

    def run(self, leaves):
        args, kwargs = self.arguments(leaves)
        return self.flatten_out(self.code.fn(*args, **kwargs), self.code.name, self.code.place)

    @ft.cached_property
    def arrays(self) -> list[int]:
        """Which leaves of `(args, kwargs)` are arrays."""
        return [i for i, x in enumerate(self.statics) if x is None]

    @ft.cached_property
    def out_inexact(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.out_types) if is_inexact(t))

    def arguments(self, leaves: Sequence[Any], statics: Any = None) -> Any:
        """`(args, kwargs)` with these arrays."""
        full = list(self.statics if statics is None else statics)
        for i, x in zip(self.arrays, leaves, strict=True):
            full[i] = x
        return self.treedef.unflatten(full)

    def tangents(self, ts: Sequence[Any]) -> Any:
        """A tree like `args` with `ts` (`None`: zero) for its arrays, and `None` elsewhere."""
        full = [*ts, *[None] * (len(self.in_types) - self.n_args)]
        return self.arguments(full, [None] * len(self.statics))[0]

    def in_path(self, i: int) -> str:
        """Array number `i`, as the user would write it."""
        paths = jax.tree_util.tree_leaves_with_path(
            self.arguments(range(len(self.in_types)), [None] * len(self.statics))
        )
        (part, first, *rest), _ = paths[i]
        if part.idx == 0:
            return f"`{self.code.signature.names[first.idx]}{jax.tree_util.keystr(tuple(rest))}`"
        return f"`{first.key}{jax.tree_util.keystr(tuple(rest))}`"

    def flatten_out(self, out: Any, name: str, place: str) -> list[Any]:
        """The leaves of what the function, or its forward rule, returned."""
        leaves, treedef = jax.tree.flatten(out)
        if treedef != self.out_treedef:
            promised = jax.tree.unflatten(self.out_treedef, self.out_types)
            raise rule_error(
                f"`{name}` returned another structure than was promised.",
                f"promised was {show_tree(promised)}",
                f"returned was {show_tree(out)}",
                place,
                do="Return the promised structure, or promise another one in `out`.",
            )
        return leaves


def _path_of_leaf(treedef, i) -> str:
    paths = jax.tree_util.tree_leaves_with_path(
        jax.tree.unflatten(treedef, range(treedef.num_leaves))
    )
    return "out" + jax.tree_util.keystr(paths[i][0])


class ResidualCache(Opaque):
    """The residuals of the last calls, which stay on the host.

    They are found by the values of the arguments and not by a handle. So it does not matter if
    JAX calls a forward rule twice, or drops it, or never calls the backward rule: residuals
    that are not found are computed again, and no more than `most` of them are ever kept.
    """

    def __init__(self, most: int):
        self.most = most
        self._found: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self):
        return ResidualCache, (self.most,)

    def put(self, key: Any, residuals: Any) -> None:
        with self._lock:
            self._found[key] = residuals
            self._found.move_to_end(key)
            while len(self._found) > self.most:
                self._found.popitem(last=False)

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The residuals, computed where they are not kept."""
        with self._lock:
            if key in self._found:
                return self._found[key]
        return compute()

    def __len__(self):
        return len(self._found)


def _key(call: PrimalOp, leaves: Sequence[np.ndarray]) -> Any:
    digest = hashlib.blake2b(digest_size=16)
    for x in leaves:
        digest.update(repr((x.shape, x.dtype)).encode())
        digest.update(np.ascontiguousarray(x).tobytes())
    return call, digest.digest()


@dataclasses.dataclass(frozen=True)
class ForwardOp(AbstractHostOp):
    """A call of the forward rule: the outputs, then the residuals that are passed through
    (`residual_treedef` is `None` if they stay on the host)."""

    call: PrimalOp
    residual_treedef: Any
    residual_types: Types

    @property
    def rule(self) -> Rule:
        assert self.call.code.fwd is not None
        return self.call.code.fwd

    @property
    def name(self):
        return self.rule.name

    @property
    def place(self):
        return self.rule.place

    @property
    def vmap_method(self):
        return self.call.vmap_method

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
        return "residuals" + _path_of_leaf(self.residual_treedef, i - n).removeprefix("out")

    def run(self, leaves):
        out, residuals = self.call_rule(leaves)
        flat = self.call.flatten_out(out, self.name, self.place)
        if self.residual_treedef is None:
            self.call.code.kept.put(_key(self.call, leaves), residuals)
            return flat
        arrays, treedef = jax.tree.flatten(residuals)
        if treedef != self.residual_treedef:
            promised = jax.tree.unflatten(self.residual_treedef, self.residual_types)
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
        args, kwargs = self.call.arguments(leaves)
        result = self.rule(*args, **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise rule_error(
                f"The forward rule `{self.name}` of `{self.call.name}` did not return a pair.",
                f"it returned {show_tree(result)}",
                self.place,
                do="Return `out, residuals`: the value, and what the backward rule needs.",
            )
        return result[0], result[1]


@dataclasses.dataclass(frozen=True)
class TangentOp(AbstractHostOp):
    """A call of `def_jvp`'s rule. The inputs are those of the function, then the tangents of
    the inputs `live`; the outputs are the tangents of the inexact outputs."""

    call: PrimalOp
    live: tuple[int, ...]

    @property
    def rule(self) -> Rule:
        assert self.call.code.jvp is not None
        return self.call.code.jvp

    @property
    def name(self):
        return self.rule.name

    @property
    def place(self):
        return self.rule.place

    @property
    def vmap_method(self):
        return self.call.vmap_method

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
        ts = [
            given.get(i, np.zeros_like(x)) if is_inexact(x) else None
            for i, x in enumerate(primals[: call.n_args])
        ]
        args, kwargs = call.arguments(primals)
        result = self.rule(args, call.tangents(ts), **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise rule_error(
                f"The forward rule `{self.name}` of `{call.name}` did not return a pair.",
                f"it returned {show_tree(result)}",
                self.place,
                do="Return `out, t_out`: the value and its tangent.",
            )
        call.flatten_out(result[0], self.name, self.place)
        fail = _misfit(self, "a tangent that does not have the structure of its output")
        out = jax.tree.unflatten(call.out_treedef, call.out_types)
        leaves_out = jax.tree.leaves(out, is_leaf=is_none)
        matched = match_leaves(result[1], out, "out", fail)
        t_out = [t for t, x in zip(matched, leaves_out, strict=True) if x is not None]
        batch = batch_shape(self, leaves)
        return [
            np.zeros(batch + t.shape, t.dtype) if t_out[i] is None else t_out[i]
            for i, t in ((i, call.out_types[i]) for i in call.out_inexact)
        ]


@dataclasses.dataclass(frozen=True)
class CotangentOp(AbstractHostOp):
    """A call of `def_bwd`'s rule. The inputs are those of the function, then the residuals that
    were passed through, then the cotangents of the inexact outputs; the outputs are the
    cotangents of the inputs `live`.

    With `recompute`, the residuals that were passed through are not used but computed again, so
    that this is a function of the arguments, of which differences can be taken.
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

    @property
    def name(self):
        return self.rule.name

    @property
    def place(self):
        return self.rule.place

    @property
    def vmap_method(self):
        return self.call.vmap_method

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
        args, kwargs = call.arguments(primals)
        if self.rule.keyword_only:
            flags = [i in self.live for i in range(call.n_args)]
            kwargs = self.rule.asked_for({"perturbed": call.tangents(flags), **kwargs})
        else:
            kwargs = {}
        result = self.rule(residuals, jax.tree.unflatten(call.out_treedef, ct), **kwargs)
        cts = self._flatten(result, args)
        batch = batch_shape(self, leaves)
        return [self._fit(k, i, cts[i], batch) for k, i in enumerate(self.live)]

    def _residuals(self, primals, passed):
        call, forward = self.call, self.forward
        if call.code.fwd is None:
            return call.arguments(primals)[0]
        if forward.residual_treedef is None:
            # Not put there: a backward rule needs them once, or in the order of a scan.
            compute = lambda: forward.call_rule(primals)[1]
            return call.code.kept.get(_key(call, primals), compute)
        if self.recompute:
            return forward.call_rule(primals)[1]
        return jax.tree.unflatten(forward.residual_treedef, passed)

    def _flatten(self, result, args) -> list[Any]:
        """The cotangents of the arrays among the arguments."""
        call = self.call
        if not isinstance(result, tuple | list) or len(result) != len(args):
            names = ", ".join(f"`{call.code.signature.names[i]}`" for i in range(len(args)))
            raise rule_error(
                f"The backward rule `{self.name}` of `{call.name}` did not return one "
                "cotangent for each argument.",
                f"`{call.name}` has {len(args)}: {names}",
                f"the rule returned {show_tree(result)}",
                self.place,
                do="Return a tuple, also for a single argument: `return (ct,)`. `None` is zero.",
            )
        fail = _misfit(self, "a cotangent that does not have the structure of its argument")
        cts = []
        for i, (ct, arg) in enumerate(zip(result, args, strict=True)):
            if isinstance(ct, np.ndarray) and isinstance(arg, np.ndarray):
                cts.append(ct)
                continue
            leaves = jax.tree.leaves(arg, is_leaf=is_none)
            matched = match_leaves(ct, arg, call.code.signature.names[i], fail)
            cts.extend(
                c for c, x in zip(matched, leaves, strict=True) if isinstance(x, np.ndarray)
            )
        return cts

    def _fit(self, k, i, ct, batch):
        t = self.call.in_types[i]
        if ct is None:
            return np.zeros(batch + t.shape, t.dtype)
        ct = check_shape(self, k, ct, batch)
        # As everywhere: the cotangent of a real value is real.
        return ct.real if np.iscomplexobj(ct) and t.dtype.kind != "c" else ct


def _misfit(op, what) -> Callable[..., RuleError]:
    def fail(*where, do):
        message = f"The rule `{op.name}` of `{op.call.name}` returned {what}."
        return rule_error(message, *where, op.place, do=do)

    return fail


def check_key(x: Any, path: str, name: str) -> None:
    """Raise if `x` is a random key of JAX, which NumPy has no type for."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise rule_error(
            f"`{name}` runs on the host, and was given a random key.",
            f"at {path}: {type_of(x)}",
            do="Pass `jax.random.key_data(key)`, an array of integers.",
        )
