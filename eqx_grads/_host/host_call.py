"""A call of a host function: the trees of its arguments and of its output, made flat."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._errors import code_of, name_of, place_of, rule_error, show_path, show_tree, type_of
from .._jaxprs.current_trace import is_eager
from .._rules.closure_convert import captured_tracer, Opaque
from .._rules.float_args import is_key_array
from .._rules.rule import Rule
from .._rules.signature import Signature
from .._rules.tree_split import TreeSplit
from .._trees import leaf_paths, mirror_of, prefix_leaves
from .host_op import HostOp, Types
from .promised_types import is_array_leaf, promised_types, without_memory
from .residual_cache import ResidualCache


@dataclasses.dataclass(eq=False)
class HostCode(Opaque):
    """The user's function, its options and its rules. Static data for JAX: compared by
    identity. A rule may be given, or replaced, at any time.

    - `is_linear`: in its first argument, which has its derivative elsewhere.
    """

    fn: Callable[..., Any]
    vmap_method: str
    out: Any = None
    finite_difference: str | None = None
    step: Any = None
    max_rule_calls: int = 0
    is_linear: bool = False
    fwd: Rule | None = None
    bwd: Rule | None = None
    jvp: Rule | None = None
    kept: ResidualCache = dataclasses.field(default_factory=lambda: ResidualCache(0))

    def __post_init__(self):
        self.name, self.place = name_of(self.fn), place_of(self.fn)
        self.signature = Signature(self.fn)


@dataclasses.dataclass(frozen=True)
class HostCall(Opaque):
    """A call of the user's function.

    - `split`: the tree `(args, kwargs)` without its arrays; `tree`: what it is compared by.
        `args` are all positional arguments, defaults included.
    - `n_args`: how many of the arrays are in `args`, and can be differentiated.
    - `steps`: the relative step of each of these, for differences.
    """

    code: HostCode
    split: TreeSplit = dataclasses.field(compare=False)
    tree: tuple[Any, ...]
    n_args: int
    in_types: Types
    steps: tuple[float | None, ...] = ()
    out_treedef: Any = None
    out_types: Types = ()

    @property
    def name(self) -> str:
        return self.code.name

    @property
    def place(self) -> str:
        return self.code.place

    def rules(self, *names: str) -> str:
        """How the user gives these rules: a lambda has no name for a decorator."""
        code = code_of(self.code.fn) if self.name == "<lambda>" else None
        prefix = "" if code else f"@{self.name}."
        rules = " or ".join(f"`{prefix}{name}`" for name in names)
        return f"{rules} of the function at line {code.co_firstlineno}" if code else rules

    @ft.cached_property
    def op(self) -> HostOp:
        """The function, of flat arrays."""
        return HostOp(_run, self, (), self.code, self.in_types, self.out_types, self.out_path)

    def flat_out(self, op: HostOp, out: Any) -> list[Any]:
        """The leaves of the output that `op` returned: the function, or a rule for it."""
        leaves, returned = jax.tree.flatten(out)
        if returned != self.out_treedef:
            raise rule_error(
                f"{op.described} returned a different structure than promised.",
                f"promised {show_tree(mirror_of(self.out_treedef, self.out_types))}",
                f"returned {show_tree(out)}",
                op.place,
                do="Return the promised structure, or promise another one in `out`.",
            )
        return leaves

    def out_path(self, i: int) -> str:
        return "out" + show_path(leaf_paths(self.out_treedef)[i])

    def in_path(self, i: int) -> str:
        """Array number `i`, as the user would write it."""
        part, first, *rest = self.split.path(self.split.indices[i])
        name = first.key if part.idx else self.code.signature.names[first.idx]
        return f"`{name}{show_path(tuple(rest))}`"

    def rule_arguments(self, arrays: Sequence[Any], rule: Rule) -> Any:
        """`args` and `kwargs` as a rule gets them, with these arrays. Default values of
        keyword-only arguments are passed if the rule has a parameter for them, as for the rules
        of `custom_vjp`."""
        args, kwargs = self.split.tree(arrays)
        args, kwargs, filled = self.code.signature.bind(args, kwargs, False)
        return args, rule.keywords(kwargs, filled)

    @property
    def names(self) -> list[str]:
        """The positional arguments that a rule gets."""
        n = len(self.split.treedef.children()[0].children())
        return [self.code.signature.names[i] for i in range(n)]

    def tangents(self, ts: Sequence[Any]) -> Any:
        """A tree like `args` with `ts` for its arrays, and `None` elsewhere."""
        return self.split.without_static().tree(self._of_args(ts))[0]

    def flags(self, flags: Sequence[bool], arrays: Sequence[Any]) -> Any:
        """As `tangents`, with bools; `arrays` are the arrays of all arguments."""
        nothing = [None] * len(self.split.static)
        return self.split.mirror(self._of_args(flags), nothing, arrays)[0]

    def _of_args(self, values):
        return [*values, *[None] * (len(self.in_types) - self.n_args)]


def _run(op, arrays):
    call = op.call
    args, kwargs = call.split.tree(arrays)
    return call.flat_out(op, call.code.fn(*args, **kwargs))


def host_call_of(
    code: HostCode, args: Any, kwargs: Any, out: Any = None, others: Sequence[Any] = ()
) -> tuple[HostCall, list[jax.Array]]:
    """A call of the user's function, and its operands. `out` replaces what was promised.

    Raises if the call can't be static data of a program; so may `others` not.
    """
    # The arguments of the caller: who promises the type of `np.cumsum(x)` need not know of its
    # `axis`.
    given, kwargs, filled = code.signature.bind(args, kwargs, False)
    kwargs = {name: x for name, x in kwargs.items() if name not in filled}
    args, _, _ = code.signature.bind(given, kwargs, True)
    split, operands = TreeSplit.split((args, kwargs), is_array_leaf)
    call = HostCall(
        code,
        split,
        (split.treedef, tuple(split.static)),
        sum(map(is_array_leaf, jax.tree.leaves(args))),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands),
        _steps(code, args),
    )
    for i, x in enumerate(operands):
        if is_key_array(x):
            what = f"`{call.name}` runs on the host, and was given a random key."
            do = "Pass `jax.random.key_data(key)`, an array of integers."
            raise rule_error(what, f"at {call.in_path(i)}: {type_of(x)}", call.place, do=do)
    _check_static(call, operands, others)
    # With types instead of the arrays.
    args, kwargs = call.split.mirror(call.in_types, arrays=without_memory(call.in_types))
    spec = code.out if out is None else out
    types, out_treedef = promised_types(spec, code, args[: len(given)], kwargs)
    return dataclasses.replace(call, out_types=types, out_treedef=out_treedef), operands


def _check_static(call: HostCall, operands, others) -> None:
    code = call.code
    for i, x in enumerate(call.split.static):
        try:
            hash(x)
        except TypeError:
            raise rule_error(
                f"`{call.name}` was given an argument that is not an array and has no hash.",
                f"at argument {show_path(call.split.path(i)[1:])}: {type_of(x)}",
                call.place,
                do="JAX looks up compiled programs by their static data. Pass arrays, or "
                "give the object's class `__hash__` and `__eq__`. For a SciPy sparse matrix, "
                'pass the entries, and build it on the host: see "A sparse solve" in the guide '
                '"Host code".',
            ) from None
    if is_eager(operands):
        return
    rules = [rule.fn for rule in (code.fwd, code.bwd, code.jvp) if rule is not None]
    found = captured_tracer([code.fn, *rules, *others, *call.split.static])
    if found is not None:
        raise rule_error(
            f"`{call.name}` runs on the host, and closes over a traced value.",
            f"at {found[1]}",
            call.place,
            do="Pass the value as an argument: then the function gets its NumPy array, "
            "and has a derivative with respect to it.",
        )


def _steps(code: HostCode, args) -> tuple[float | None, ...]:
    """The relative step of each array among the positional arguments."""
    is_leaf = lambda x: x is None or isinstance(x, float | int)
    step = (code.step,) * len(args) if is_leaf(code.step) else code.step
    try:
        steps = prefix_leaves(tuple(step), tuple(args), is_leaf)
    except (ValueError, TypeError) as error:
        raise rule_error(
            f"`step` of `{code.name}` does not fit the arguments.",
            f"the steps are {show_tree(step)}",
            f"the arguments are {show_tree(args)}",
            code.place,
            do="Give one number, or a tuple with a number, `None` or a tree for each argument.",
        ) from error
    leaves = zip(steps, jax.tree.leaves(tuple(args)), strict=True)
    return tuple(step for step, x in leaves if is_array_leaf(x))
