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
    """What is being done, in the name of a public function."""

    def __init__(self, caller: str):
        self.text, self._caller, self._begin = "", caller, time.monotonic()
        self.done = threading.Event()

    def show(self) -> None:
        """Show it until it is done. It runs in a thread, as a compilation may take minutes."""
        wait = _DELAY
        while not self.done.wait(wait):
            seconds = time.monotonic() - self._begin
            _write(f"{self._caller}: {self.text} ({seconds:.0f} s)"[:96])
            wait = _INTERVAL
        if time.monotonic() - self._begin >= _DELAY:
            _write("")


def _write(text: str) -> None:
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()


_LINE: contextvars.ContextVar[_Line | None] = contextvars.ContextVar("_LINE", default=None)


@contextlib.contextmanager
def showing_progress(caller: str) -> Iterator[None]:
    """Show what `doing` says in this context, in the name of a public function."""
    if not sys.stderr.isatty():
        yield
        return
    line = _Line(caller)
    thread, token = threading.Thread(target=line.show, daemon=True), _LINE.set(line)
    thread.start()
    try:
        yield
    finally:
        _LINE.reset(token)
        line.done.set()
        thread.join()


def doing(what: str, i: int | None = None, n: int | None = None) -> None:
    """Say what is being done, and which of how many it is, from zero."""
    line = _LINE.get()
    if line is not None:
        which = "" if i is None else f" {i + 1} of {n}"
        line.text = f"{what}{which}"
