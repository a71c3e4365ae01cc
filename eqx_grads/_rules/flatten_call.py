"""From a Python call to arrays and back: bind the signature, split the leaves.

JAX transforms functions of arrays. A user's function takes and returns anything, so a call
is taken apart into a list of arrays and a `Recipe` that puts it together again. A recipe
holds no tracer, and so may live as long as JAX keeps the program.
"""

import copy
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from .._tangent_spaces import as_array_list, dtype_of
from .closure_convert import hoist, Hollow, is_atom, without_traced_defaults


def trace_state() -> Any:
    """Equal for two moments at which JAX traces in the same way. Holds no tracer."""
    return get_opaque_trace_state(convention="flax")


with jax.ensure_compile_time_eval():
    _EAGER = trace_state()


def is_eager() -> bool:
    """Whether no transformation is at work: operations compute their values at once."""
    return trace_state() == _EAGER


class ParameterNames:
    """What the user calls the positional arguments."""

    def __init__(self, names: Sequence[str], rest: str):
        self._names = tuple(names)
        self._rest = rest

    def __getitem__(self, i: int) -> str:
        if i < len(self._names):
            return self._names[i]
        return f"{self._rest}[{i - len(self._names)}]"


class Signature:
    """The parameters of a function, in two kinds.

    What can be passed by position can be differentiated; what is keyword-only is
    configuration.
    """

    def __init__(self, fn: Callable[..., Any]):
        try:
            self._signature = inspect.signature(fn)
        except ValueError:  # a builtin that does not say
            self._signature = inspect.signature(lambda *args, **kwargs: None)
        parameters = self._signature.parameters.values()
        by_position = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        names = [p.name for p in parameters if p.kind in by_position]
        rest = [p.name for p in parameters if p.kind == p.VAR_POSITIONAL]
        # Holds no default values, which may be traced.
        self.names = ParameterNames(names, rest[0] if rest else "args")
        self._simple = len(names) == len(parameters)
        self._by_position = frozenset(names)
        self._keyword_defaults = {
            p.name: p.default
            for p in parameters
            if p.kind == p.KEYWORD_ONLY and p.default is not p.empty
        }

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], fill_defaults: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], frozenset[str]]:
        """The arguments by position, the keyword-only ones, and the names of those among
        the latter that were filled in from defaults.

        Without `fill_defaults`, the last of those by position may be missing.
        """
        if self._simple and not kwargs and len(args) == len(self._by_position):
            return args, kwargs, frozenset()
        bound = self._signature.bind(*args, **kwargs)
        if fill_defaults or not self._by_position.isdisjoint(bound.kwargs):
            bound.apply_defaults()
        else:
            bound.arguments.update(
                {k: v for k, v in self._keyword_defaults.items() if k not in bound.arguments}
            )
        return bound.args, bound.kwargs, frozenset(bound.kwargs) - frozenset(kwargs)


class Rest:
    """What is not an array in a tree: structure, static leaves, and where the arrays go."""

    def __init__(self, treedef: Any, places: Sequence[int], static: Sequence[Any]):
        self.treedef = treedef
        self.places = places
        self.static = static

    @staticmethod
    def split(tree: Any, is_dynamic: Callable[[Any], bool]) -> tuple["Rest", list[jax.Array]]:
        """The rest and the arrays, into which the dynamic leaves are made."""
        leaves, treedef = jax.tree.flatten(tree)
        places = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
        arrays = as_array_list(leaves[i] for i in places)
        for i in places:
            leaves[i] = None
        return Rest(treedef, places, leaves), arrays

    def bare(self) -> "Rest":
        """The same without the static leaves."""
        return Rest(self.treedef, self.places, [None] * len(self.static))

    def tree(self, arrays: Sequence[Any], static: Sequence[Any] | None = None) -> Any:
        """The tree, with `arrays` in their places."""
        leaves = list(self.static if static is None else static)
        for i, x in zip(self.places, arrays, strict=True):
            leaves[i] = x
        return jax.tree.unflatten(self.treedef, leaves)

    def only(self, arrays: Sequence[Any]) -> Any:
        """The tree with `arrays` in their places and `None` for all static leaves."""
        return self.bare().tree(arrays)


def is_dynamic(x: Any) -> bool:
    """JAX arrays, and every number that could be differentiated if it were one."""
    if isinstance(x, jax.Array):
        return True
    if isinstance(x, float | complex):
        return True
    return isinstance(x, np.ndarray | np.generic) and jnp.issubdtype(x.dtype, jnp.inexact)


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def as_arrays(tree: Any) -> Any:
    """The tree that a caller sees: floats are arrays, integers and the rest as they are."""
    if all(isinstance(x, jax.Array) or not is_dynamic(x) for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: jnp.asarray(x) if is_dynamic(x) else x, tree)


class Recipe:
    """How to put a call together again. Holds no tracer.

    - `definition` is the object whose functions are called.
    - The operands are the arrays among the positional arguments, then those among the
        keyword-only arguments, then the traced values that functions close over.
    - `filled` names the keyword-only arguments that have their default value.
    """

    def __init__(self, args: Rest, kwargs: Rest, filled: frozenset[str], hollow: Hollow):
        self.args = args
        self.kwargs = kwargs
        self.filled = filled
        self.n_args = len(args.places)
        self.n_kwargs = len(kwargs.places)
        self._hollow = hollow

    @staticmethod
    def of(
        definition: Any, args: tuple[Any, ...], kwargs: dict[str, Any], filled: frozenset[str]
    ) -> tuple["Recipe", list[jax.Array]]:
        """The recipe and the operands."""
        args_rest, arrays = Rest.split(args, is_dynamic)
        kwargs_rest, kwargs_arrays = Rest.split(kwargs, is_array)
        if definition.fill_defaults:
            # They are arguments by now, and may be differentiated as such.
            fn = without_traced_defaults(definition.fn)
            if fn is not definition.fn:
                definition = copy.copy(definition)
                definition.fn = fn
                # It is cached, and holds the default values too.
                vars(definition).pop("signature", None)
        statics = [*args_rest.static, *kwargs_rest.static]
        hollow, captured = hoist([definition.fn, *statics], definition)
        n = 1 + len(args_rest.static)
        args_rest.static, kwargs_rest.static = hollow.items[1:n], hollow.items[n:]
        recipe = Recipe(args_rest, kwargs_rest, filled, hollow)
        return recipe, [*arrays, *kwargs_arrays, *captured]

    @property
    def definition(self) -> Any:
        """The definition, with holes where it closes over traced values."""
        return self._hollow.holder

    @property
    def n_not_differentiable(self) -> int:
        """How many operands after the positional ones the function itself depends on."""
        return self.n_kwargs + self._hollow.n_of_items

    @property
    def rules_hold_more(self) -> bool:
        """Whether the rules close over traced values that the function does not."""
        return len(self._hollow.names) > self._hollow.n_of_items

    def restore(self, operands: Sequence[Any]) -> tuple[Any, Any, Any]:
        """`definition, args, kwargs` with these operands."""
        n, m = self.n_args, self.n_args + self.n_kwargs
        items, definition = self._hollow.fill(operands[m:])
        k = 1 + len(self.args.static)
        return (
            definition,
            self.args.tree(operands[:n], items[1:k]),
            self.kwargs.tree(operands[n:m], items[k:]),
        )

    def key(self, operands: Sequence[Any]) -> Any:
        """Equal for two calls that trace alike; `None` where that can't be told."""
        if self._hollow.names:
            return None
        statics = (*self.args.static, *self.kwargs.static)
        types = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in operands)
        try:
            # Nothing is kept alive for having been an argument once.
            static_key = tuple(
                (type(s), s) if is_atom(s) else (type(s), weakref.ref(s)) for s in statics
            )
            key = (self.args.treedef, self.kwargs.treedef, static_key, types)
            hash(key)
        except TypeError:  # no hash, or no weak reference
            return None
        return key

    def path(self, i: int, names: ParameterNames) -> str:
        """The operand number `i`, as the user would write it."""
        if i < self.n_args:
            tree = self.args.only(range(self.n_args))
            paths = jax.tree_util.tree_leaves_with_path(tree)
            path = paths[i][0]
            return f"`{names[path[0].idx]}{jax.tree_util.keystr(path[1:])}`"
        i -= self.n_args
        if i < self.n_kwargs:
            paths = jax.tree_util.tree_leaves_with_path(self.kwargs.only(range(self.n_kwargs)))
            path = paths[i][0]
            return f"`{path[0].key}{jax.tree_util.keystr(path[1:])}`"
        return self._hollow.names[i - self.n_kwargs]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a function returned, less the arrays."""

    rest: Rest
    types: tuple[jax.ShapeDtypeStruct, ...]

    @staticmethod
    def of(tree: Any) -> tuple["Outputs", list[Any]]:
        rest, arrays = Rest.split(tree, is_dynamic)
        types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        return Outputs(rest, types), arrays

    def tree(self, arrays: Sequence[Any]) -> Any:
        return self.rest.tree(arrays)

    def describe(self) -> Any:
        """The tree of types, for messages."""
        return self.tree(self.types)

    def static_path(self, i: int) -> str:
        """Where the leaf number `i` is in the tree."""
        leaves = range(len(self.rest.static))
        tree = jax.tree.unflatten(self.rest.treedef, leaves)
        return jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(tree)[i][0])

    def inexact(self) -> list[int]:
        return [i for i, t in enumerate(self.types) if jnp.issubdtype(dtype_of(t), jnp.inexact)]

    def difference(self, other: "Outputs") -> str | None:
        """Where another function's outputs differ; `None` if they agree."""
        if self.rest.treedef != other.rest.treedef:
            return "the structures differ"
        if self.rest.places != other.rest.places:
            where = set(self.rest.places) ^ set(other.rest.places)
            return f"out{self.static_path(min(where))} is an array in one of them only"
        for i, a, b in zip(self.rest.places, self.types, other.types, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"out{self.static_path(i)} differs"
        for i, (a, b) in enumerate(zip(self.rest.static, other.rest.static, strict=True)):
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
