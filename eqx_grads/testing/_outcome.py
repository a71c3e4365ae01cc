"""What a function of the user's returns, or the error that it raises, in a few lines."""

import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

from .._errors import RuleError


_MOST_LINES = 12
_EQUINOX = "EquinoxRuntimeError: "
_LIBRARIES = ("jax", "jaxtyping", "beartype", "jaxlib", "equinox", __name__.split(".")[0])
_PACKAGES = ("/site-packages/", "/dist-packages/")
_STANDARD_LIBRARY = tuple(
    os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)


def outcome(run: Callable[..., Any], *args: Any) -> Any:
    """What `run(*args)` returns, or the exception that it raises. A rule may raise anything,
    and each caller says what an error means to it."""
    try:
        return run(*args)
    except Exception as error:
        return error


def raised(error: BaseException) -> tuple[str, str]:
    """The type and the first line of an exception; and all of it, with the user's line."""
    message = _without_traceback(str(error).strip().splitlines()) or [type(error).__name__]
    kind, message = _of_equinox(message) or (type(error).__name__, message)
    if not isinstance(error, RuleError) and len(message) > _MOST_LINES:
        message = [*message[:_MOST_LINES], "..."]
    line = _users_line(error)
    first = f"{kind}: {message[0]}"
    # JAX adds a note to each exception that says how to see its own frames.
    notes = [n for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n]
    lines = [
        f"  it raised {first}",
        *(f"    {text}" for text in (*message[1:], *notes)),
        *([f"  raised below {line.filename}:{line.lineno}"] if line else []),
    ]
    return first, "\n".join(lines)


def in_one_line(error: BaseException) -> str:
    """The type and the first line of an exception; of one that was raised in a callback, that
    of the user's code."""
    lines = str(error).strip().splitlines()
    last = _without_traceback(lines)
    kind = [type(error).__name__] if len(last) == len(lines) else []
    return ": ".join([*kind, *last[:1]])


def _of_equinox(message: list[str]) -> tuple[str, list[str]] | None:
    """The error of an `eqx.error_if` in a message: its kind, and what the user wrote there.
    What is around it depends on how the program was compiled."""
    numbers = [i for i, line in enumerate(message) if _EQUINOX in line]
    if not numbers:
        return None
    _, _, first = message[numbers[-1]].partition(_EQUINOX)
    rest = itertools.takewhile(lambda x: not x.startswith("---"), message[numbers[-1] + 1 :])
    return _EQUINOX.rstrip(": "), "\n".join([first, *rest]).rstrip().splitlines()


def _without_traceback(lines: list[str]) -> list[str]:
    """What comes after the traceback that an error of a callback has in its message."""
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return lines
    rest = range(frames[-1] + 1, len(lines))
    return lines[next((i for i in rest if not lines[i].startswith(" ")), frames[-1]) :]


def _users_line(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code; of an installed package, if that is the only
    other code; `None` if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if not _is_of_library(f.filename)]
    users = [f for f in frames if not _is_installed(f.filename)] or frames
    return users[-1] if users else None


def _is_of_library(filename: str) -> bool:
    """Whether a file is of Python, of JAX, of this library or the like."""
    is_pythons = filename.startswith((*_STANDARD_LIBRARY, "<frozen"))
    if is_pythons and not _is_installed(filename):
        return True
    # Where they were imported from: a folder of the user's may have the same name.
    loaded = (sys.modules.get(name) for name in _LIBRARIES)
    folders = (os.path.dirname(m.__file__) for m in loaded if m is not None and m.__file__)
    return filename.startswith(tuple(folder + os.sep for folder in folders))


def _is_installed(filename: str) -> bool:
    return any(part in filename.replace("\\", "/") for part in _PACKAGES)
