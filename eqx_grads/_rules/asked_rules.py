"""Rules that are being traced to see on which axes their results depend.

A rule usually calls its own function, for the value. If that call asked the rule as well, there
would be no end. Calls of other functions ask theirs: JAX keeps a program that it has batched,
as that of a `jax.jit` inside of the rule, and uses it again where nothing is asked.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from .abstract_call import AbstractCall


_asked: contextvars.ContextVar[frozenset[Any]] = contextvars.ContextVar(
    "asked", default=frozenset()
)


def is_asked(call: AbstractCall) -> bool:
    """Whether the rules of `call` are being asked."""
    return call.rules_key in _asked.get()


@contextlib.contextmanager
def asking(call: AbstractCall) -> Iterator[None]:
    """While the rules of `call` are asked."""
    token = _asked.set(_asked.get() | {call.rules_key})
    try:
        yield
    finally:
        _asked.reset(token)
