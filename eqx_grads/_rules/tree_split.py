"""Split a tree, or a call, into its arrays and the rest, and put it together again.

JAX transforms functions of arrays, and a user's function takes and returns anything. The rest
holds no array. A `ClosedTree` and a `FlatCall` hold no tracer that a function captured, either,
and so may live as long as JAX keeps the program.
"""

import abc
import dataclasses
import functools as ft
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import name_of, rule_error, show_path, unlike
from .._jaxprs.structure import is_reference
from .._tangent_spaces import as_array_list, is_array, is_differentiable, is_dynamic, is_type
from .._trees import leaf_paths, mirror_of
from .closure_convert import ClosureTemplate, contains_tracer, is_closed, lift_tracers
from .signature import ParameterNames


_LEAF = jax.tree.structure(0)


@ft.lru_cache
def _tuple_of(n: int) -> Any:
    return jax.tree.structure((0,) * n)


class TreeSplit:
    """A tree without its arrays: its structure, static leaves and the indices of the arrays."""

    def __init__(self, treedef: Any, indices: Sequence[int], static: Sequence[Any]):
        self.treedef = treedef
        self.indices = indices
        self.static = static

    @staticmethod
    def split(
        tree: Any, is_dynamic: Callable[[Any], bool]
    ) -> tuple["TreeSplit", list[jax.Array]]:
        """The tree without its dynamic leaves, and these as arrays."""
        # Most trees are an array or a tuple of arrays.
        if isinstance(tree, jax.Array):
            return TreeSplit(_LEAF, range(1), [None]), [tree]
        if type(tree) is tuple and all(isinstance(x, jax.Array) for x in tree):
            n = len(tree)
            return TreeSplit(_tuple_of(n), range(n), [None] * n), list(tree)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_has_traced_rules)
        indices = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
        arrays = as_array_list(leaves[i] for i in indices)
        for i in indices:
            leaves[i] = None
        return TreeSplit(treedef, indices, leaves), arrays

    def without_static(self) -> "TreeSplit":
        return TreeSplit(self.treedef, self.indices, [None] * len(self.static))

    def tree(self, arrays: Sequence[Any], static: Sequence[Any] | None = None) -> Any:
        """The tree with these arrays."""
        return self.treedef.unflatten(self.leaves(arrays, static))

    def leaves(self, arrays: Sequence[Any], static: Sequence[Any] | None = None) -> list[Any]:
        """The leaves of the tree with these arrays."""
        leaves = list(self.static if static is None else static)
        for i, x in zip(self.indices, arrays, strict=True):
            leaves[i] = x
        return leaves

    def path(self, i: int) -> Any:
        """Where the leaf number `i` is in the tree."""
        return leaf_paths(self.treedef)[i]

    def mirror(
        self,
        values: Sequence[Any],
        static: Sequence[Any] | None = None,
        arrays: Sequence[Any] | None = None,
    ) -> Any:
        """`tree` for values that are not arrays. The classes of the tree are unflattened with
        the `arrays`, if these are given."""
        objects = [object()] * len(self.static)
        like = None if arrays is None else self.leaves(arrays, objects)
        return mirror_of(self.treedef, self.leaves(values, static), like)


class ClosedTree:
    """A tree without its arrays, and without the tracers that its functions capture: these are
    the last operands."""

    def __init__(self, split: TreeSplit, closures: ClosureTemplate, n_operands: int):
        self._split = split
        self._closures = closures
        self.n_operands = n_operands

    @staticmethod
    def split(
        tree: Any, is_dynamic: Callable[[Any], bool]
    ) -> tuple["ClosedTree", list[jax.Array]]:
        """The tree without its operands, and these."""
        split, arrays = TreeSplit.split(tree, is_dynamic)
        closures, captured = lift_tracers(split.static)
        split.static = closures.items
        arrays = [*arrays, *captured]
        return ClosedTree(split, closures, len(arrays)), arrays

    def tree(self, operands: Sequence[Any]) -> Any:
        """The tree with these operands."""
        n = len(self._split.indices)
        static, _ = self._closures.substitute(operands[n:])
        return self._split.tree(operands[:n], static)

    def places(self, name: str) -> list[str]:
        """Where each operand is, for messages: in the tree of this name, or captured."""
        paths = map(self._split.path, self._split.indices)
        return [*(name + show_path(path) for path in paths), *self._closures.names]


def _has_traced_rules(x) -> bool:
    """A decorated function whose rules capture a tracer is a leaf. The rules are static, and
    closure conversion looks for tracers in leaves only."""
    return getattr(type(x), "_has_rules", False) and contains_tracer(x._rules)


def as_arrays(tree: Any) -> Any:
    """The tree that a caller sees: floats are arrays, integers and the rest as they are."""
    if all(isinstance(x, jax.Array) or not is_dynamic(x) for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: jnp.asarray(x) if is_dynamic(x) else x, tree)


class AbstractTransformed(eqx.Module):
    """What `filter_checkpoint` and the like return: a PyTree with the leaves of a function."""

    _eqg_fn: Callable[..., Any]

    @property
    def __wrapped__(self):
        return self._eqg_fn

    @abc.abstractmethod
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""

    def __get__(self, instance, owner=None):
        return self if instance is None else eqx.Partial(self, instance)


def call_on_arrays(
    transform: Callable[[Callable[..., Any], list[Any]], Sequence[Any]],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_operand: Callable[[Any], bool] = is_array,
) -> Any:
    """`fn(*args, **kwargs)`, by way of `transform(run, arrays)`. There, `run(arrays)` computes
    the arrays that the function returns from those among its leaves and its arguments."""
    call, arrays = TreeSplit.split((fn, args, kwargs), is_operand)
    returned: list[TreeSplit] = []

    # A new function for each call, so that JAX keeps nothing for the next call.
    def run(arrays):
        fn, args, kwargs = call.tree(arrays)
        out, ys = TreeSplit.split(fn(*args, **kwargs), is_operand)
        returned[:] = [out]
        return ys

    ys = transform(run, arrays)
    return returned[0].tree(ys)


_NO_KWARGS = jax.tree.structure({})


@dataclasses.dataclass(eq=False, repr=False)
class FlatCall:
    """One call of a function with rules, without its arrays. Holds no tracer.

    - `fn` and `rules` are called, with placeholders where they captured a tracer.
    - The operands are the arrays among the positional arguments, then those among the
        keyword-only arguments, then the captured tracers.
    - `filled` names the keyword-only arguments that have their default value.
    - `names` are the user's names of the positional arguments.
    """

    args: TreeSplit
    kwargs: TreeSplit
    filled: frozenset[str]
    names: ParameterNames
    _closures: ClosureTemplate

    def __post_init__(self):
        self.n_args = len(self.args.indices)
        self.n_kwargs = len(self.kwargs.indices)
        self.fn, self.rules = self._closures.items[0], self._closures.holder

    @staticmethod
    def of(
        fn: Callable[..., Any],
        rules: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        filled: frozenset[str],
        names: ParameterNames,
    ) -> tuple["FlatCall", list[jax.Array]]:
        """The call and its operands."""
        convention = rules.convention
        args_split, arrays = TreeSplit.split(args, convention.args)
        kwargs_split, kwargs_arrays = TreeSplit(_NO_KWARGS, (), []), []
        if kwargs:
            kwargs_split, kwargs_arrays = TreeSplit.split(kwargs, convention.kwargs)
        statics = [*args_split.static, *kwargs_split.static]
        n = 1 + len(args_split.static)

        def name(i: int) -> str:
            path = args_split.path(i - 1) if 0 < i < n else ()
            return f"{names[path[0].idx]}{show_path(path[1:])}" if path else ""

        closures, captured = lift_tracers([fn, *statics], rules, name)
        args_split.static, kwargs_split.static = closures.items[1:n], closures.items[n:]
        call = FlatCall(args_split, kwargs_split, filled, names, closures)
        arrays = [*arrays, *kwargs_arrays]
        for i, x in enumerate(captured, len(arrays)):
            reject_reference(call.fn, x, call.path(i))
        return call, [*arrays, *captured]

    @property
    def n_not_differentiable(self) -> int:
        """How many operands after the positional ones the function itself depends on."""
        return self.n_kwargs + self._closures.n_of_items

    def restore(self, operands: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """`fn, rules, args, kwargs` with these operands."""
        n, m = self.n_args, self.n_args + self.n_kwargs
        (fn, *items), rules = self._closures.substitute(operands[m:])
        k = len(self.args.static)
        args = self.args.tree(operands[:n], items[:k])
        return fn, rules, args, self.kwargs.tree(operands[n:m], items[k:])

    def call(self, operands: Sequence[Any]) -> tuple["OutputSpec", list[jax.Array]]:
        """The outputs of the undecorated function for these operands."""
        fn, rules, args, kwargs = self.restore(operands)
        return OutputSpec.of(fn(*args, **kwargs), rules.convention.outputs)

    def key(self, operands: Sequence[Any]) -> Any:
        """Equal for two calls that trace alike. `TypeError` where that can't be told: there is
        no hash, no weak reference, or a captured tracer."""
        if self._closures.names:
            raise TypeError
        # Nothing is kept alive for having been an argument once.
        statics = tuple(
            (i, type(s), s if is_closed(s) else weakref.ref(s))
            for i, s in enumerate((*self.args.static, *self.kwargs.static))
            if s is not None  # which stands for an array
        )
        types = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in operands)
        return self.args.treedef, self.kwargs.treedef, statics, types

    def flags(self, flags: Sequence[bool], operands: Sequence[Any]) -> tuple[Any, ...]:
        """A flag for each leaf of the positional arguments, from the `flags` of the arrays."""
        static = [False] * len(self.args.static)
        return self.args.mirror(flags, static, operands[: self.n_args])

    def path(self, i: int) -> str:
        """The operand number `i`, which is of no positional argument, as the user would write
        it."""
        i -= self.n_args
        if i >= self.n_kwargs:
            return self._closures.names[i - self.n_kwargs]
        path = self.kwargs.path(self.kwargs.indices[i])
        return f"`{path[0].key}{show_path(path[1:])}`"


def reject_reference(fn: Callable[..., Any], x: Any, what: str) -> None:
    """Raise if a function with a rule was given a mutable reference."""
    if is_reference(jax.typeof(x)):
        raise rule_error(
            f"`{name_of(fn)}`, a function with a rule, was given a reference.",
            f"{what} is {jax.typeof(x)}",
            do="Pass the value, `ref[...]`. Write to the reference outside of the function.",
        )


class RuleCall(NamedTuple):
    """One differentiation of one call: what a rule needs to know.

    - `rules, fn, args, kwargs`: the function, its rules and its arguments.
    - `operands`: the arrays; `tangents`: their tangents, `None` for zero. The operands of
        the positional arguments come first, and no others have a tangent.
    - `flat`: how the operands make up the arguments.
    """

    rules: Any
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Any]
    tangents: list[Any]
    flat: FlatCall

    @staticmethod
    def of(flat: FlatCall, operands: list[Any], tangents: list[Any]) -> "RuleCall":
        fn, rules, args, kwargs = flat.restore(operands)
        return RuleCall(rules, fn, args, kwargs, operands, tangents, flat)

    def perturbed(self) -> list[int]:
        """The indices of the positional arrays that have a tangent."""
        return [i for i, t in enumerate(self.tangents) if t is not None]


class OutputSpec(NamedTuple):
    """The outputs of a function without the arrays: their tree and their types."""

    split: TreeSplit
    types: tuple[Any, ...]  # with a shape and a dtype

    @staticmethod
    def of(tree: Any, is_operand: Callable[[Any], bool]) -> tuple["OutputSpec", list[Any]]:
        split, arrays = TreeSplit.split(tree, is_operand)
        return OutputSpec(split, tuple(map(jax.typeof, arrays))), arrays

    def tree(self, arrays: Sequence[Any]) -> Any:
        return self.split.tree(arrays)

    def inexact(self) -> list[int]:
        """The indices of the arrays that can have a tangent."""
        return [i for i, t in enumerate(self.types) if is_differentiable(t)]

    def agrees(self, other: "OutputSpec") -> bool:
        """Whether another function's outputs are like these."""
        a, b = self.split, other.split
        if a.treedef != b.treedef or list(a.indices) != list(b.indices):
            return False
        types = zip(self.types, other.types, strict=True)
        same_types = all(s.shape == t.shape and s.dtype == t.dtype for s, t in types)
        return same_types and all(map(_same_static, a.static, b.static))

    def unlike(self, other: "OutputSpec", text: str, same: Any = None) -> list[str]:
        """Where another function's outputs differ: `text` with the types of both leaves. `same`
        compares leaves that are not arrays."""
        kind = lambda x: _Kind(x, same or _same_static)
        a, b = (outputs.split.mirror(outputs.types) for outputs in (self, other))
        return unlike(a, b, "out", text, kind)


class _Kind:
    """The kind of a leaf: the shape and the dtype of an array, or the leaf, for `same`."""

    def __init__(self, x: Any, same: Callable[[Any, Any], bool]):
        is_array = is_type(x) or isinstance(x, jax.ShapeDtypeStruct)
        self.x = (x.shape, x.dtype) if is_array else x
        self.same = same

    def __eq__(self, other):
        return isinstance(other, _Kind) and self.same(self.x, other.x)


def _same_static(a, b) -> bool:
    # Two functions made by the same line of code are the same function to a reader.
    return is_equal(getattr(a, "__code__", a), getattr(b, "__code__", b))


def is_equal(a: Any, b: Any) -> bool:
    """Whether two objects are known to be equal. JAX's arrays may be traced: they are compared
    by identity."""
    if a is b or type(a) is not type(b) or isinstance(a, jax.Array):
        return a is b
    try:
        return bool(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)
    except Exception:  # the user's `==` may raise anything
        return False
