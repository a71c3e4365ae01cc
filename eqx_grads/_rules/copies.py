"""Which copy of a decorated Module a rule runs for.

A decorated Module is copied with other arrays by `eqx.tree_at`, an optimizer, `jit` or `vmap`.
All copies share their rules, and a rule calls the Module by the name of the first one, as in
`return f(x), x`. There, `f` means the copy that is differentiated.
"""

import contextlib
import contextvars
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax

from .._errors import name_of, place_of, rule_error
from .._jaxprs.current_trace import setting, staging_trace


class _Running(NamedTuple):
    fn: Any
    staged_by: Any  # the trace that made the rule's operations equations, if any


# By the rules' `cache`, which copies share.
_running: contextvars.ContextVar[Mapping[Any, _Running]] = contextvars.ContextVar(
    "running", default=types.MappingProxyType({})
)


_NOTHING = contextlib.nullcontext()


def has_copies(fn: Callable[..., Any]) -> bool:
    """Whether `fn` may be a copy: of a function there is only one."""
    return type(fn) is not types.FunctionType and isinstance(fn, eqx.Module)


def running_rule(fn: Callable[..., Any], rules: Any) -> contextlib.AbstractContextManager[None]:
    """While a rule of `fn` runs."""
    if not has_copies(fn):
        return _NOTHING
    running = {**_running.get(), rules.cache: _Running(fn, staging_trace())}
    return setting(_running, running)


def copy_in_use(fn: Any, rules: Any) -> Any:
    """The Module `fn`, or its copy whose rule is running."""
    running = _running.get().get(rules.cache)
    if running is None or _have_same_leaves(fn, running.fn):
        return fn
    if staging_trace() is not running.staged_by:
        # JAX keeps programs traced by `jit` or for a loop, and uses them for other copies.
        raise rule_error(
            f"A rule of `{name_of(fn)}` calls `{name_of(fn)}` inside a transformation such as "
            "`jax.jit` or `jax.lax.scan`, and runs for a copy that has other arrays.",
            place_of(fn),
            do="Decorate a function of the Module and its arguments, whose rules are given the "
            "Module.",
        )
    return running.fn


def _have_same_leaves(a, b) -> bool:
    if a is b:
        return True
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    return all(x is y for x, y in pairs)
