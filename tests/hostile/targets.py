"""The table of public functions and layers: what each argument is in a good call, and what it
may be. Both come from the argument's name, see `parameters.py`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import eqx_grads as eqg
import eqx_grads.solvers
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np

from .calls import CALLED, CALLS, MORE, NOT_CALLED, STACK
from .domains import Domain, flag
from .parameters import DEFAULT, PARAMETERS


class Target(NamedTuple):
    """`fn(**args)` is a good call. `is_eager`: it can't be traced. `called`: another word for
    the arguments, which errors may use."""

    fn: Callable[..., Any]
    args: dict[str, Any]
    domains: dict[str, Domain]
    is_eager: bool
    called: str


def public_functions() -> dict[str, Any]:
    """All that a user may call."""
    spaces = {"": eqg, "testing.": eqgt, "solvers.": eqx_grads.solvers}
    names = ("losses", "nn", "safe", "ste", "surrogates", "tangents")
    spaces |= {f"{name}.": getattr(eqg, name) for name in names}
    return {
        prefix + name: x
        for prefix, space in spaces.items()
        for name, x in inspect.getmembers(space, callable)
        if not name.startswith("_")
        and name != "optional_import"  # which `solvers` calls before it imports the rest
        and x.__module__.startswith(space.__name__ if prefix == "tangents." else "eqx_grads")
    }


def arrays(tree: Any) -> list[Any]:
    """The leaves of a tree that a traced function may return, of JAX or NumPy."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_array(leaf)]


def _is_array(leaf):
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype == bool or jnp.issubdtype(leaf.dtype, np.number)
    return isinstance(leaf, jax.Array)


def call(given: Target, **replaced: Any) -> Any:
    """The call with some arguments replaced."""
    return given.fn(**{**given.args, **replaced})


def _argument(target, parameter):
    """A good value and a domain: of this function's argument, or of all with this name."""
    name = parameter.name
    if parameter.annotation in (bool, "bool"):
        return parameter.default, flag
    of_calls = [f"().{name}"] if target.endswith("()") else []
    for place in (f"{target}.{name}", *of_calls, f"{target.partition('.')[0]}.{name}", name):
        if place in PARAMETERS:
            good, domain = PARAMETERS[place]
            return (parameter.default if good is DEFAULT else good), domain
    raise AssertionError(f"Add the argument `{name}` of `{target}` to `PARAMETERS`.")


def _target(name, fn):
    given = getattr(inspect.unwrap(fn), "keywords", {})  # of a partial function
    parameters = dict(inspect.signature(fn).parameters)
    more = MORE.get(name, STACK if name.startswith("nn.") and "options" in parameters else ())
    keyword = lambda option: inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY)
    parameters = {option: keyword(option) for option in more} | parameters
    found = {
        parameter.name: _argument(name, parameter)
        for parameter in parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in given
    }
    for argument, (good, domain) in found.items():
        assert domain(good), f"{name}: the good `{argument}` is not in its domain"
    is_eager = name.startswith(("explain_", "testing.", "gradient_flow"))
    args, domains = ({n: pair[i] for n, pair in found.items()} for i in (0, 1))
    called = CALLED.get(name, CALLED.get(name.partition(".")[0], ""))
    return Target(fn, args, domains, is_eager, called)


TARGETS = {
    name: _target(name, fn)
    for name, fn in {**public_functions(), **CALLS}.items()
    if name not in NOT_CALLED
}
