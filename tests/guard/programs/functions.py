"""Random functions of random PyTrees."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .formulas import Formula


# What is in a tree: ("leaf", index), ("none",), ("text",), ("function",), or a container of
# nodes: ("tuple", *nodes), and as well "list", "dict", or a class of `CLASSES`.
Node = tuple

AXIS = "guard"
INEXACT = ("float16", "bfloat16", "float32", "float64", "complex64", "float")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An argument. Its dtype may also be "float" or "int", for a Python number, or "key".

    `seed`: of the value.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    seed: int = 0

    @property
    def is_inexact(self) -> bool:
        return self.dtype in INEXACT

    def value(self) -> Any:
        return _value(self)

    @property
    def kind(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _value(leaf: Leaf) -> Any:
    rng = np.random.default_rng([leaf.seed, zlib.crc32(leaf.kind.encode())])
    draw = lambda: rng.uniform(0.2, 0.9, leaf.shape) * rng.choice([-1, 1], leaf.shape)
    if leaf.dtype == "key":
        keys = jax.random.split(jax.random.key(leaf.seed), int(np.prod(leaf.shape)))
        return keys.reshape(leaf.shape)
    if leaf.dtype == "int":
        return int(rng.integers(1, 5))
    if leaf.dtype == "float":
        return float(draw())
    if leaf.dtype.startswith("int"):
        return jnp.asarray(rng.integers(1, 5, leaf.shape), leaf.dtype)
    if leaf.dtype.startswith("complex"):
        return jnp.asarray(draw() + 1j * draw(), leaf.dtype)
    return jnp.asarray(draw(), leaf.dtype)


class Holder(eqx.Module):
    parts: tuple[Any, ...]
    label: str = eqx.field(static=True, default="holder")


def _computed(x: Any) -> Any:
    """What the constructor of a user's class computes: JAX promises to give it only arrays,
    tracers, `None` and `object()`, and the leaves of the user."""
    for leaf in jax.tree.leaves(x):
        is_number = eqx.is_array_like(leaf) and not isinstance(leaf, bool)
        if not (is_number or type(leaf) in (object, str) or leaf is jnp.exp):
            raise TypeError(f"a constructor was called with {leaf!r}")
    return x


@jax.tree_util.register_pytree_node_class
class Computing:
    """A user's class, without the paths of its leaves."""

    def __init__(self, *parts):
        self.parts = tuple(map(_computed, parts))

    def tree_flatten(self):
        return self.parts, "computing"

    @classmethod
    def tree_unflatten(cls, aux, children):
        assert aux == "computing"
        return cls(*children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    parts: tuple[Any, ...]

    def __post_init__(self):
        _computed(self.parts)


class Named(NamedTuple):
    parts: tuple[Any, ...]
    nothing: None = None


# The containers with a field `parts`, and how to make them.
CLASSES = {
    "module": (Holder, Holder), "class": (Computing, lambda parts: Computing(*parts)),
    "dataclass": (Frozen, Frozen), "namedtuple": (Named, Named),
}  # fmt: skip


def build(node: Node, values: Sequence[Any]) -> Any:
    """The PyTree that a node describes."""
    kind, *rest = node
    if kind == "leaf":
        return values[rest[0]]
    if kind == "none":
        return None
    if kind == "text":
        return "text"
    if kind == "function":
        return jnp.exp
    parts = [build(part, values) for part in rest]
    if kind == "dict":
        return {chr(ord("a") + i): part for i, part in enumerate(parts)}
    if kind in CLASSES:
        return CLASSES[kind][1](tuple(parts))
    return {"tuple": tuple, "list": list}[kind](parts)


def flatten(node: Node, tree: Any) -> list[tuple[int, Any]]:
    """The leaves of a tree like the node, with their indices. A part that is `None` holds
    `None` for each of its leaves. Other parts have to be the parts of the node."""
    kind, *rest = node
    if kind == "leaf":
        return [(rest[0], tree)]
    if kind in ("none", "text", "function"):
        # `False` in trees of flags.
        assert tree is None or tree is False or tree is build(node, ()), (node, tree)
        return []
    if tree is None:
        parts = [None] * len(rest)
    elif kind == "dict":
        assert isinstance(tree, dict)
        assert list(tree) == [chr(ord("a") + i) for i in range(len(rest))]
        parts = tree.values()
    elif kind in CLASSES and isinstance(tree, CLASSES[kind][0]):
        parts = tree.parts
    elif kind in ("class", "dataclass"):
        assert type(tree).__name__ == "Mirror"  # of `perturbed`, whose bools are no arrays
        parts = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
        parts = parts if kind == "class" else parts[0]
    else:
        assert type(tree) is {"tuple": tuple, "list": list}[kind]
        parts = tree
    pairs = zip(rest, parts, strict=True)
    return [pair for node, part in pairs for pair in flatten(node, part)]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of PyTrees: which leaves are where, and the formulas of its outputs.

    - `args`: the trees of its positional arguments.
    - `out`: the tree of its outputs. Its leaf `k` is the `k`-th of `formulas`, and after
        these the leaf `passed[k - len(formulas)]` of the arguments, plus one if it is an
        integer.
    - `style`: what the function is decorated with: a key of `STYLES` in `rules.py`. The rule of
        a style "own" is not what autodiff computes.
    - `nested`: whether the function and its rule call functions with rules.
    - `closed`: the leaves that the function closes over.
    - `by_keyword`: how many of the last arguments are passed by keyword.
    - `axis`: whether the function sums its formulas over the named axis `AXIS`.
    """

    leaves: tuple[Leaf, ...]
    args: tuple[Node, ...]
    out: Node
    formulas: tuple[Formula, ...]
    passed: tuple[int, ...] = ()
    style: str = "jvp"
    nested: bool = False
    closed: tuple[int, ...] = ()
    by_keyword: int = 0
    axis: bool = False

    @property
    def differentiable(self) -> tuple[int, ...]:
        inexact = (i for i, leaf in enumerate(self.leaves) if leaf.is_inexact)
        return tuple(i for i in inexact if i not in self.closed)

    @property
    def has_own_derivative(self) -> bool:
        return self.style.startswith("own")

    @property
    def is_raw(self) -> bool:
        """Whether the reference has the same rule by JAX's own decorator."""
        return self.style.startswith("raw")

    def psum(self, x: Any) -> Any:
        return jax.lax.psum(x, AXIS) if self.axis and x is not None else x

    @property
    def kind(self) -> "Function":
        """The same for functions that differ in values only."""
        leaves = tuple(dataclasses.replace(leaf, seed=0) for leaf in self.leaves)
        return dataclasses.replace(self, leaves=leaves)

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(build(node, leaves) for node in self.args)

    def call(self, fn: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        args = self.arguments(leaves)
        n = len(args) - self.by_keyword
        return fn(*args[:n], **dict(zip("abc"[n:], args[n:], strict=False)))

    def leaves_of(self, args: Sequence[Any], closed: Sequence[Any] = ()) -> list[Any]:
        """The leaves of arguments, or of trees of the same structure."""
        leaves: list[Any] = [None] * len(self.leaves)
        for i, x in zip(self.closed, closed, strict=bool(closed)):
            leaves[i] = x
        for node, arg in zip(self.args, args, strict=True):
            for i, x in flatten(node, arg):
                leaves[i] = x
        return leaves

    def cotangents(self, cts: Sequence[Any]) -> tuple[Any, ...]:
        """Trees like the arguments, with `None` for leaves without a cotangent."""
        return tuple(_without_static(node, cts) for node in self.args)

    def outputs(self, formulas: Sequence[Any], leaves: Sequence[Any]) -> Any:
        passed = [leaves[i] for i in self.passed]
        types = [self.leaves[i].dtype for i in self.passed]
        passed = [x if t == "key" else x + 1 for x, t in zip(passed, types, strict=True)]
        return build(self.out, [*formulas, *passed])

    def tangents_out(self, tangents: Sequence[Any]) -> Any:
        return _without_static(self.out, [*tangents, *[None] * len(self.passed)])

    def formula_leaves(self, out: Any) -> list[Any]:
        """The outputs that formulas compute, or their cotangents."""
        found = dict(flatten(self.out, out))
        return [found[k] for k in range(len(self.formulas))]

    def numbers(self, out: Any) -> list[Any]:
        """All outputs, as arrays that can be compared."""
        found = dict(flatten(self.out, out))
        values = [found[k] for k in sorted(found)]
        types = [self.leaves[i].dtype for i in self.passed]
        formulas = values[: len(self.formulas)]
        others = values[len(self.formulas) :]
        others = [_as_float(x, dtype) for x, dtype in zip(others, types, strict=True)]
        return formulas + others


def _as_float(x: Any, dtype: str) -> Any:
    data = jax.random.key_data(x) % 97 if dtype == "key" else jnp.asarray(x)
    return data.astype("float32")


def _without_static(node: Node, values: Sequence[Any]) -> Any:
    return jax.tree.map(
        lambda x: x if eqx.is_array_like(x) else None, build(node, values),
        is_leaf=lambda x: x is None,
    )  # fmt: skip
