"""A line on the terminal that says what a slow diagnosis is doing.

It is shown on a terminal only, and erased at the end: elsewhere a line can't be erased, and
would stay in logs, notebooks and the output of tests.
"""

import contextlib
import contextvars
import sys
from collections.abc import Iterator

import jax

from .._jaxprs.current_trace import setting


_CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("_CALLER", default="")


@contextlib.contextmanager
def diagnosing(caller: str) -> Iterator[None]:
    """Show what `doing` says in this context, in the name of a public function. JAX's own
    checks for NaN are off: they would stop a diagnosis at what it looks for."""
    with setting(_CALLER, caller), jax.debug_nans(False), jax.debug_infs(False):
        try:
            yield
        finally:
            _write("")


def doing(what: str, i: int | None = None, n: int | None = None) -> None:
    """Say what is being done, and which of how many it is, from zero."""
    if _CALLER.get():
        _write(f"{_CALLER.get()}: {what}" + ("" if i is None else f" {i + 1} of {n}"))


def _write(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:96]}")
        sys.stderr.flush()
