"""The line of the user's code that an equation of a program comes from."""

import dataclasses
import itertools
import linecache
import os
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jaxlib
import jaxtyping
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import Call, CallWithRule, structure
from .._jaxprs.versions import function_name


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """`file` and `line` are the user's. `library` is the place in an installed package that the
    user's line called, such as `optax/losses/_regression.py:43`, or empty. `span` is where the
    expression is: its first line and column, and the last ones. Columns are in bytes. `callers`
    are file, line and function of the user's calls around it, innermost first."""

    file: str
    line: int
    function: str
    library: str = ""
    span: tuple[int, int, int, int] | None = dataclasses.field(default=None, compare=False)
    callers: tuple[tuple[str, int, str], ...] = dataclasses.field(default=(), compare=False)

    @property
    def code(self) -> str:
        """The text of the line; empty if the file can't be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def column(self) -> int:
        """Where the expression begins in `code`; 0 if that is not known."""
        if self.span is None or self.span[0] != self.line:
            return 0
        line = linecache.getline(self.file, self.line)
        before = line.encode()[: self.span[1]].decode(errors="replace")
        return max(0, len(before) - (len(line) - len(line.lstrip())))

    def fields(self) -> dict[str, Any]:
        """The fields of a record that say where."""
        names = ["file", "line", "code", "column", "library"]
        return {name: getattr(self, name) for name in names}

    @property
    def calls(self) -> tuple[tuple[str, int, str], ...]:
        """The line itself, and `callers`."""
        return (self.file, self.line, self.function), *self.callers

    @property
    def is_users(self) -> bool:
        """False if no line of the user's code is known."""
        return bool(self.file) and self.library != f"{_package_path(self.file)}:{self.line}"

    def __str__(self):
        if not self.file:
            return "unknown"
        return f"{os.path.basename(self.file)}:{self.line}"


UNKNOWN = SourceLine("", 0, "")

_folder = lambda file: os.path.dirname(os.path.abspath(file)) + os.sep
_JAX = _folder(jax.__file__)
# Frames of these packages tell the user nothing.
_PACKAGE = os.path.dirname(_folder(__file__).rstrip(os.sep)) + os.sep
_HIDDEN = (*(_folder(x.__file__) for x in (jax, jaxlib, eqx, jaxtyping)), _PACKAGE)
_SAFE = os.path.join(_PACKAGE, "safe", "")
_PATHS = map(sysconfig.get_path, ("purelib", "platlib", "stdlib", "platstdlib"))
_INSTALLED = tuple({os.path.abspath(path) + os.sep for path in _PATHS})


def _frames(eqn: Any) -> list[Any]:
    """Innermost first."""
    traceback = eqn.source_info.traceback
    return list(traceback.frames) if traceback else []


def source_line(eqn: Any) -> SourceLine:
    """Where an equation comes from: the innermost frame of the user's code.

    If no frame is the user's, it is the outermost one of another library.
    """
    frames = _frames(eqn)
    users = [i for i, f in enumerate(frames) if is_users_file(f.file_name)]
    n = users[0] if users else len(frames)
    is_library = lambda f: _package_path(f.file_name) and not _is_hidden(f)
    inside = [i for i in range(n) if is_library(frames[i])]
    if not users and not inside:
        return UNKNOWN
    outer = frames[inside[-1]] if inside else None
    library = f"{_package_path(outer.file_name)}:{outer.line_num}" if outer else ""
    return _line_at(eqn.source_info.traceback, users or inside[-1:], library)


def is_traced_here(eqn: Any, program: ClosedJaxpr) -> bool:
    """False if an equation in a program has the traceback of another equation.

    JAX traces its own jitted functions (`jnp.where`) once. If the first call is in a backward
    pass, the equations get the traceback of what was transposed then, for good. The function
    itself is missing in such a traceback (JAX 0.10 to 0.12).
    """
    file, name = function_file(program), function_name(program)
    if not file.startswith(_JAX):
        return True
    # It may have a function inside, whose frames JAX cuts there.
    is_inside = lambda f: f.file_name == file and f".{name}." in f".{f.function_name}."
    return any(map(is_inside, _frames(eqn)))


def function_file(program: ClosedJaxpr) -> str:
    """The file of the function that a program was traced from, or empty."""
    return program.jaxpr.debug_info.func_filename or ""


def is_of_jax(eqn: Any) -> bool:
    """Whether an equation is a call of a function that JAX defines, jitted or with a rule."""
    known = structure(eqn)
    is_call = isinstance(known, Call | CallWithRule)
    return is_call and function_file(*known.programs).startswith(_JAX)


def is_stop_gradient(eqn: Any) -> bool:
    """Whether an equation is a `stop_gradient` that code other than JAX's asks for: JAX's
    `softmax` has one, which does not change its derivative."""
    frames = iter(_frames(eqn) if eqn.primitive.name == "stop_gradient" else ())
    callers = (next(frames, None) for f in frames if f.function_name == "stop_gradient")
    caller = next(callers, None)
    return caller is not None and not caller.file_name.startswith(_JAX)


def rule_line(eqn: Any) -> SourceLine:
    """The line of the rule that made an equation of a derivative, if that was a rule of the
    user's: the innermost frame of the user's code below this package's."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    is_below = lambda f: not f.file_name.startswith(_folder(__file__))
    below = enumerate(itertools.takewhile(is_below, frames))
    users = [i for i, f in below if is_users_file(f.file_name)]
    return _line_at(traceback, users) if users else UNKNOWN


def called_functions(eqn: Any) -> list[str]:
    """The functions of JAX around an equation, up to the user's line, innermost first."""
    of_jax = itertools.takewhile(lambda f: f.file_name.startswith(_JAX), _frames(eqn))
    return [f.function_name for f in of_jax]


def safe_function(eqns: Iterable[Any]) -> str:
    """The function of `eqx_grads.safe` that makes an equation, such as `safe.norm`: the first
    one that the user calls, or an empty string.

    - `eqns`: the equation and the equations around it, innermost first. JAX cuts tracebacks at
        a `jit`.
    """
    name = ""
    for eqn in eqns:
        for f in _frames(eqn):
            if f.file_name.startswith(_SAFE):
                is_public = not f.function_name.startswith("_") and "<" not in f.function_name
                name = f.function_name if is_public else name
            elif not _is_hidden(f):
                return name and f"safe.{name}"
    return name and f"safe.{name}"


def with_safe(name: str, program: ClosedJaxpr) -> str:
    """The name of a function; with "safe." if it is one of `eqx_grads.safe`, whose rule has no
    frame there."""
    from .. import safe  # not at the top: it makes thirty rules

    is_safe = function_file(program).startswith(_SAFE)
    return f"safe.{name if hasattr(safe, name) else '*'}" if is_safe else name


def _line_at(traceback: Any, indices: Sequence[int], library: str = "") -> SourceLine:
    """The line of the first frame; the others are its callers."""
    frames = [traceback.frames[i] for i in indices]
    calls = tuple((f.file_name, f.line_num, f.function_name) for f in frames)
    # A frame has no columns.
    codes, instructions = traceback.raw_frames()
    span = traceback.code_addr2location(codes[indices[0]], instructions[indices[0]])
    return SourceLine(*calls[0], library, span, calls[1:])


def _is_hidden(frame) -> bool:
    return frame.file_name.startswith((*_HIDDEN, "<frozen"))


def is_users_file(file: str) -> bool:
    """Whether a file is the user's, and not of Python or an installed package."""
    return not file.startswith((*_HIDDEN, *_INSTALLED, "<frozen"))


def _package_path(file: str) -> str:
    """The path of a file inside the folder of installed packages, or empty."""
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in file:
            return file.rpartition(marker)[2]
    return ""
