"""A function at given arguments, as a function of its differentiable leaves.

The checks work on lists of arrays. A `FlatFunction` knows which leaves of the user's arguments
these are, what the user calls them, and which leaves stay constant.
"""

import contextlib
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import name_of, rule_error, RuleError, show_path, type_of
from .._rules.signature import Signature
from .._tangent_spaces import is_arraylike, is_differentiable, is_none, match_leaves


_MOST_NAMES = 12
__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


class FlatFunction:
    """`fn` at `args` and `kwargs`.

    - `leaves`, `names`: the arrays that are perturbed, and what the user calls them.
    - `groups`: for each leaf, the index of its argument; -1 for a leaf of the function itself.
    - `has_self`: whether there are leaves of the function itself: a Module, or the one that a
        method is bound to.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        nondifferentiable: Collection[str] = (),
        own_numbers: bool = True,
    ):
        """- `own_numbers`: whether the Python numbers of a Module are perturbed, too."""
        fn = _as_tree(fn)
        signature = Signature(fn)
        by_position = tuple(jax.tree.map(_canonical, list(args)))
        by_keyword = jax.tree.map(_canonical, dict(kwargs))
        try:
            args, kwargs, filled = signature.bind(by_position, by_keyword, False)
        except TypeError as mismatch:
            raise _cannot_be_called(name_of(fn), by_position, by_keyword, mismatch) from None
        # Not the defaults: a reference need not have those parameters.
        self.kwargs = {k: v for k, v in kwargs.items() if k not in filled}
        self.fn = fn
        self.args = args
        self.name = name_of(fn)
        # The arrays of a Module, or of a bound method, are arguments as well.
        flat, self._treedef = jax.tree_util.tree_flatten_with_path((fn, args))
        self._all = [leaf for _, leaf in flat]
        self.argument_names = [signature.names[i] for i in range(len(args))]
        self.indices, self.names, self.groups = [], [], []
        fixed = [name.replace('"', "'") for name in nondifferentiable]
        numbers_are_fixed = set(getattr(fn, "nondiff_argnums", ()))
        paths = []
        for index, (path, leaf) in enumerate(flat):
            argument = path[1].idx if path[0].idx == 1 else -1
            rest = show_path(path[2:] if argument >= 0 else path[1:])
            paths.append(f"{signature.names[argument] if argument >= 0 else 'self'}{rest}")
            is_constant = (
                argument in numbers_are_fixed
                or (argument < 0 and not own_numbers and isinstance(leaf, float | complex))
                or any(_is_part_of(paths[-1], name) for name in fixed)
            )
            if is_arraylike(leaf) and is_differentiable(leaf) and not is_constant:
                self.indices.append(index)
                self.groups.append(argument)
                self.names.append(f"`{paths[-1]}`")
        _check_names(fixed, self.argument_names, paths, self.name)
        self.leaves = [jnp.asarray(self._all[i]) for i in self.indices]
        self.has_self = -1 in self.groups
        self._given_owner = _owner(fn)  # also where the function is that of float64
        self._output: Any = None  # of `named_outputs`: a tree of it

    def check_points(self, points: Sequence[Sequence[Any]]) -> None:
        """Raise unless the function can be called with each of them."""
        for number, args in enumerate(points):
            try:
                Signature(self.fn).bind(tuple(args), dict(self.kwargs), False)
            except TypeError as error:
                raise rule_error(
                    f"`at[{number}]` of `check_rule` are not the arguments of `{self.name}`.",
                    f"{error}",
                    do="Give a tuple of the arguments for each point, as in `at=[(x,), (y,)]`. "
                    "A Module that is checked is not one of its arguments.",
                ) from None

    def tree(
        self, leaves: Sequence[Any], others: Sequence[Any] | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """The function and its arguments, with their differentiable leaves replaced.

        - `others`: what the other leaves are replaced by.
        """
        flat = list(self._all if others is None else others)
        for index, leaf in zip(self.indices, leaves, strict=True):
            flat[index] = leaf
        return jax.tree.unflatten(self._treedef, flat)

    @property
    def constants(self) -> list[Any]:
        """The arrays of the arguments that are not perturbed."""
        perturbed = set(self.indices)
        leaves = [x for i, x in enumerate(self._all) if i not in perturbed]
        leaves += jax.tree.leaves(self.kwargs)
        return [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with their differentiable leaves replaced, after the Module that has
        leaves of its own, if there is one."""
        return self._with_owner(*self.tree(leaves))

    def tangents_of_arguments(self, tangents: Sequence[Any]) -> tuple[Any, ...]:
        """The tangents of `arguments`: zero for numbers that are not perturbed, and `None` for
        what has no tangent."""
        has_tangent = lambda x: is_arraylike(x) and is_differentiable(x)
        zeros = [jnp.zeros_like(x) if has_tangent(x) else None for x in self._all]
        return self._with_owner(*self.tree(tangents, zeros))

    def _with_owner(self, fn, args):
        return (_owner(fn), *args) if self.has_self else args

    def of_self(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """A method that is bound to the same Module, or that Module, or a function in its
        class, as a function of the Module and the arguments. `None` for another function."""
        function, owner = _as_tree(function), self._given_owner
        if _is_same_object(function, owner):
            return type(owner).__call__
        if any(function is x for cls in type(owner).__mro__ for x in vars(cls).values()):
            return function
        is_bound = _is_same_object(getattr(function, "__self__", None), owner)
        return getattr(function, "__func__", None) if is_bound else None

    def call(self, leaves: Sequence[Any]) -> Any:
        fn, args = self.tree(leaves)
        return fn(*args, **self.kwargs)

    def arrays(self, *leaves: Any) -> list[Any]:
        """The inexact leaves of the output."""
        return [x for x in jax.tree.leaves(self.call(leaves)) if is_output(x)]

    def named_outputs(self) -> list[tuple[str, Any]]:
        """The shapes and dtypes of `arrays`, with their names."""
        names: list[str] = []

        def run(*leaves):
            out = self.call(leaves)
            self._output = jax.tree.map(_without_values, out)
            flat = jax.tree_util.tree_leaves_with_path(out)
            flat = [(path, x) for path, x in flat if is_output(x)]
            names[:] = [f"output{show_path(path)}" for path, _ in flat]
            return [jnp.asarray(x) for _, x in flat]

        try:
            shapes = jax.eval_shape(run, *self.leaves)
        except jax.errors.ConcretizationTypeError:  # looks at values: eager only
            shapes = run(*self.leaves)
        return list(zip(names, shapes, strict=True))

    def like_output(self, cotangents: Sequence[Any]) -> Any:
        """A cotangent of the whole output, with `None` where there is no derivative."""
        found: list[Any] = []

        def run(leaves):
            out, treedef = jax.tree.flatten(self.call(leaves))
            found[:] = [treedef]
            return [x if isinstance(x, jax.Array) else None for x in out]

        out, rest = jax.eval_shape(run, self.leaves), iter(cotangents)
        has_ct = [x is not None and jnp.issubdtype(x.dtype, jnp.inexact) for x in out]
        filled = [jnp.asarray(next(rest)) if has else None for has in has_ct]
        return jax.tree.unflatten(found[0], filled)

    def cotangents_by_leaf(self, cotangents: Any) -> list[Any]:
        """One cotangent for each leaf, from a tuple of trees, one for each of `arguments`."""
        names = ["self"] * self.has_self + list(self.argument_names)
        if not isinstance(cotangents, tuple | list) or len(cotangents) != len(names):
            is_tuple = isinstance(cotangents, tuple | list)
            given = len(cotangents) if is_tuple else type_of(cotangents)
            raise rule_error(
                "`expected_cotangent` does not return a cotangent for each argument.",
                f"{given} for {', '.join(f'`{name}`' for name in names)}",
                do="Return a tuple with one tree for each of the `primals`, `None` for zero. "
                "If `self` has arrays, it is the first one.",
            )
        # One for each leaf of the arguments, which are the last ones.
        found = []
        for name, ct, value in zip(names, cotangents, self.arguments(self.leaves), strict=True):
            cts = match_leaves(ct, value, name, _does_not_fit("expected_cotangent"))
            values = jax.tree.leaves(value, is_leaf=is_none)
            found += [ct for ct, x in zip(cts, values, strict=True) if x is not None]
        cts = [found[index - len(self._all)] for index in self.indices]
        return fitted("expected_cotangent", cts, self.leaves, self.names)

    def by_output(
        self, option: str, given: Any, outputs: Sequence[tuple[str, Any]]
    ) -> list[jax.Array]:
        """What an option gives for the output, a tree, as one array for each of `outputs`,
        which `named_outputs` returned."""
        leaves = match_leaves(given, self._output, "output", _does_not_fit(option))
        values = jax.tree.leaves(self._output, is_leaf=is_none)
        ts = [t for t, x in zip(leaves, values, strict=True) if is_output(x)]
        return fitted(option, ts, [x for _, x in outputs], [name for name, _ in outputs])

    def in_float64(self) -> "FlatFunction":
        """The same in float64. Make it and use it inside `double_precision`."""
        args = jax.tree.map(_widen, self.args)
        fn = jax.tree.map(_widen, self.fn) if isinstance(self.fn, eqx.Module) else self.fn
        wide = object.__new__(FlatFunction)
        vars(wide).update(vars(self))
        wide.fn, wide.args = fn, args
        wide.kwargs = jax.tree.map(_widen, self.kwargs)
        wide._all = [_widen(x) for x in self._all]
        wide.leaves = [jnp.asarray(wide._all[i]) for i in self.indices]
        return wide


@contextlib.contextmanager
def double_precision():
    """64-bit arrays, and the promotion of 32-bit constants in the user's code."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


class _Methods(eqx.Module):
    def method(self):
        pass


_BOUND: Any = type(_Methods().method)
_COMPILED: Any = type(eqx.filter_jit(lambda: None))


def _as_tree(fn: Any) -> Any:
    """A method as a PyTree of the arrays of its Module: Equinox leaves those with double
    underscores as they are, and `eqx.filter_jit` gives the arrays other names. Its compilation
    is taken off; the checks compile."""
    if isinstance(fn, _COMPILED):
        return _as_tree(fn.__wrapped__)
    if isinstance(fn, types.MethodType) and isinstance(fn.__self__, eqx.Module):
        return _BOUND(fn.__func__, fn.__self__)
    if isinstance(fn, eqx.Partial) and isinstance(fn.func, _COMPILED) and len(fn.args) == 1:
        return _BOUND(_as_tree(fn.func), *fn.args)
    return fn


def _owner(fn: Any) -> Any:
    return getattr(fn, "__self__", fn)


def _is_same_object(x: Any, y: Any) -> bool:
    """Also of a Module that `eqx.filter_jit` took apart and put together."""
    if x is y or type(x) is not type(y) or not isinstance(x, eqx.Module):
        return x is y
    leaves, treedef = jax.tree.flatten(x)
    others, other_treedef = jax.tree.flatten(y)
    return treedef == other_treedef and all(a is b for a, b in zip(leaves, others, strict=True))


def fitted(
    option: str, ts: Sequence[Any], space: Sequence[Any], names: Sequence[str]
) -> list[jax.Array]:
    """The arrays that an option gives, in the shapes of a space: `None` is zero."""
    arrays = [jnp.zeros(x.shape, x.dtype) if t is None else jnp.asarray(t)
              for t, x in zip(ts, space, strict=True)]  # fmt: skip
    for t, x, name in zip(arrays, space, names, strict=True):
        if t.shape != x.shape:
            raise rule_error(
                f"`{option}` has an array of another shape than its value.",
                f"for {name}: {t.shape}, and the value has {x.shape}",
                do="Give a number for each entry, as with `jnp.broadcast_to`, or `None` for "
                "zero.",
            )
    return arrays


def _does_not_fit(option: str) -> Callable[..., RuleError]:
    text = f"`{option}` does not have the structure of its value."
    return lambda *where, do: rule_error(text, *where, do=do)


def _cannot_be_called(name, args, kwargs, mismatch):
    by_keyword = ", ".join(f"`{keyword}`" for keyword in kwargs)
    return rule_error(
        f"`{name}` can't be called with these arguments: {mismatch}.",
        f"{len(args)} by position, and by keyword {by_keyword or 'none'}",
        do=f"Pass them as to the function itself: `check_rule({name}, ..., v=...)`.",
    )


def _canonical(x):
    """A NumPy array in the precision in which JAX takes it. Of one in float64 that a function
    captures, JAX keeps programs in single precision, and takes them for those in double
    precision after `jax.enable_x64` was changed (JAX 0.10.2)."""
    if not (isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)):
        return x
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _is_part_of(path: str, name: str) -> bool:
    """Whether a leaf is what is named, or a part of it."""
    return path == name or path.startswith((f"{name}.", f"{name}["))


def _check_names(names, arguments, paths, fn_name) -> None:
    for name in names:
        if name not in arguments and not any(_is_part_of(path, name) for path in paths):
            known = list(dict.fromkeys([*arguments, *paths]))
            raise rule_error(
                f"`nondifferentiable` names `{name}`, which is no positional argument of "
                f"`{fn_name}` and no part of one.",
                "there are "
                + ", ".join(f"`{name}`" for name in known[:_MOST_NAMES])
                + (", ..." if len(known) > _MOST_NAMES else ""),
                do="Name arguments, or parts of them as the report names them, such as "
                "`self.frozen` or `params['scale']`.",
            )


def is_output(x: Any) -> bool:
    """Whether a leaf of the output has a derivative."""
    return is_arraylike(x) and is_differentiable(x)


def _without_values(x):
    """Zeros for an array, which may be traced."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape) if is_output(x) else None


def _widen(x):
    if not (is_arraylike(x) and is_differentiable(x)):
        return x
    wide = np.complex128 if jnp.iscomplexobj(x) else np.float64
    return jnp.asarray(np.asarray(x).astype(wide))
