"""The types that host code returns, as its user promised them."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._errors import first_line, rule_error, show_path, type_of
from .._rules.signature import accepted_keywords
from .._trees import unmirror


def is_array_leaf(x: Any) -> bool:
    """Whether a leaf is an operand: all but Python's integers, strings, functions and the
    like."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)


def without_memory(types: Sequence[Any]) -> list[np.ndarray]:
    """Arrays of the given types, to unflatten a user's class with."""
    return [np.broadcast_to(np.zeros((), t.dtype), t.shape) for t in types]


def type_in_jax(x: Any) -> jax.ShapeDtypeStruct:
    """The type of `x`, in 32 bits unless `jax_enable_x64` is on."""
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(dtype))


def promised_types(spec: Any, code: Any, args: Any, kwargs: Any):
    """The promised types, flat, and their tree.

    - `spec`: a tree of types or arrays, or a function of the arguments that returns one.
    - `args`, `kwargs`: the arguments, with types instead of arrays.
    """
    if callable(spec) and not isinstance(spec, eqx.Module) and not _is_dtype(spec):
        spec = _called(spec, code, args, kwargs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        problem = _problem(leaf)
        if problem is not None:
            raise rule_error(
                f"`out` of `{code.name}` does not say what is returned.",
                f"at out{show_path(path)}: {type_of(leaf)}",
                code.place,
                do=problem,
            )
    leaves, treedef = jax.tree.flatten(spec)
    types = tuple(map(type_in_jax, leaves))
    # `spec` may hold mirrors of arguments, and what the host returns is of the user's classes.
    out = unmirror(jax.tree.unflatten(treedef, without_memory(types)))
    return types, jax.tree.structure(out)


def _called(spec: Callable[..., Any], code: Any, args: Any, kwargs: Any) -> Any:
    # Most types depend on none of the keyword-only arguments.
    kwargs, mismatch = accepted_keywords(spec, args, kwargs)
    if mismatch:
        raise rule_error(
            f"`out` of `{code.name}` has other parameters than the function.",
            f"`out` is called with the same arguments: {mismatch}",
            code.place,
            do="Give it the parameters of the function, with the same default values.",
        )
    try:
        return spec(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        is_traced = isinstance(error, jax.errors.ConcretizationTypeError)
        if not is_traced and "ShapeDtypeStruct" not in str(error):
            raise
        raise rule_error(
            f"`out` of `{code.name}` computes with its arguments.",
            f"{type(error).__name__}: {first_line(error)}",
            code.place,
            do="It gets shapes and dtypes, and no values. Return a "
            "`jax.ShapeDtypeStruct`: of one number, like an element of `x`, "
            f"`jax.ShapeDtypeStruct((), x.dtype)`. {_VALUES_IN_SHAPES}",
        ) from None


def _problem(x: Any) -> str | None:
    """The advice for a leaf that is not the type of an array."""
    dtype = getattr(x, "dtype", None)
    is_number = isinstance(x, float | complex)
    if _is_dtype(x) or not (is_number or (hasattr(x, "shape") and _is_dtype(dtype))):
        return _FORMS
    is_known = lambda n: not isinstance(n, Tracer | jax.ShapeDtypeStruct)
    return None if all(map(is_known, np.shape(x))) else _VALUES_IN_SHAPES


_VALUES_IN_SHAPES = (
    "A size that is the value of an array is not known while JAX traces. It has to be a Python "
    "integer: under `jax.jit`, a static argument (`static_argnums`, or `eqx.filter_jit`). Or "
    "take the size from the shape of an array."
)
_FORMS = (
    "A shape or a dtype alone is not enough, and a Python integer is not an array. Give a "
    "`jax.ShapeDtypeStruct(shape, dtype)`, an array, a float (for one number), or any tree of "
    "these; or a function of the arguments that returns one, as `out=lambda x: x` for the "
    "type of `x`, which has to be a float or an array then."
)


def _is_dtype(x) -> bool:
    """A type of numbers can be called, but does not say what a host function returns."""
    is_scalar = isinstance(x, type) and issubclass(x, int | float | complex | np.generic)
    return is_scalar or isinstance(x, np.dtype) or type(x) is type(jnp.float32)
