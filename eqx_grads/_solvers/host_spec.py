"""The call of a host function with given arguments: its operands, and the types that it
returns, as its user promised them or as one example has them."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._errors import first_line, rule_error, show_path, show_tree, type_of
from .._errors.trees import leaf_paths, prefix_leaves, unmirror
from .._jaxprs.current_trace import is_eager
from .._rules.closure_convert import check_no_tracers
from .host_callback import read_only
from .host_ops import HostCode, is_array_leaf, PrimalOp, without_memory
from .host_rule_ops import ForwardOp


def primal_op(
    code: HostCode, args: Any, kwargs: Any, out: Any = None
) -> tuple[PrimalOp, list[jax.Array]]:
    """A call of the user's function, and its operands. `out` replaces what was promised."""
    # What the caller gave: who promises the type of `np.cumsum(x)` need not know of its `axis`.
    args, kwargs, filled = code.signature.bind(args, kwargs, False)
    kwargs = {name: x for name, x in kwargs.items() if name not in filled}
    leaves, treedef = jax.tree.flatten((args, kwargs))
    operands = [
        x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves if is_array_leaf(x)
    ]
    statics = tuple(None if is_array_leaf(x) else x for x in leaves)
    n_args = sum(map(is_array_leaf, jax.tree.leaves(args)))
    op = PrimalOp(
        code=code,
        treedef=treedef,
        statics=statics,
        n_args=n_args,
        in_types=tuple(_struct(x) for x in operands),
        out_treedef=None,
        out_types=(),
        steps=(),
        defaults=jax.tree.map(_as_given, code.signature.left_out(len(args))),
    )
    for i, x in enumerate(operands):
        if _is_key(x):
            raise rule_error(
                f"`{op.name}` runs on the host, and was given a random key.",
                f"at {op.in_path(i)}: {type_of(x)}",
                op.place,
                do="Pass `jax.random.key_data(key)`, an array of integers.",
            )
    out_types, out_treedef = _promised(op, code.out if out is None else out)
    op = dataclasses.replace(
        op, out_types=out_types, out_treedef=out_treedef, steps=_steps(code, args, n_args)
    )
    return op, operands


def _as_given(x: Any) -> Any:
    """A leaf of a default value as a rule would be given it: a NumPy array if it is one, of
    JAX's precision."""
    if not is_array_leaf(x) or isinstance(x, Tracer) or _is_key(x):
        return x
    return read_only(np.asarray(x, _promise(x).dtype).view())


def _is_key(x: Any) -> bool:
    # Not `jnp.issubdtype`, which raises if the dtype is that of another library.
    return getattr(getattr(x, "dtype", None), "type", None) is jax.dtypes.prng_key


def check_hashable(op: PrimalOp) -> None:
    for i, x in enumerate(op.statics):
        try:
            hash(x)
        except TypeError:
            path = leaf_paths(op.treedef)[i][1:]
            raise rule_error(
                f"`{op.name}` was given an argument that is no array and has no hash.",
                f"at argument {show_path(path)}: {type_of(x)}",
                op.place,
                do="JAX keeps compiled programs by what is static in them. Pass arrays, or "
                "give the object's class `__hash__` and `__eq__`."
                if not type(x).__module__.startswith("scipy.sparse")
                else "A sparse matrix of SciPy is no array to JAX. Pass its entries "
                '(`matrix.data`), and build it on the host: see "A sparse solve" in the guide '
                '"Host code".',
            ) from None


def check_captures(code: HostCode, operands: Sequence[Any], others: Sequence[Any]) -> None:
    """Raise if the user's code, or one of `others`, holds a traced value, which NumPy can't
    compute with."""
    if is_eager() and not any(isinstance(x, Tracer) for x in operands):
        return
    rules = [rule.fn for rule in (code.fwd, code.bwd, code.jvp) if rule is not None]

    def fail(i, name):
        return rule_error(
            f"`{code.name}` runs on the host, and closes over a traced value.",
            f"at {name}",
            code.place,
            do="Pass the value as an argument: then the function is given its NumPy array, "
            "and has a derivative with respect to it.",
        )

    check_no_tracers([code.fn, *rules, *others], fail)


def _struct(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def forward_op(call: PrimalOp) -> ForwardOp:
    """The call of the forward rule that belongs to a call of the function."""
    spec = call.code.residuals
    if spec is None:
        return ForwardOp(call, None, ())
    types, treedef = _types(call, spec, "residuals")
    return ForwardOp(call, treedef, types)


def _promised(op: PrimalOp, out: Any):
    if op.code.example is None:
        return _types(op, out, "out")
    _check_like_example(op)
    if op.code.example_out is None:
        # One call, at arguments that the user chose: a solver may never end at others.
        out = op.code.fn(*jax.tree.map(_to_numpy, op.code.example))
        leaves, treedef = jax.tree.flatten(out)
        op.code.example_out = tuple(map(_promise, leaves)), treedef
    return op.code.example_out


def _to_numpy(x):
    return np.asarray(x) if is_array_leaf(x) else x


def _check_like_example(op) -> None:
    args, _ = op.types()
    example = op.code.example
    shapes = lambda tree: [np.shape(x) for x in jax.tree.leaves(tree) if _has_shape(x)]
    if shapes(args) != shapes(example):
        raise rule_error(
            f"`{op.name}` was called with other shapes than those of its example.",
            f"the arguments are {show_tree(args)}",
            f"the example is {show_tree(jax.tree.map(_to_numpy, example))}",
            op.place,
            do="What it returns is known for the shapes of the example only. Give "
            "`out=`, a function of the arguments, in place of `example=`.",
        )


def _has_shape(x):
    """Of arrays, `jax.ShapeDtypeStruct`s, what `jax.typeof` returns and the like."""
    return is_array_leaf(x) or (hasattr(x, "shape") and _is_dtype(getattr(x, "dtype", None)))


def _accepted(spec, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword-only arguments that `spec` has parameters for: most types depend on none."""
    try:
        parameters = inspect.signature(spec).parameters.values()
    except ValueError:  # of some functions written in C
        return kwargs
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return kwargs
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
    names = {p.name for p in parameters if p.kind not in by_position}
    return {name: x for name, x in kwargs.items() if name in names}


def _check_binds(op, spec, what, args, kwargs) -> None:
    try:
        signature = inspect.signature(spec)
    except ValueError:  # of some functions written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise rule_error(
            f"`{what}` of `{op.name}` has other parameters than the function.",
            f"`{what}` is called with the same arguments: {error}",
            op.place,
            do="Give it the parameters of the function, with the same default values.",
        ) from None


def _types(op: PrimalOp, spec: Any, what: str):
    """The promised types, flat. A spec is a tree of types or arrays, or a function of the
    arguments that returns one."""
    given: tuple[Any, Any] = ((), {})
    if callable(spec) and not isinstance(spec, eqx.Module) and not _is_dtype(spec):
        args, kwargs = op.types()
        kwargs = _accepted(spec, kwargs)
        given = args, kwargs
        _check_binds(op, spec, what, args, kwargs)
        try:
            spec = spec(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            is_traced = isinstance(error, jax.errors.ConcretizationTypeError)
            if not is_traced and "ShapeDtypeStruct" not in str(error):
                raise
            raise rule_error(
                f"`{what}` of `{op.name}` computes with its arguments.",
                f"{type(error).__name__}: {first_line(error)}",
                op.place,
                do="It is given shapes and dtypes, and no values. Return a "
                "`jax.ShapeDtypeStruct`: of one number, like an element of `x`, "
                f"`jax.ShapeDtypeStruct((), x.dtype)`. {_VALUES_IN_SHAPES}",
            ) from None
    leaves, treedef = jax.tree.flatten(spec)
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        if _is_key(leaf):
            raise rule_error(
                f"`{what}` of `{op.name}` promises a random key, and NumPy has no keys.",
                f"at {what}{show_path(path)}: {type_of(leaf)}",
                op.place,
                do="Return the integers, and call `jax.random.wrap_key_data` on them.",
            )
        if not _is_dtype(leaf) and _has_shape(leaf):
            _check_shape_is_known(op, what, path, np.shape(leaf))
            continue
        argument = _name_of_integer(op, *given, leaf)
        if argument is None:
            place, do = "", _FORMS.replace("out=", f"{what}=")
        else:
            place = f", as the argument {argument}"
            do = (
                f"A Python integer is no array, and `{what}` is given it as it is. Pass a "
                "float or an array for this argument, or return a "
                "`jax.ShapeDtypeStruct(shape, dtype)`."
            )
        raise rule_error(
            f"`{what}` of `{op.name}` does not say what is returned.",
            f"at {what}{show_path(path)}: {type_of(leaf)}{place}",
            op.place,
            do=do,
        )
    types = tuple(map(_promise, leaves))
    # `spec` may hold mirrors of arguments, and what the host returns is of the user's classes.
    out = unmirror(jax.tree.unflatten(treedef, without_memory(types)))
    return types, jax.tree.structure(out)


_VALUES_IN_SHAPES = (
    "A size that is the value of an argument has to be a Python integer: under `jax.jit`, a "
    "static argument (`static_argnums`, or `eqx.filter_jit`)."
)


def _check_shape_is_known(op: PrimalOp, what: str, path, shape) -> None:
    for axis, n in enumerate(shape):
        if isinstance(n, Tracer | jax.ShapeDtypeStruct):
            raise rule_error(
                f"`{what}` of `{op.name}` has a shape that is the value of an array, which is "
                "not known while JAX traces.",
                f"at {what}{show_path(path)}: axis {axis} has the size {type_of(n)}",
                op.place,
                do=f"{_VALUES_IN_SHAPES} Or take the size from the shape of an array.",
            )


_FORMS = (
    "A shape or a dtype alone is not enough. Give a `jax.ShapeDtypeStruct(shape, dtype)`, an "
    "array, a float (for one number), or any tree of these; or a function of the arguments "
    "that returns one, as `out=lambda x: x` for the type of `x`."
)


def _name_of_integer(op: PrimalOp, args: Any, kwargs: Any, x: Any) -> str | None:
    """The argument that is this Python integer, as the user would write it."""
    if type(x) is not int:
        return None
    named = [(op.code.signature.names[i], arg) for i, arg in enumerate(args)]
    for name, arg in [*named, *kwargs.items()]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            if leaf is x:
                return f"`{name}{show_path(path)}`"
    return None


def _is_dtype(x) -> bool:
    """A type of numbers can be called, but does not say what a host function returns."""
    is_scalar = isinstance(x, type) and issubclass(x, int | float | complex | np.generic)
    return is_scalar or isinstance(x, np.dtype) or type(x) is type(jnp.float32)


def _promise(x) -> jax.ShapeDtypeStruct:
    """The type of `x`, in 32 bits unless JAX is told to use 64."""
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(dtype))


def _steps(code: HostCode, args, n_args) -> tuple[float | None, ...]:
    """The relative step of each array among the positional arguments."""
    step = code.step
    if step is None or isinstance(step, float | int):
        return (step,) * n_args
    is_leaf = lambda x: x is None or isinstance(x, float | int)
    try:
        steps = prefix_leaves(tuple(step), tuple(args), is_leaf)
    except (ValueError, TypeError) as error:
        raise rule_error(
            f"`step` of `{code.name}` does not fit the arguments.",
            f"the steps are {show_tree(step)}",
            f"the arguments are {show_tree(args)}",
            code.place,
            do="Give one number, or a tuple with one entry for each argument: a number or "
            "`None` for all of it, or a tree of them.",
        ) from error
    leaves = zip(steps, jax.tree.leaves(tuple(args)), strict=True)
    return tuple(step for step, x in leaves if is_array_leaf(x))
