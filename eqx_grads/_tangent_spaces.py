"""Tangent spaces: check tangents, sum and cast cotangents to the types of their primals."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree

from ._errors import rule_error, RuleError, show_path, show_tree, type_of
from ._jaxprs.current_trace import outside_of_transformations, staging_trace
from ._jaxprs.varying import vary_over, varying_axes
from ._trees import is_leaf_structure


def is_none(x: Any) -> bool:
    return x is None


def is_zero_leaf(t: Any) -> bool:
    return (
        t is None
        or isinstance(t, SymbolicZero)
        or getattr(t, "dtype", None) == jax.dtypes.float0
    )


def is_arraylike(x) -> bool:
    """Whether JAX takes `x` for an array: of NumPy's dtypes and Python's integers, not all."""
    # In this order, as eager calls ask it of each argument.
    if isinstance(x, jax.Array):
        return True
    if isinstance(x, _NUMPY):
        return _is_numeric(x.dtype) and not isinstance(x, np.ma.MaskedArray)
    if isinstance(x, int):
        of_integers = jnp.iinfo(jnp.result_type(int))
        return of_integers.min <= x <= of_integers.max
    return isinstance(x, float | complex)


_NUMPY = (np.ndarray, np.generic)


@ft.lru_cache
def _is_numeric(dtype) -> bool:
    return dtype in (jnp.bool_, jax.dtypes.float0) or jnp.issubdtype(dtype, jnp.number)


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def is_dynamic(x: Any) -> bool:
    """JAX arrays, and every number that could be differentiated if it were one."""
    if isinstance(x, jax.Array | float | complex):
        return True
    return isinstance(x, _NUMPY) and jnp.issubdtype(x.dtype, jnp.inexact)


def is_numeric_array(x: Any) -> bool:
    """JAX arrays, and the NumPy arrays that JAX can take. No Python numbers."""
    return isinstance(x, jax.Array) or (isinstance(x, _NUMPY) and is_arraylike(x))


def is_type(x: Any) -> bool:
    """Whether a leaf is the type of an array, as `jax.typeof` returns it."""
    return isinstance(x, AbstractValue)


def as_array_list(xs: Iterable[Any]) -> list[jax.Array]:
    """Arrays. JAX hands constants to rules as the Python or NumPy numbers they once were, and
    these have values that a rule may look at, unless they become literals of a program."""
    return [x if isinstance(x, jax.Array) else _as_array(x) for x in xs]


def _as_array(x: Any) -> jax.Array:
    if not isinstance(x, np.ndarray) and staging_trace() is not None:
        return jnp.asarray(x)
    with outside_of_transformations():
        return jnp.asarray(x)


def zip_trees(fn: Callable[..., Any], trees: Sequence[PyTree]) -> PyTree:
    """Map `fn` over the leaves of trees; in each tree, `None` may replace any branch."""
    present = [t for t in trees if t is not None]
    if not present:
        return None
    # One level at a time, as one tree may have `None` where another has a branch.
    flat = [jax.tree.flatten(t, is_leaf=lambda x, t=t: x is not t) for t in present]
    treedef = flat[0][1]
    if any(other != treedef for _, other in flat):
        raise rule_error(
            "Tangents of different structure were combined.",
            *(f"structure: {show_tree(t)}" for t in present),
            do="Give the tangents of a value the structure of the value, "
            "with `None` for any part that is zero.",
        )
    if is_leaf_structure(treedef):
        return fn(*trees)
    width = len(flat[0][0])
    levels = iter(leaves for leaves, _ in flat)
    rows = [[None] * width if t is None else next(levels) for t in trees]
    columns = zip(*rows, strict=True)
    return jax.tree.unflatten(treedef, [zip_trees(fn, column) for column in columns])


def check_shapes(ts):
    if len({t.shape for t in ts}) > 1:
        raise rule_error(
            "Tangents of different shape were combined.",
            *(type_of(t) for t in ts),
            do="Tangents of one value have its shape. Did a sum drop an axis?",
        )


def promote(ts):
    """The common dtype. Explicit, as strict promotion refuses to find one."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*ts)


def project_leaves(
    ct: PyTree,
    primal: PyTree,
    primal_leaves: Sequence[Any],
    *,
    name: str = "",
    fail: Callable[..., RuleError] | None = None,
) -> list[Array | None]:
    """`project`, flat: one cotangent for each leaf of `primal` (`None` being a leaf).

    `primal_leaves` may hold `jax.ShapeDtypeStruct`s. `name` is what the user calls the
    primal; `fail(where, do)` makes the error.
    """
    fail = _fail_to_project if fail is None else fail
    return fit_leaves(_project_leaf, "cotangent", ct, primal, primal_leaves, name, fail)


def _fail_to_project(*where, do):
    return rule_error("A cotangent does not fit its value.", *where, do=do)


def materialize_leaves(t: PyTree, primal: PyTree, primal_leaves: Sequence[Any]) -> list[Any]:
    """`materialize`, flat, as `project_leaves`."""
    fail = _fail_to_materialize
    return fit_leaves(_materialize_leaf, "tangent", t, primal, primal_leaves, "primal", fail)


def _fail_to_materialize(*where, do):
    do = f"{do} The order of the arguments is `materialize(primal, t)`."
    return rule_error("A tangent does not fit its value.", *where, do=do)


def fit_leaves(
    fit: Callable[[Any, Any], Any],
    kind: str,
    t: PyTree,
    primal: PyTree,
    primal_leaves: Sequence[Any],
    name: str,
    fail: Callable[..., RuleError],
    value: str = "value",
) -> list[Any]:
    """`fit(dx, x)` for each leaf of a (co)tangent and its primal. `kind` and `value` are what
    an error calls the two."""
    out = []
    for i, (dx, x) in enumerate(
        zip(match_leaves(t, primal, name, fail), primal_leaves, strict=True)
    ):
        try:
            out.append(fit(dx, x))
        except DoesNotFit as misfit:
            paths = jax.tree_util.tree_leaves_with_path(primal, is_leaf=is_none)
            where = name + show_path(paths[i][0])
            raise fail(
                f"at {where or 'the only leaf'}: the {value} is {type_of(x)}, "
                f"the {kind} is {type_of(dx)}",
                do=str(misfit),
            ) from None
    return out


def match_leaves(
    t: PyTree, primal: PyTree, name: str, fail: Callable[..., RuleError]
) -> list[Any]:
    """The leaves of a (co)tangent in the order of the leaves of `primal`; `None` is a leaf."""
    leaves, treedef = jax.tree.flatten(t, is_leaf=is_none)
    if treedef == jax.tree.structure(primal, is_leaf=is_none):
        return leaves
    if t is None:
        return [None] * len(jax.tree.leaves(primal, is_leaf=is_none))
    flatten = jax.tree_util.tree_flatten_with_path
    parts, primal_def = flatten(primal, is_leaf=lambda x: x is not primal)
    t_parts, t_def = flatten(t, is_leaf=lambda x: x is not t)
    if primal_def != t_def or is_leaf_structure(primal_def):
        given = "**mapping" if isinstance(t, Mapping) else "field=..."
        raise fail(
            f"at {name or 'the root'}: the value is {show_tree(primal)}",
            f"what was returned for it is {show_tree(t)}",
            do="A tangent or cotangent has the structure of its value, with `None` for any "
            f"part that is zero. `eqx_grads.tangents.of(module, {given})` makes the "
            "tangent of a Module.",
        )
    return [
        leaf
        for (path, part), (_, t_part) in zip(parts, t_parts, strict=True)
        for leaf in match_leaves(t_part, part, name + show_path(path), fail)
    ]


def check_field_names(module: Any, names: Sequence[Any], fields: Iterable[str]) -> None:
    """Raise unless `fields` are among the names of the children of a module."""
    for name in fields:
        if name not in names:
            known = ", ".join(str(name) for name in names if name is not None)
            is_attribute = name in getattr(module, "__dict__", ())
            kind = "a static" if known and is_attribute else "not a"
            raise rule_error(
                f"`tangents.of` was given `{name}`, which is {kind} field of "
                f"`{type(module).__qualname__}`.",
                f"its fields are: {known or 'none'}",
                do="A Module has fields, as does a class that is registered with their names "
                "(`jax.tree_util.register_dataclass` or `register_pytree_with_keys`). A static "
                "field has no derivative: leave it out.",
            )


class DoesNotFit(Exception):
    """Why a tangent or cotangent does not fit its value, and what to do."""


def _project_leaf(ct, primal):
    if not is_differentiable(primal):
        check_none(ct, primal)
        return None
    if is_zero_leaf(ct):
        return None
    ct = _as_inexact(ct)
    ct = _unbroadcast(ct, shape_of(primal))
    dtype = dtype_of(primal)
    if ct.dtype != dtype:
        if jnp.iscomplexobj(ct) and not jnp.issubdtype(dtype, jnp.complexfloating):
            ct = jnp.real(ct)
        ct = ct.astype(dtype)
    return _match_sharding(_match_varying(ct, primal), primal)


def _materialize_leaf(t, primal):
    if not (is_arraylike(primal) and is_differentiable(primal)):
        if primal is not None and is_zero_leaf(primal):
            raise DoesNotFit("A symbolic zero is a tangent, and no value.")
        check_none(t, primal)
        is_array = is_arraylike(primal)
        return np.zeros(shape_of(primal), jax.dtypes.float0) if is_array else None
    if is_zero_leaf(t):
        return jnp.zeros_like(jnp.asarray(primal))
    t = as_tangent(t)
    if t.shape != shape_of(primal):
        raise DoesNotFit("A tangent has the shape of its value.")
    if jnp.iscomplexobj(t) and not jnp.iscomplexobj(primal):
        raise DoesNotFit("The tangent of a real value is real.")
    return t.astype(dtype_of(primal))


def tangent_leaf(t: Any, primal: Any) -> Array | None:
    """The tangent of a leaf, or `DoesNotFit`. Nothing is summed or cast, but for numbers
    without a dtype of their own."""
    if not is_differentiable(primal):
        check_none(t, primal)
        return None
    if is_zero_leaf(t):
        return None
    t = _as_inexact(t)
    shape, dtype = shape_of(primal), dtype_of(primal)
    if t.shape != shape:
        raise DoesNotFit("A tangent has the shape of its value. Did a sum drop an axis?")
    if t.dtype == dtype:
        return t
    if t.weak_type and jnp.can_cast(t.dtype, dtype, casting="same_kind"):
        return t.astype(dtype)
    raise DoesNotFit(f"A tangent has the dtype of its value: add `.astype({dtype})`.")


def is_differentiable(primal: Any) -> bool:
    """Whether a leaf can have a tangent other than zero."""
    dtype = primal.dtype if isinstance(primal, jax.Array) else dtype_of(primal)
    return dtype is not None and _is_inexact(dtype)


@ft.lru_cache
def _is_inexact(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def tangents_match(x: Any, y: Any) -> bool:
    """Whether both leaves have tangents of the same shape, or both have no tangent."""
    if not is_differentiable(x) or not is_differentiable(y):
        return is_differentiable(x) == is_differentiable(y)
    return shape_of(x) == shape_of(y)


def broadcasts_to(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether an array of one shape can be broadcast to the other."""
    if len(shape) > len(to):
        return False
    padded = (1,) * (len(to) - len(shape)) + tuple(shape)
    return all(n in (1, m) for n, m in zip(padded, to, strict=True))


def sum_dtype(dtype: Any) -> Any:
    """The dtype to sum many cotangents in: single precision for half."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def add_terms(sums: Iterable[Any], terms: Iterable[Any]) -> list[Any]:
    """The sums in their dtypes, with one term more each."""
    return [s + term.astype(s.dtype) for s, term in zip(sums, terms, strict=True)]


def _as_inexact(t):
    if not is_arraylike(t):
        raise DoesNotFit("Return an array, or `None` for zero.")
    t = t if isinstance(t, jax.Array) else jnp.asarray(t)
    if not jnp.issubdtype(t.dtype, jnp.inexact):
        raise DoesNotFit("Return an array of floats. Did a cast or a comparison slip in?")
    return t


def shape_of(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def dtype_of_array(x: Any) -> Any:
    """The dtype that JAX gives to an array, or to an object that JAX can convert to one; `None`
    for all else, the type of an array too."""
    if isinstance(x, jax.Array):
        return x.dtype
    return dtype_of(x) if is_arraylike(x) or hasattr(x, "__jax_array__") else None


def holds_numbers(x: Any) -> bool:
    """Whether `x` is a number or an array of numbers. A bool is zero or one."""
    if isinstance(x, jax.Array) or hasattr(x, "__jax_array__"):
        dtype = dtype_of(x)
        return dtype is not None and _is_numeric(dtype)
    return is_arraylike(x)


def as_tangent(t: Any) -> Array:
    """A leaf of a tangent, which is not zero, as an array."""
    do = "Give an array of floats, or `None` for zero."
    return as_numbers(t, "A tangent", do, or_bools=False)


def as_numbers(
    x: Any,
    what: str,
    do: str = "Give a number or an array of numbers.",
    *,
    or_bools: bool = True,
) -> Array:
    is_array = isinstance(x, jax.Array)
    if not is_array and hasattr(x, "__jax_array__"):
        x = jnp.asarray(x)
    if not holds_numbers(x) or (not or_bools and dtype_of(x) == jnp.bool_):
        raise rule_error(f"{what} is not an array of numbers.", f"it is {type_of(x)}", do=do)
    return x if is_array else jnp.asarray(x)


def dtype_of(x: Any) -> Any:
    """The dtype that JAX gives to a leaf, or to its type; `None` for what is not an array."""
    if hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic):
        return x.dtype
    return jnp.asarray(x).dtype if is_arraylike(x) else None


def check_none(ct: Any, primal: Any) -> None:
    """What can't be perturbed has no tangent; integer zeros, as of `jnp.zeros_like`, pass."""
    if is_zero_leaf(ct) or ct is primal:
        return
    if dtype_of(primal) is not None and is_arraylike(ct):
        # A float may be meant as a derivative, which would be dropped.
        if shape_of(ct) == shape_of(primal) and not is_differentiable(ct):
            return
    if dtype_of(primal) is None and not eqx.is_array(ct) and type(ct) is type(primal):
        return
    raise DoesNotFit("This leaf can't be differentiated: return `None` for it.")


def _unbroadcast(ct, shape):
    if ct.shape == shape:
        return ct
    extra = ct.ndim - len(shape)
    padded = (1,) * extra + tuple(shape)
    if extra < 0 or any(p not in (1, c) for p, c in zip(padded, ct.shape, strict=True)):
        raise DoesNotFit(
            "A cotangent has the shape of its value, or one that the value broadcasts to. "
            "Did a sum drop an axis, or is a transpose missing?"
        )
    axes = tuple(i for i, (p, c) in enumerate(zip(padded, ct.shape, strict=True)) if p != c)
    summed = jnp.sum(ct, axes, keepdims=True) if axes else ct
    return jnp.reshape(summed, shape)


def _match_sharding(ct, primal):
    """Over explicit mesh axes, the sharding is part of the type."""
    aval = jax.typeof(primal) if isinstance(primal, jax.Array) else primal
    if not isinstance(aval, ShapedArray) or not aval.sharding.mesh.explicit_axes:
        return ct
    is_same = jax.typeof(ct).sharding == aval.sharding
    return ct if is_same else jax.sharding.reshard(ct, aval.sharding)


def _match_varying(ct, primal):
    """Inside `shard_map`: a replicated value was broadcast over the mesh; sum over it."""
    if jax.sharding.get_abstract_mesh().empty:
        return ct
    over, under = varying_axes(ct), varying_axes(primal)
    if over - under:
        ct = jax.lax.psum(ct, tuple(sorted(over - under)))
    return vary_over(ct, under)
