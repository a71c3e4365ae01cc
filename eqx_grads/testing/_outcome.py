"""The result of a user's function, or the error that it raises, in a few lines."""

import traceback
from collections.abc import Callable
from typing import Any

from .._diagnosis.source_lines import is_users_file
from .._errors import RuleError


_MOST_LINES = 12
_EQUINOX = "EquinoxRuntimeError: "


def outcome(run: Callable[..., Any], *args: Any) -> Any:
    """What `run(*args)` returns, or the exception that it raises. A rule may raise anything,
    and each caller says what an error means to it."""
    try:
        return run(*args)
    except Exception as error:
        return error


def raised(error: BaseException) -> tuple[str, str]:
    """The type and the first line of an exception; and the whole exception, with the user's
    line."""
    kind, message = _message(error)
    if not isinstance(error, RuleError) and len(message) > _MOST_LINES:
        message = [*message[:_MOST_LINES], "..."]
    # JAX adds a note to each exception that says how to see its own frames.
    notes = [n for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n]
    line = _users_line(error)
    first = f"{kind}: {message[0]}"
    lines = [f"  it raised {first}", *(f"    {text}" for text in (*message[1:], *notes))]
    lines += [f"  raised below {line.filename}:{line.lineno}"] if line else []
    return first, "\n".join(lines)


def _message(error: BaseException) -> tuple[str, list[str]]:
    """The kind of an exception and its message. If a callback raised it, those of the user's
    exception. For an `eqx.error_if`, it is the text that the user wrote: the text around it
    depends on how the program was compiled."""
    lines = str(error).strip().splitlines() or [""]
    kind, own = type(error).__name__, _without_traceback(lines)
    _, of_equinox, text = "\n".join(own).rpartition(_EQUINOX)
    if of_equinox:
        return _EQUINOX.rstrip(": "), text.partition("\n---")[0].rstrip().splitlines()
    if len(own) < len(lines):
        kind, _, own[0] = own[0].partition(": ")
    return kind, own


def _without_traceback(lines: list[str]) -> list[str]:
    """The lines after the traceback that an error of a callback has in its message."""
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return lines
    rest = range(frames[-1] + 1, len(lines))
    return lines[next((i for i in rest if not lines[i].startswith(" ")), frames[-1]) :]


def _users_line(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if is_users_file(f.filename)), None)
