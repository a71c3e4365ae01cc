"""A function at given arguments, as a function of its differentiable leaves.

The checks work on lists of arrays. A `FlatFunction` knows which leaves of the user's arguments
these are, what the user calls them, and which leaves stay constant.
"""

import contextlib
import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._diagnosis.report import show_list
from .._errors import name_of, rule_error, show_path
from .._jaxprs.operands import fill, flagged
from .._rules.signature import Signature
from .._tangent_spaces import is_arraylike
from ._compare import as_double
from ._outcome import outcome


_MOST_NAMES = 12
__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


class FlatFunction:
    """`fn` at `args` and `kwargs`.

    - `leaves`, `names`: the arrays that are perturbed, and what the user calls them.
    - `groups`: for each leaf, the index of its argument; -1 for a leaf of the function itself.
    - `has_self`: whether there are leaves of the function itself: a Module, or the Module that
        a method is bound to.
    """

    is_wide = False  # whether all floats are in float64

    def __init__(
        self, fn: Any, args: Any, kwargs: Any, fixed: Any = (), own_numbers: bool = True
    ):
        """- `fixed`: the names of parts that are not perturbed.
        - `own_numbers`: whether the Python numbers of a Module are perturbed, too."""
        self.fn = fn = _as_tree(fn)
        self.name = name_of(fn)
        signature = Signature(fn)
        by_position, by_keyword = jax.tree.map(_canonical, (tuple(args), dict(kwargs)))
        try:
            self.args, kwargs, filled = signature.bind(by_position, by_keyword, False)
        except TypeError as error:
            what = f"`{self.name}` can't be called with the arguments that it was given."
            do = "Pass all of its arguments after the function, and options by their names."
            raise rule_error(what, str(error), do=do) from None
        # Not the defaults: a reference need not have those parameters.
        self.kwargs = {k: v for k, v in kwargs.items() if k not in filled}
        # The arrays of a Module, or of a bound method, are arguments as well.
        flat, self._treedef = jax.tree_util.tree_flatten_with_path((fn, self.args))
        self._all = [leaf for _, leaf in flat]
        owners = [path[1].idx if path[0].idx else -1 for path, _ in flat]
        paths = [
            "self" + show_path(path[1:]) if i < 0 else signature.names[i] + show_path(path[2:])
            for i, (path, _) in zip(owners, flat, strict=True)
        ]
        fixed = [name.replace('"', "'") for name in fixed]

        def is_perturbed(path, owner, leaf):
            is_option = owner < 0 and not own_numbers and isinstance(leaf, float | complex)
            is_fixed = any(is_part_of(path, name) for name in fixed)
            is_constant = is_option or is_fixed or owner in getattr(fn, "nondiff_argnums", ())
            return is_output(leaf) and not is_constant

        self.indices = flagged(map(is_perturbed, paths, owners, self._all))
        self.groups = [owners[i] for i in self.indices]
        self.names = [f"`{paths[i]}`" for i in self.indices]
        arguments = [signature.names[i] for i in range(len(self.args))]
        arrays = [path for path, x in zip(paths, self._all, strict=True) if is_arraylike(x)]
        known = list(dict.fromkeys([*arguments, *arrays]))
        for name in fixed:
            if not any(is_part_of(path, name) for path in known):
                raise rule_error(
                    f"`nondifferentiable` names `{name}`, which is not a positional argument "
                    f"of `{self.name}` and not a part of one.",
                    f"there are {show_list([f'`{path}`' for path in known], _MOST_NAMES)}",
                    do="Name arguments, or parts of them as the report names them, such as "
                    "`self.frozen` or `params['scale']`.",
                )
        self.leaves = [jax.device_put(self._all[i]) for i in self.indices]  # compiles nothing
        self.has_self = -1 in self.groups

    def tree(self, leaves: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The function and its arguments, with their differentiable leaves replaced."""
        return jax.tree.unflatten(self._treedef, fill(self._all, self.indices, leaves))

    @property
    def constants(self) -> list[Any]:
        """The arrays of the arguments that are not perturbed."""
        rest = fill(self._all, self.indices, [None] * len(self.indices))
        leaves = jax.tree.leaves((rest, self.kwargs))
        return [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with their differentiable leaves replaced, after the Module that has
        leaves of its own, if there is one."""
        fn, args = self.tree(leaves)
        return (getattr(fn, "__self__", fn), *args) if self.has_self else args

    def of_self(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """A method, or a Module, as a function of its Module and the arguments. `None` for a
        function that does not take these."""
        unbound: Any = _as_tree(function)
        if isinstance(unbound, eqx.Module) and not hasattr(unbound, "__func__"):
            unbound = type(unbound).__call__
        unbound = getattr(unbound, "__func__", unbound)
        given = self.arguments(self.leaves)
        bound = outcome(lambda: Signature(unbound).bind(given, dict(self.kwargs), False))
        return None if isinstance(bound, Exception) else unbound

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
            flat = jax.tree_util.tree_leaves_with_path(self.call(leaves))
            outputs = {f"output{show_path(path)}": x for path, x in flat if is_output(x)}
            names[:] = outputs
            return list(map(jnp.asarray, outputs.values()))

        try:
            shapes = jax.eval_shape(run, *self.leaves)
        except jax.errors.ConcretizationTypeError:  # it looks at values
            shapes = run(*self.leaves)
        return list(zip(names, shapes, strict=True))

    def in_float64(self) -> "FlatFunction":
        """The same in float64. Use it inside `double_precision`."""
        wide = copy.copy(self)
        with double_precision():
            wide.kwargs, wide._all = widened((self.kwargs, self._all))
            wide.leaves = [jnp.asarray(as_double(x)) for x in self.leaves]
        wide.is_wide = True
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
    """A method as a PyTree of the arrays of its Module: Equinox does not change methods with
    double underscores, and `eqx.filter_jit` gives the arrays other names. Its compilation is
    taken off; the checks compile."""
    if isinstance(fn, _COMPILED):
        return _as_tree(fn.__wrapped__)
    if isinstance(fn, types.MethodType) and isinstance(fn.__self__, eqx.Module):
        return _BOUND(fn.__func__, fn.__self__)
    if isinstance(fn, eqx.Partial) and isinstance(fn.func, _COMPILED) and len(fn.args) == 1:
        return _BOUND(_as_tree(fn.func), *fn.args)
    return fn


def _canonical(x):
    """A NumPy array in the precision in which JAX takes it. If a function captures a float64
    array, JAX keeps programs in single precision, and uses them for double precision after
    `jax.enable_x64` was changed (JAX 0.10.2)."""
    if not (isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)):
        return x
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def is_part_of(path: str, name: str) -> bool:
    """Whether a leaf is the named part, or lies in it."""
    return path == name or path.startswith((f"{name}.", f"{name}["))


def is_output(x: Any) -> bool:
    """Whether a leaf of the output has a derivative."""
    return is_arraylike(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def widened(tree: Any) -> Any:
    """All arrays of floats in float64. Python numbers stay as they are: they may be
    configuration."""
    is_array = lambda x: is_output(x) and not isinstance(x, float | complex)
    return jax.tree.map(lambda x: jnp.asarray(as_double(x)) if is_array(x) else x, tree)
