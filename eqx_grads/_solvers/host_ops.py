"""A host function as a function of a flat list of NumPy arrays."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import name_of, place_of, rule_error, show_path, show_tree
from .._errors.trees import leaf_paths, mirror, mirror_of
from .._rules.closure_convert import Opaque
from .._rules.rule import Rule
from .._rules.signature import Signature
from .host_callback import AbstractHostOp, described
from .host_residual_cache import ResidualCache


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
        adjoint_of: str = "",
    ):
        self.fn = fn
        self.out = out
        self.example = example
        self.finite_difference = finite_difference
        self.step = step
        self.max_rule_calls = max_rule_calls
        self.vmap_method = vmap_method
        self.is_linear = is_linear  # in its first argument, which has its derivative elsewhere
        self.adjoint_of = adjoint_of  # the name of the map of which this is the adjoint
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


def is_complex(t: Any) -> bool:
    return jnp.issubdtype(t.dtype, jnp.complexfloating)


def is_array_leaf(x: Any) -> bool:
    """What is an operand: all but Python's integers, strings, functions and the like."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)


def without_memory(types: Sequence[Any]) -> list[np.ndarray]:
    """Arrays of these types, to unflatten a user's class with."""
    return [np.broadcast_to(np.zeros((), t.dtype), t.shape) for t in types]


@dataclasses.dataclass(frozen=True)
class PrimalOp(AbstractHostOp):
    """A call of the user's function.

    - `treedef`, `statics`: the tree `(args, kwargs)`, and its leaves that are no arrays, with
        `None` in the place of the arrays.
    - `n_args`: how many of the arrays are in `args`, and can be differentiated.
    - `defaults`: the positional arguments that were left at their default. Rules are given
        them behind the others; the function is called as the caller called it.
    """

    code: HostCode
    treedef: Any
    statics: tuple[Any, ...]
    n_args: int
    in_types: Types
    out_treedef: Any
    out_types: Types
    steps: tuple[float | None, ...]
    # Follows from the rest and JAX's precision, of which a program is made.
    defaults: tuple[Any, ...] = dataclasses.field(default=(), compare=False)

    @property
    def call(self):
        return self

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
        return path_of_leaf(self.out_treedef, i)

    def run(self, leaves):
        args, kwargs = self.arguments(leaves)
        return self.flatten_out(self.code.fn(*args, **kwargs), self)

    @ft.cached_property
    def arrays(self) -> list[int]:
        """Which leaves of `(args, kwargs)` are arrays."""
        return [i for i, x in enumerate(self.statics) if x is None]

    @ft.cached_property
    def out_inexact(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.out_types) if is_inexact(t))

    def arguments(self, leaves: Sequence[Any]) -> Any:
        """`(args, kwargs)` with these arrays."""
        return self.treedef.unflatten(self._leaves(leaves, self.statics))

    def types(self) -> Any:
        """`(args, kwargs)` with types instead of the arrays."""
        like = self._leaves(without_memory(self.in_types), self.statics)
        return mirror_of(self.treedef, self._leaves(self.in_types, self.statics), like)

    def _leaves(self, arrays, statics):
        full = list(statics)
        for i, x in zip(self.arrays, arrays, strict=True):
            full[i] = x
        return full

    def rule_arguments(self, leaves: Sequence[Any]) -> Any:
        """`(args, kwargs)` as a rule is given them, with these arrays."""
        args, kwargs = self.arguments(leaves)
        return (*args, *self.defaults), kwargs

    @property
    def names(self) -> list[str]:
        """The positional arguments that a rule is given."""
        n = len(self.treedef.children()[0].children()) + len(self.defaults)
        return [self.code.signature.names[i] for i in range(n)]

    def keywords(self, rule: Rule, args: Any, kwargs: Any) -> dict[str, Any]:
        """The keyword-only arguments for a rule. Default values of the function are among them
        if the rule has a parameter for them, as for the rules of `custom_vjp`."""
        _, kwargs, filled = self.code.signature.bind(args, kwargs, False)
        return rule.keywords(kwargs, filled)

    def tangents(self, ts: Sequence[Any], of_default: Callable[[Any], Any]) -> Any:
        """A tree like `args` with `ts` (`None`: zero) for its arrays, `of_default(x)` for each
        array `x` in a default value, and `None` elsewhere."""
        args, _ = self.treedef.unflatten(self._of_args(ts))
        of_leaf = lambda x: of_default(x) if isinstance(x, np.ndarray) else None
        return (*args, *jax.tree.map(of_leaf, self.defaults))

    def flags(self, flags: Sequence[bool], arrays: Sequence[Any]) -> Any:
        """As `tangents`, with bools; those of the `arrays` of the arguments are `flags`."""
        args, _ = mirror_of(
            self.treedef,
            self._of_args(flags),
            self._leaves(arrays, [object()] * len(self.statics)),
        )
        of_leaf = lambda x: False if isinstance(x, np.ndarray) else None
        return (*args, *mirror(of_leaf, self.defaults))

    def _of_args(self, values):
        full = [*values, *[None] * (len(self.in_types) - self.n_args)]
        return self._leaves(full, [None] * len(self.statics))

    def in_path(self, i: int) -> str:
        """Array number `i`, as the user would write it."""
        part, first, *rest = leaf_paths(self.treedef)[self.arrays[i]]
        if part.idx == 0:
            return f"`{self.code.signature.names[first.idx]}{show_path(tuple(rest))}`"
        return f"`{first.key}{show_path(tuple(rest))}`"

    def flatten_out(self, out: Any, op: AbstractHostOp) -> list[Any]:
        """The leaves of what `op` returned: the function, or a rule for it."""
        leaves, treedef = jax.tree.flatten(out)
        if treedef != self.out_treedef:
            promised = mirror_of(self.out_treedef, self.out_types)
            raise rule_error(
                f"{described(op)} returned another structure than was promised.",
                f"promised was {show_tree(promised)}",
                f"returned was {show_tree(out)}",
                op.place,
                do="Return the promised structure, or promise another one in `out`.",
            )
        return leaves


def path_of_leaf(treedef: Any, i: int) -> str:
    """Where leaf number `i` of an output is."""
    return "out" + show_path(leaf_paths(treedef)[i])
