"""The result of a user's function, or the error that it raises, in a few lines."""

import re
import traceback
from collections.abc import Callable
from typing import Any

from .._diagnosis.source_lines import is_users_file
from .._errors import RuleError


_MOST_LINES = 12
_EQUINOX = "EquinoxRuntimeError"


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
    kind, text = type(error).__name__, str(error).strip()
    _, of_equinox, own = text.rpartition(f"{_EQUINOX}: ")
    after_traceback = re.split(r"^  File .*\n(?: .*\n)*", text, flags=re.MULTILINE)
    if of_equinox:
        kind, text = _EQUINOX, own.partition("\n---")[0].rstrip()
    elif after_traceback[1:]:
        kind, _, text = after_traceback[-1].partition(": ")
    return kind, text.splitlines() or [""]


def _users_line(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if is_users_file(f.filename)), None)
