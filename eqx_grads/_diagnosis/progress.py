"""A line on the terminal that says what a slow diagnosis is doing.

It appears on stderr after two seconds, and is erased at the end. It is shown on a terminal
only: elsewhere a line can't be erased, and would stay in logs, notebooks and the output of
tests.
"""

import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Iterator


# In seconds.
_DELAY = 2.0
_INTERVAL = 0.25


def _write(text: str) -> None:
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()


# The present activity, as the one element of a list.
_TEXT: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("_TEXT", default=None)


@contextlib.contextmanager
def showing_progress(caller: str) -> Iterator[None]:
    """Show what `doing` says in this context, in the name of a public function."""
    if not sys.stderr.isatty():
        yield
        return
    text, done, begin = [""], threading.Event(), time.monotonic()

    def show():
        wait = _DELAY
        while not done.wait(wait):
            seconds = time.monotonic() - begin
            _write(f"{caller}: {text[0]} ({seconds:.0f} s)"[:96])
            wait = _INTERVAL
        if time.monotonic() - begin >= _DELAY:
            _write("")

    # In a thread, as a compilation may take minutes.
    thread, token = threading.Thread(target=show, daemon=True), _TEXT.set(text)
    thread.start()
    try:
        yield
    finally:
        _TEXT.reset(token)
        done.set()
        thread.join()


def doing(what: str, i: int | None = None, n: int | None = None) -> None:
    """Say what is being done, and which of how many it is, from zero."""
    text = _TEXT.get()
    if text is not None:
        text[0] = what if i is None else f"{what} {i + 1} of {n}"
