"""Bind a call to its signature, and split its arguments into arrays and static parts.

JAX transforms functions of arrays. A user's function takes and returns anything, so a call
is split into a list of arrays and a `FlatCall` that puts it together again. A `FlatCall`
holds no tracer, and so may live as long as JAX keeps the program.
"""

import dataclasses
import functools as ft
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._errors import name_of, rule_error, show_path
from .._errors.trees import leaf_paths, mirror_of
from .._jaxprs.structure import is_reference
from .._tangent_spaces import as_array_list, holds_numbers
from .closure_convert import (
    ClosureTemplate,
    contains_tracer,
    is_closed,
    lift_tracers,
    Opaque,
)


class ParameterNames:
    """What the user calls the positional arguments."""

    def __init__(self, names: Sequence[str], rest: str):
        self._names = tuple(names)
        self._rest = rest

    def __getitem__(self, i: int) -> str:
        if i < len(self._names):
            return self._names[i]
        return f"{self._rest}[{i - len(self._names)}]"


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """The signature of `fn`: that of `(*args, **kwargs)` for a builtin that does not say, and
    for a ufunc before NumPy 2.4."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: None)


def _is_ufunc(fn) -> bool:
    """Whether `inspect.signature(fn)` is that of a ufunc, of NumPy or SciPy."""
    while True:
        fn = inspect.unwrap(fn, stop=lambda f: hasattr(f, "__signature__"))
        if not isinstance(fn, ft.partial):
            return isinstance(fn, np.ufunc)
        fn = fn.func


class Signature(Opaque):
    """The parameters of a function, in two kinds.

    What can be passed by position can be differentiated; what is keyword-only is
    configuration.
    """

    def __init__(self, fn: Callable[..., Any]):
        self._signature = signature_of(fn)
        # A ufunc has many options (`out`, `casting`, `order`, ...), which no rule knows of, and
        # some of which exclude each other even with their default values.
        self._has_defaults = not _is_ufunc(fn)
        parameters = self._signature.parameters.values()
        by_position = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        names = [p.name for p in parameters if p.kind in by_position]
        rest = [p.name for p in parameters if p.kind == p.VAR_POSITIONAL]
        # Holds no default values, which may be tracers.
        self.names = ParameterNames(names, rest[0] if rest else "args")
        self._simple = len(names) == len(parameters)
        self._by_position = frozenset(names)
        self._order = names
        bare = [p.replace(default=p.empty, annotation=p.empty) for p in parameters]
        self._call = f"{name_of(fn)}{inspect.Signature(bare)}"
        self._keyword_defaults = {
            p.name: p.default
            for p in parameters
            if p.kind == p.KEYWORD_ONLY and p.default is not p.empty and self._has_defaults
        }

    def holds_tracer(self) -> bool:
        """Whether a default value is, or captures, a tracer."""
        return contains_tracer([p.default for p in self._signature.parameters.values()])

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], fills_defaults: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], frozenset[str]]:
        """The arguments by position, the keyword-only ones, and the names of those among
        the latter that were filled in from defaults.

        Without `fills_defaults`, the last of those by position may be missing. A ufunc gets
        only what it was given.
        """
        if self._simple and not kwargs and len(args) == len(self._by_position):
            return args, kwargs, frozenset()
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:  # which does not name the function
            raise TypeError(f"{error} in the call of `{self._call}`") from None
        if not self._has_defaults:
            return bound.args, bound.kwargs, frozenset()
        if fills_defaults or not self._by_position.isdisjoint(bound.kwargs):
            bound.apply_defaults()
        else:
            bound.arguments.update(
                {k: v for k, v in self._keyword_defaults.items() if k not in bound.arguments}
            )
        return bound.args, bound.kwargs, frozenset(bound.kwargs) - frozenset(kwargs)

    def left_out(self, n: int) -> tuple[Any, ...]:
        """The default values of the positional arguments behind the first `n`."""
        if not self._has_defaults:
            return ()
        return tuple(self._signature.parameters[name].default for name in self._order[n:])


class TreeSplit:
    """A tree without its arrays: its structure, static leaves and the indices of the arrays."""

    def __init__(self, treedef: Any, indices: Sequence[int], static: Sequence[Any]):
        self.treedef = treedef
        self.indices = indices
        self.static = static
        self.has_static = len(indices) < len(static)

    @staticmethod
    def split(
        tree: Any, is_dynamic: Callable[[Any], bool]
    ) -> tuple["TreeSplit", list[jax.Array]]:
        """The tree without its dynamic leaves, and these as arrays."""
        # Most trees are an array or a tuple of arrays.
        if all(map(is_dynamic, tree if type(tree) is tuple else (tree,))):
            leaves, treedef = jax.tree.flatten(tree)
            n = len(leaves)
            return TreeSplit(treedef, range(n), [None] * n), as_array_list(leaves)
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
        return jax.tree.unflatten(self.treedef, self.leaves(arrays, static))

    def leaves(self, arrays: Sequence[Any], static: Sequence[Any] | None = None) -> list[Any]:
        """The leaves of the tree with these arrays."""
        if not self.has_static:
            return list(arrays)
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

    def dynamic_tree(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays, and `None` for all static leaves."""
        return self.without_static().tree(arrays)


def _has_traced_rules(x) -> bool:
    """A decorated function whose rules capture a tracer is a leaf. The rules are static, and
    closure conversion looks for tracers in leaves only."""
    return getattr(type(x), "_has_rules", False) and contains_tracer(x._rules)


def is_dynamic(x: Any) -> bool:
    """JAX arrays, and every number that could be differentiated if it were one."""
    if isinstance(x, jax.Array):
        return True
    if isinstance(x, float | complex):
        return True
    return isinstance(x, np.ndarray | np.generic) and jnp.issubdtype(x.dtype, jnp.inexact)


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def is_numeric_array(x: Any) -> bool:
    """JAX arrays, and the NumPy arrays that JAX can take. No Python numbers."""
    if isinstance(x, jax.Array):
        return True
    return isinstance(x, np.ndarray | np.generic) and holds_numbers(x)


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def as_arrays(tree: Any) -> Any:
    """The tree that a caller sees: floats are arrays, integers and the rest as they are."""
    if all(isinstance(x, jax.Array) or not is_dynamic(x) for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: jnp.asarray(x) if is_dynamic(x) else x, tree)


class FlatCall:
    """One call of a function with rules, without its arrays. Holds no tracer.

    - `fn` and `rules` are called, with placeholders where they captured a tracer.
    - The operands are the arrays among the positional arguments, then those among the
        keyword-only arguments, then the captured tracers.
    - `filled` names the keyword-only arguments that have their default value.
    - `names` are the user's names of the positional arguments.
    """

    def __init__(
        self,
        args: TreeSplit,
        kwargs: TreeSplit,
        filled: frozenset[str],
        names: ParameterNames,
        closures: ClosureTemplate,
    ):
        self.args = args
        self.kwargs = kwargs
        self.filled = filled
        self.names = names
        self.n_args = len(args.indices)
        self.n_kwargs = len(kwargs.indices)
        self.fn = closures.items[0]
        self.rules = closures.holder
        self._closures = closures

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
        kwargs_split, kwargs_arrays = TreeSplit.split(kwargs, convention.kwargs)
        if convention.fills_defaults:
            # The default values are arguments by now, and may be differentiated as such.
            fn = _without_traced_defaults(fn)
        statics = [*args_split.static, *kwargs_split.static]
        closures, captured = lift_tracers([fn, *statics], rules)
        n = 1 + len(args_split.static)
        args_split.static, kwargs_split.static = closures.items[1:n], closures.items[n:]
        call = FlatCall(args_split, kwargs_split, filled, names, closures)
        arrays = [*arrays, *kwargs_arrays]
        for i, x in enumerate(captured, len(arrays)):
            if is_reference(jax.typeof(x)):
                raise call._error_of_reference(i, x)
        return call, [*arrays, *captured]

    def _error_of_reference(self, i, x):
        holder = self.holder(i)
        return rule_error(
            f"`{name_of(self.fn)}`, a function with a rule, was given a reference.",
            f"{self.path(i) if holder is None else holder[1]} is {jax.typeof(x)}",
            do="Pass the value, `ref[...]`, and write to the reference outside of it.",
        )

    @property
    def n_not_differentiable(self) -> int:
        """How many operands after the positional ones the function itself depends on."""
        return self.n_kwargs + len(self._closures.item_of)

    def restore(self, operands: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """`fn, rules, args, kwargs` with these operands."""
        n, m = self.n_args, self.n_args + self.n_kwargs
        items, rules = self._closures.substitute(operands[m:])
        k = 1 + len(self.args.static)
        return (
            items[0],
            rules,
            self.args.tree(operands[:n], items[1:k]),
            self.kwargs.tree(operands[n:m], items[k:]),
        )

    def key(self, operands: Sequence[Any]) -> Any:
        """Equal for two calls that trace alike; `None` where that can't be told."""
        if self._closures.names:
            return None
        statics = (*self.args.static, *self.kwargs.static)
        types = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in operands)
        try:
            # Nothing is kept alive for having been an argument once.
            static_key = tuple(
                (i, type(s), s if is_closed(s) else weakref.ref(s))
                for i, s in enumerate(statics)
                if s is not None  # which stands for an array
            )
            key = (self.args.treedef, self.kwargs.treedef, static_key, types)
            hash(key)
        except TypeError:  # no hash, or no weak reference
            return None
        return key

    def flags(self, flags: Sequence[bool], operands: Sequence[Any]) -> tuple[Any, ...]:
        """A flag for each leaf of the positional arguments, of which these `flags` are those of
        the arrays."""
        static = [False] * len(self.args.static)
        return self.args.mirror(flags, static, operands[: self.n_args])

    def path(self, i: int) -> str:
        """The operand number `i`, which is of no positional argument, as the user would write
        it."""
        i -= self.n_args
        if i < self.n_kwargs:
            return self._keyword_path(self.kwargs.indices[i])
        i -= self.n_kwargs
        name, holder = self._closures.names[i], self.holder(i + self.n_args + self.n_kwargs)
        if holder is None:
            return name
        function, leaf, _ = holder
        return f"{name.removesuffix(f', held by `{name_of(function)}`')}, held by {leaf}"

    def holder(self, i: int) -> tuple[Any, str, bool] | None:
        """The function among the arguments that captured the operand number `i`, where it is,
        and whether it was passed by position. `None` if it is the function with the rules that
        captured the operand."""
        item = self._closures.item_of[i - self.n_args - self.n_kwargs]
        if item == 0:
            return None
        function, n = self._closures.items[item], len(self.args.static)
        if item > n:
            return function, self._keyword_path(item - 1 - n), False
        path = self.args.path(item - 1)
        name = f"`{self.names[path[0].idx]}{show_path(path[1:])}`"
        return function, name, True

    def _keyword_path(self, i: int) -> str:
        path = self.kwargs.path(i)
        return f"`{path[0].key}{show_path(path[1:])}`"


def _without_traced_defaults(fn: Any) -> Any:
    """`fn` without its default values, if there are tracers among them. For a function that is
    called with all of its arguments."""
    if not isinstance(fn, types.FunctionType):
        return fn
    defaults = jax.tree.leaves((fn.__defaults__, fn.__kwdefaults__))
    if not any(isinstance(x, Tracer) for x in defaults):
        return fn
    return types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, fn.__closure__)


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """The outputs of a function without the arrays: their tree and their types."""

    split: TreeSplit
    types: tuple[Any, ...]  # with a shape and a dtype

    @staticmethod
    def of(tree: Any, is_operand: Callable[[Any], bool]) -> tuple["OutputSpec", list[Any]]:
        split, arrays = TreeSplit.split(tree, is_operand)
        return OutputSpec(split, tuple(map(jax.typeof, arrays))), arrays

    def tree(self, arrays: Sequence[Any]) -> Any:
        return self.split.tree(arrays)

    def describe(self) -> Any:
        """The tree of types, for messages."""
        return self.split.mirror(self.types)

    def static_path(self, i: int) -> str:
        """Where the leaf number `i` is in the tree."""
        return show_path(self.split.path(i))

    def inexact(self) -> list[int]:
        return [i for i, t in enumerate(self.types) if jnp.issubdtype(t.dtype, jnp.inexact)]

    def difference(self, other: "OutputSpec") -> str | None:
        """Where another function's outputs differ; `None` if they agree."""
        if self.split.treedef != other.split.treedef:
            return "the structures differ"
        if list(self.split.indices) != list(other.split.indices):
            where = set(self.split.indices) ^ set(other.split.indices)
            return f"out{self.static_path(min(where))} is an array in one of them only"
        for i, a, b in zip(self.split.indices, self.types, other.types, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"out{self.static_path(i)} differs"
        pairs = zip(self.split.static, other.split.static, strict=True)
        for i, (a, b) in enumerate(pairs):
            if a is not b and not _same_static(a, b):
                return (
                    f"out{self.static_path(i)} is {a!r:.60} in one and {b!r:.60} in the other"
                )
        return None


def _same_static(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    # Two functions made by the same line of code are the same function to a reader.
    code_a, code_b = getattr(a, "__code__", a), getattr(b, "__code__", b)
    return bool(code_a == code_b)
