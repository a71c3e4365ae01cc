"""Rules that are being asked: on which axes their results depend, or for a transpose.

A rule usually calls its own function for the value, and may apply it to a tangent. If that
call asked the rule as well, there would be no end. Calls of other functions ask theirs: JAX
keeps a program that it has batched or transposed, such as a `jax.jit` inside of the rule, and
uses the program again where nothing is asked.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from .abstract_call import AbstractCall


_asked: contextvars.ContextVar[frozenset[Any]] = contextvars.ContextVar(
    "asked", default=frozenset()
)


AXES, TRANSPOSE = "axes", "transpose"


def is_asked(call: AbstractCall, question: str) -> bool:
    """Whether the rules of `call` are being asked this."""
    return (call.rules_key, question) in _asked.get()


@contextlib.contextmanager
def asking(call: AbstractCall, question: str) -> Iterator[None]:
    """While the rules of `call` are asked this."""
    token = _asked.set(_asked.get() | {(call.rules_key, question)})
    try:
        yield
    finally:
        _asked.reset(token)
