"""Findings: made from a comparison of arrays, from an exception, or from a text."""

import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .._errors import RuleError
from ._compare import Difference, differences, side_by_side, worst_first
from ._likely_cause import Compared, FINITE, Hypothesis, likely_cause, NO_INFLUENCE, PRECISION
from ._report import apart, FAILED, Finding, PASSED, SKIPPED


# Why a check does nothing.
NO_REVERSE = "there is no reverse mode"


def as_seen(cause: str, error: float) -> str:
    """The likely cause that the numbers show, whatever the error."""
    del error
    return cause


def compare(
    check: str,
    where: str,
    expected: Sequence[Any],
    got: Sequence[Any],
    names: Sequence[str],
    tolerance: float,
    wider: Callable[[], float] | None = None,
    *,
    cause: str = "",
    hypotheses: Callable[[], Iterable[Hypothesis]] = tuple,
    primals: Sequence[Any] | None = None,
    reference: str = "",
    diagnose: bool = True,
    along: str = "",
    directions: Sequence[Sequence[str]] = (),
    scale: float | Sequence[float] = 0.0,
    remark: str = "",
    refine: Callable[[str, float], str] = as_seen,
) -> Finding:
    """Compare two lists of arrays, named `names`.

    - `wider`: computes another tolerance, where this one is exceeded.
    - `cause`: a likely cause that is known before the comparison.
    - `hypotheses`: makes arrays that known mistakes would give; called on a failure only.
    - `primals`: the values that the arrays are cotangents of, to describe a pattern by sign.
    - `reference`: what computed `expected`, in words.
    - `diagnose`: whether to look for the likely cause in the numbers.
    - `directions`: for each array, the names of the directions if it is a stack of derivatives
        along them; `along` is what these directions are, "tangent" or "cotangent".
    - `scale`: for each array, what is added to the norm that its error is relative to.
    - `remark`: says of a failure what the tolerance is that of.
    - `refine`: makes the likely cause of the one that the numbers show, if any, and the error.
    """
    found = differences(expected, got, names, scale=scale)
    largest = found[0].error
    if wider is not None and largest > tolerance:
        tolerance = wider()
    if largest <= tolerance:
        return Finding(check, PASSED, largest, tolerance, where)
    worst, *others = worst_first([d for d in found if not d.error <= tolerance])
    number = list(names).index(worst.name)
    primal = None if primals is None else np.asarray(primals[number])
    stack_of = lambda name: directions[list(names).index(name)] if directions else ()
    stack = stack_of(worst.name)
    try:
        mistakes = list(hypotheses())
    except Exception:  # the reference lacks the mode that a hypothesis needs
        mistakes = []
    seen = ""
    if diagnose:
        compared = [Compared(d.expected, d.got, stack_of(d.name)) for d in others]
        seen = likely_cause(
            worst.expected, worst.got, worst.name, mistakes, primal, stack, compared
        )
    if check == "linear":
        # Rounding is not linear, and other patterns say nothing of a map that is not linear.
        cause, seen = ("", seen) if PRECISION in seen or FINITE in seen else (cause, "")
    if check in ("forward", "reverse") and NO_INFLUENCE in seen:
        seen += "; if that is meant, as of a straight-through rule, pass `reference=`"
    error = worst.relative_error
    seen = refine("; ".join(text for text in (cause, seen) if text), error)
    shown, admitted = apart(error, tolerance, "g")
    lines = [
        f"  at {worst.name}: relative error {shown}, admitted {admitted}",
        *([f"  expected: {reference}"] if reference else []),
        *([f"  {remark}"] if remark else []),
        *([f"  likely cause: {seen}"] if seen else []),
        side_by_side(worst, along=along, directions=stack),
    ]
    also = [f"{other.name} ({_how_wrong(other)})" for other in others]
    if also:
        lines.append(f"  also wrong: {', '.join(dict.fromkeys(also[:6]))}")
    where = f"{where}, {worst.name}" if where else worst.name
    return Finding(check, FAILED, error, tolerance, where, "\n".join(lines))


def _how_wrong(difference: Difference) -> str:
    return "missing" if difference.is_missing else f"{difference.relative_error:.2g}"


def failed(check: str, where: str, text: str) -> Finding:
    return Finding(check, FAILED, None, None, where, f"  {text}")


def passed(check: str, where: str = "") -> Finding:
    return Finding(check, PASSED, None, None, where)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, SKIPPED, text=why)


def broke(check: str, where: str, error: BaseException, cause: str = "") -> Finding:
    """A failed finding from an exception: its message, and the innermost line of the user's
    code in its traceback."""
    message = _without_traceback(str(error).strip().splitlines()) or [type(error).__name__]
    kind, message = _of_equinox(message) or (type(error).__name__, message)
    if isinstance(error, RuleError) or len(message) <= 12:
        shown = message
    else:
        shown = [*message[:12], "..."]
    line = _users_line(error)
    place = [f"  raised below {line.filename}:{line.lineno}"] if line else []
    raised = f"{kind}: {shown[0]}"
    # JAX adds a note to each exception that says how to see its own frames.
    notes = [n for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n]
    lines = [
        *([f"  likely cause: {cause}"] if cause else []),
        f"  it raised {raised}",
        *(f"    {line}" for line in (*shown[1:], *notes)),
        *place,
    ]
    return Finding(check, FAILED, None, None, where, "\n".join(lines), raised)


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


_EQUINOX = "EquinoxRuntimeError: "


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


_LIBRARIES = ("jax", "jaxtyping", "beartype", "jaxlib", "equinox", __name__.split(".")[0])
_PACKAGES = ("/site-packages/", "/dist-packages/")
_STANDARD_LIBRARY = tuple(
    os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)


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
