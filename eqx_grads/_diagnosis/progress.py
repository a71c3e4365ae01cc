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


class _Line:
    """What is being done. It is shown by another thread, as a compilation may take minutes."""

    def __init__(self, caller: str):
        self.text = ""
        self._caller, self._begin = caller, time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def _show(self):
        wait = _DELAY
        while not self._done.wait(wait):
            seconds = time.monotonic() - self._begin
            text = f"{self._caller}: {self.text} ({seconds:.0f} s)"
            sys.stderr.write(f"\r\x1b[K{text[:96]}")
            sys.stderr.flush()
            wait = _INTERVAL

    def end(self):
        self._done.set()
        self._thread.join()
        if time.monotonic() - self._begin >= _DELAY:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


_LINE: contextvars.ContextVar[_Line | None] = contextvars.ContextVar("_LINE", default=None)


@contextlib.contextmanager
def showing_progress(caller: str) -> Iterator[None]:
    """Show what `doing` says in this context, in the name of a public function."""
    if not sys.stderr.isatty():
        yield
        return
    line = _Line(caller)
    token = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(token)
        line.end()


def doing(what: str, i: int | None = None, n: int | None = None) -> None:
    """Say what is being done, and which of how many it is, from zero."""
    line = _LINE.get()
    if line is not None:
        which = "" if i is None else f" {i + 1} of {n}"
        line.text = f"{what}{which}"
