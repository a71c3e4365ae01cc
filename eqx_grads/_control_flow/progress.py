"""A line that shows how far a loop has come."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp


def _lines(steps: int) -> int:
    """How often to write. To write may take longer than a step does, so seldom in a short
    loop."""
    return min(max(steps // 100, 10), 200)


class ProgressLine:
    """The number of steps done, the rate and the remaining time, on a line that is
    overwritten."""

    def __init__(self, steps: int, stream: Any):
        self._steps = steps
        self._stream = stream
        self.every = max(1, steps // _lines(steps))
        self._first: tuple[float, int] | None = None
        self._latest = 0

    def report(self, step_index: Any) -> None:
        """Called while tracing, after a chunk of steps with these step indices."""
        first, done = jnp.min(step_index), jnp.max(step_index) + 1
        jax.lax.cond(
            (done // self.every > first // self.every) | (first == 0) | (done == self._steps),
            lambda: jax.debug.callback(self.show, done),
            lambda: None,
        )

    def show(self, done: Any) -> None:
        """Called while running."""
        now, done = time.monotonic(), int(done)
        if self._first is None or done <= self._latest:  # a new run of the same program
            self._first = (now, done)
        self._latest = done
        seconds, steps = now - self._first[0], done - self._first[1]
        text = f"{done}/{self._steps} steps"
        if steps > 0 and seconds > 0:
            rate = steps / seconds
            text += f", {rate:.3g}/s, {_duration((self._steps - done) / rate)} left"
        end = "\n" if done >= self._steps else ""
        # The escape sequence clears what is left of a longer line.
        self._stream.write(f"\r{text}\x1b[K{end}")
        self._stream.flush()


def progress_line(steps: Any) -> ProgressLine | None:
    """`None` if the standard error is not a terminal, or the number of steps is not known."""
    stream = sys.stderr
    if not isinstance(steps, int) or steps == 0 or stream is None or not stream.isatty():
        return None
    return ProgressLine(steps, stream)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
