"""A line on the terminal that says which check is running, where they take long."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any


_AFTER, _EVERY = 2.0, 0.5  # seconds


class Progress:
    """Inside of the context, `at(name)` says that a check begins.

    The line appears on the standard error stream after two seconds, and is erased at the end.
    It does not appear where that stream is no terminal (a notebook, a file, a log of a server),
    nor in a test of pytest, whose own line it would overwrite.
    """

    def __init__(self, title: str, names: Sequence[str]):
        self._title, self._names, self._now = title, list(names), ""
        self._stream: Any = sys.stderr
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def at(self, name: str) -> None:
        self._now = name

    def __enter__(self) -> "Progress":
        self._start = time.monotonic()
        if self._names and _is_terminal(self._stream):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _show(self) -> None:
        """In a thread, as one check may take long. It only writes."""
        width, wait = 0, _AFTER
        while not self._ended.wait(wait):
            line = self._line()
            self._write(line.ljust(width))
            width, wait = max(width, len(line)), _EVERY
        if width:
            self._write(" " * width)
            self._write("")

    def _line(self) -> str:
        number = self._names.index(self._now) + 1 if self._now in self._names else 1
        seconds = time.monotonic() - self._start
        return f"{self._title}: {self._now} ({number} of {len(self._names)}), {seconds:.0f} s"

    def _write(self, line: str) -> None:
        self._stream.write(f"\r{line}")
        self._stream.flush()


def _is_terminal(stream: Any) -> bool:
    in_pytest = "PYTEST_CURRENT_TEST" in os.environ
    return not in_pytest and bool(getattr(stream, "isatty", bool)())
