"""Call a function such that nothing in it is differentiated, whatever it closes over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .closure_convert import lift_tracers
from .tree_split import as_arrays


# In the name stack of what cuts the derivative: `explain_zero` looks for it.
WITHOUT_TANGENTS = "eqg_without_tangents"


def call_without_tangents(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`fn(*args, **kwargs)` of values that have no tangents."""
    template, tracers = lift_tracers([fn, args, kwargs])
    with jax.named_scope(WITHOUT_TANGENTS):
        tracers = _stop_gradient(tracers)
    (fn, args, kwargs), _ = template.substitute(tracers)
    return _stop_gradient(as_arrays(fn(*args, **kwargs)))


def _stop_gradient(tree):
    # The primal of `jax.grad(f)(3.0)` is a number of Python's.
    stop = lambda x: jnp.asarray(jax.lax.stop_gradient(x)) if isinstance(x, jax.Array) else x
    return jax.tree.map(stop, tree)
