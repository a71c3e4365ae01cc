"""The table of public functions: a call with good arguments, and what each may be."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .domains import Domain


class Target(NamedTuple):
    """`fn(**args)` is a good call. `is_eager`: it can't be traced. `hides_nan`: the arguments
    whose NaNs need not be NaNs in the result. `called`: another word for the arguments, which
    errors may use."""

    fn: Callable[..., Any]
    args: dict[str, Any]
    domains: dict[str, Domain]
    is_eager: bool = False
    hides_nan: tuple[str, ...] = ()
    called: str = ""


def arrays(tree: Any) -> list[Any]:
    """The leaves of a tree that a traced function may return, of JAX or NumPy."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_array(leaf)]


def _is_array(leaf):
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype == bool or jnp.issubdtype(leaf.dtype, np.number)
    return isinstance(leaf, jax.Array)


TARGETS: dict[str, Target] = {}
# Public, but not called by users: records and reports, which the library makes, and methods of
# solvers that Optimistix calls.
NOT_CALLED: set[str] = set()


def target(
    name: str,
    fn: Callable[..., Any],
    /,
    *,
    is_eager: bool = False,
    hides_nan: tuple[str, ...] = (),
    called: str = "",
    **args: tuple[Any, Domain],
) -> None:
    """Add a call to the table. Each argument is `(a good value, what it may be)`."""
    assert name not in TARGETS, name
    values = {argument: value for argument, (value, _) in args.items()}
    domains = {argument: domain for argument, (_, domain) in args.items()}
    for argument, value in values.items():
        assert domains[argument](value), f"{name}: the good `{argument}` is not in its domain"
    TARGETS[name] = Target(fn, values, domains, is_eager, hides_nan, called)


def call(given: Target, **replaced: Any) -> Any:
    """The call with some arguments replaced. Positional-only arguments come first."""
    args = {**given.args, **replaced}
    try:
        parameters = inspect.signature(given.fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    first = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    return given.fn(*(args.pop(name) for name in first), **args)
