"""A call of a host function: the trees of its arguments and of its output, made flat."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._errors import name_of, place_of, rule_error, show_path, show_tree, type_of
from .._errors.trees import leaf_paths, mirror, mirror_of, prefix_leaves
from .._jaxprs.current_trace import is_eager
from .._rules.closure_convert import check_no_tracers, Opaque
from .._rules.float_args import is_key_array
from .._rules.rule import Rule
from .._rules.signature import Signature
from .host_op import HostOp, read_only, Types
from .promised_types import is_array_leaf, promised_types, type_in_jax, without_memory
from .residual_cache import ResidualCache


@dataclasses.dataclass(eq=False)
class HostCode(Opaque):
    """The user's function, its options and its rules. Static data for JAX: compared by
    identity. A rule may be given, or replaced, at any time.

    - `is_linear`: in its first argument, which has its derivative elsewhere.
    - `adjoint_of`: the name of the map of which this is the adjoint.
    - `residuals`: what `def_fwd` was told of them.
    """

    fn: Callable[..., Any]
    vmap_method: str
    out: Any = None
    example: Any = None
    finite_difference: str | None = None
    step: Any = None
    max_rule_calls: int = 0
    is_linear: bool = False
    adjoint_of: str = ""
    fwd: Rule | None = None
    bwd: Rule | None = None
    jvp: Rule | None = None
    residuals: Any = None
    kept: ResidualCache = dataclasses.field(default_factory=lambda: ResidualCache(0))
    example_out: Any = None

    def __post_init__(self):
        self.name, self.place = name_of(self.fn), place_of(self.fn)
        self.signature = Signature(self.fn)


@dataclasses.dataclass(frozen=True)
class HostCall(Opaque):
    """A call of the user's function.

    - `treedef`, `statics`: the tree `(args, kwargs)`, and its leaves that are no arrays, with
        `None` in the place of the arrays.
    - `n_args`: how many of the arrays are in `args`, and can be differentiated.
    - `steps`: the relative step of each of these, for differences.
    - `defaults`: the positional arguments that were left at their default. Rules are given
        them behind the others; the function is called as the caller called it.
    """

    code: HostCode
    treedef: Any
    statics: tuple[Any, ...]
    n_args: int
    in_types: Types
    steps: tuple[float | None, ...] = ()
    out_treedef: Any = None
    out_types: Types = ()
    # Follows from the rest and JAX's precision, of which a program is made.
    defaults: tuple[Any, ...] = dataclasses.field(default=(), compare=False)

    @property
    def name(self) -> str:
        return self.code.name

    @property
    def place(self) -> str:
        return self.code.place

    @ft.cached_property
    def op(self) -> HostOp:
        """The function, of flat arrays."""
        types = self.in_types, self.out_types
        return HostOp(_run, self, (), self.code, *types, self.out_path)

    def flat_out(self, op: HostOp, out: Any) -> list[Any]:
        """The leaves of the output that `op` returned: the function, or a rule for it."""
        return op.leaves(out, self.out_treedef, self.out_types, "", "`out`")

    def out_path(self, i: int) -> str:
        return "out" + show_path(leaf_paths(self.out_treedef)[i])

    def arguments(self, leaves: Sequence[Any]) -> Any:
        """`(args, kwargs)` with these arrays."""
        return self.treedef.unflatten(self._leaves(leaves, self.statics))

    def types(self) -> Any:
        """`(args, kwargs)` with types instead of the arrays."""
        like = self._leaves(without_memory(self.in_types), self.statics)
        return mirror_of(self.treedef, self._leaves(self.in_types, self.statics), like)

    @ft.cached_property
    def _arrays(self) -> list[int]:
        """Which leaves of `(args, kwargs)` are arrays."""
        return [i for i, x in enumerate(self.statics) if x is None]

    def _leaves(self, arrays, statics):
        full = list(statics)
        for i, x in zip(self._arrays, arrays, strict=True):
            full[i] = x
        return full

    def rule_arguments(self, leaves: Sequence[Any], rule: Rule) -> Any:
        """`args` and `kwargs` as a rule is given them, with these arrays. Default values of
        keyword-only arguments are given if the rule has a parameter for them, as for the rules
        of `custom_vjp`."""
        args, kwargs = self.arguments(leaves)
        args = (*args, *self.defaults)
        _, kwargs, filled = self.code.signature.bind(args, kwargs, False)
        return args, rule.keywords(kwargs, filled)

    @property
    def names(self) -> list[str]:
        """The positional arguments that a rule is given."""
        n = len(self.treedef.children()[0].children()) + len(self.defaults)
        return [self.code.signature.names[i] for i in range(n)]

    def tangents(self, ts: Sequence[Any], of_default: Callable[[Any], Any]) -> Any:
        """A tree like `args` with `ts` (`None`: zero) for its arrays, `of_default(x)` for each
        array `x` in a default value, and `None` elsewhere."""
        args, _ = self.treedef.unflatten(self._of_args(ts))
        of_leaf = lambda x: of_default(x) if isinstance(x, np.ndarray) else None
        return (*args, *jax.tree.map(of_leaf, self.defaults))

    def flags(self, flags: Sequence[bool], arrays: Sequence[Any]) -> Any:
        """As `tangents`, with bools; those of the `arrays` of the arguments are `flags`."""
        like = self._leaves(arrays, [object()] * len(self.statics))
        args, _ = mirror_of(self.treedef, self._of_args(flags), like)
        of_leaf = lambda x: False if isinstance(x, np.ndarray) else None
        return (*args, *mirror(of_leaf, self.defaults))

    def _of_args(self, values):
        full = [*values, *[None] * (len(self.in_types) - self.n_args)]
        return self._leaves(full, [None] * len(self.statics))

    def in_path(self, i: int) -> str:
        """Array number `i`, as the user would write it."""
        part, first, *rest = leaf_paths(self.treedef)[self._arrays[i]]
        name = first.key if part.idx else self.code.signature.names[first.idx]
        return f"`{name}{show_path(tuple(rest))}`"


def _run(op, arrays):
    args, kwargs = op.call.arguments(arrays)
    return op.call.flat_out(op, op.call.code.fn(*args, **kwargs))


def host_call_of(
    code: HostCode, args: Any, kwargs: Any, out: Any = None, others: Sequence[Any] = ()
) -> tuple[HostCall, list[jax.Array]]:
    """A call of the user's function, and its operands. `out` replaces what was promised.

    Raises if the call can't be static data of a program; so may `others` not.
    """
    # What the caller gave: who promises the type of `np.cumsum(x)` need not know of its `axis`.
    args, kwargs, filled = code.signature.bind(args, kwargs, False)
    kwargs = {name: x for name, x in kwargs.items() if name not in filled}
    leaves, treedef = jax.tree.flatten((args, kwargs))
    operands = [
        x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves if is_array_leaf(x)
    ]
    call = HostCall(
        code,
        treedef,
        tuple(None if is_array_leaf(x) else x for x in leaves),
        sum(map(is_array_leaf, jax.tree.leaves(args))),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands),
        defaults=jax.tree.map(_as_given, code.signature.left_out(len(args))),
    )
    for i, x in enumerate(operands):
        if is_key_array(x):
            raise rule_error(
                f"`{call.name}` runs on the host, and was given a random key.",
                f"at {call.in_path(i)}: {type_of(x)}",
                call.place,
                do="Pass `jax.random.key_data(key)`, an array of integers.",
            )
    types, out_treedef = _promised(call, code.out if out is None else out)
    steps = _steps(code, args)
    call = dataclasses.replace(call, out_types=types, out_treedef=out_treedef, steps=steps)
    _check_static(call, operands, others)
    return call, operands


def _as_given(x: Any) -> Any:
    """A leaf of a default value as a rule would be given it: a NumPy array if it is one, of
    JAX's precision."""
    if not is_array_leaf(x) or isinstance(x, Tracer) or is_key_array(x):
        return x
    return read_only(np.asarray(x, type_in_jax(x).dtype).view())


def _check_static(call: HostCall, operands, others) -> None:
    code = call.code
    for i, x in enumerate(call.statics):
        try:
            hash(x)
        except TypeError:
            raise rule_error(
                f"`{call.name}` was given an argument that is no array and has no hash.",
                f"at argument {show_path(leaf_paths(call.treedef)[i][1:])}: {type_of(x)}",
                call.place,
                do="JAX keeps compiled programs by what is static in them. Pass arrays, or "
                "give the object's class `__hash__` and `__eq__`. Of a sparse matrix of SciPy, "
                'pass the entries, and build it on the host: see "A sparse solve" in the guide '
                '"Host code".',
            ) from None
    if is_eager() and not any(isinstance(x, Tracer) for x in operands):
        return
    rules = [rule.fn for rule in (code.fwd, code.bwd, code.jvp) if rule is not None]

    def fail(i, name):
        return rule_error(
            f"`{call.name}` runs on the host, and closes over a traced value.",
            f"at {name}",
            call.place,
            do="Pass the value as an argument: then the function is given its NumPy array, "
            "and has a derivative with respect to it.",
        )

    check_no_tracers([code.fn, *rules, *others, *call.statics], fail)


def _promised(call: HostCall, out: Any) -> tuple[Types, Any]:
    code, args = call.code, call.types()
    if code.example is None:
        return promised_types(out, "out", code, *args)
    shapes = lambda tree: [np.shape(x) for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    as_numpy = lambda x: np.asarray(x) if is_array_leaf(x) else x
    example = jax.tree.map(as_numpy, code.example)
    if shapes(args[0]) != shapes(example):
        raise rule_error(
            f"`{call.name}` was called with other shapes than those of its example.",
            f"the arguments are {show_tree(args[0])}",
            f"the example is {show_tree(example)}",
            call.place,
            do="What it returns is known for the shapes of the example only. Give "
            "`out=`, a function of the arguments, in place of `example=`.",
        )
    if code.example_out is None:
        # One call, at arguments that the user chose: a solver may never end at others.
        leaves, treedef = jax.tree.flatten(code.fn(*example))
        code.example_out = tuple(map(type_in_jax, leaves)), treedef
    return code.example_out


def _steps(code: HostCode, args) -> tuple[float | None, ...]:
    """The relative step of each array among the positional arguments."""
    leaves = jax.tree.leaves(tuple(args))
    if code.step is None or isinstance(code.step, float | int):
        steps = [code.step] * len(leaves)
    else:
        is_leaf = lambda x: x is None or isinstance(x, float | int)
        try:
            steps = prefix_leaves(tuple(code.step), tuple(args), is_leaf)
        except (ValueError, TypeError) as error:
            raise rule_error(
                f"`step` of `{code.name}` does not fit the arguments.",
                f"the steps are {show_tree(code.step)}",
                f"the arguments are {show_tree(args)}",
                code.place,
                do="Give one number, or a tuple with one entry for each argument: a number or "
                "`None` for all of it, or a tree of them.",
            ) from error
    pairs = zip(steps, leaves, strict=True)
    return tuple(step for step, x in pairs if is_array_leaf(x))
