"""The line of the user's code that an equation of a program comes from."""

import ast
import dataclasses
import linecache
import os
import sysconfig
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jaxlib
import jaxtyping
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import Call, CallWithRule, structure
from .._jaxprs.versions import function_name, traceback_of


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
        """Where the operation is in `code`; 0 if that is not known."""
        if self.span is None or self.span[0] != self.line:
            return 0
        line = linecache.getline(self.file, self.line)
        indent = len(line) - len(line.lstrip())
        return max(0, _column_of_operation(self.file, *self.span) - indent)

    def fields(self) -> dict[str, Any]:
        """The fields of a record that say where."""
        return {
            "file": self.file,
            "line": self.line,
            "code": self.code,
            "column": self.column,
            "library": self.library,
        }

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
_HIDDEN = (
    *(_folder(package.__file__) for package in (jax, jaxlib, eqx, jaxtyping)),
    _PACKAGE,
)
_SAFE = os.path.join(_PACKAGE, "safe", "")
_LAYERS = (
    os.path.join(_folder(eqx.__file__), "nn", ""),
    os.path.join(_folder(eqx.__file__), "internal", "_loop", ""),
    os.path.join(_JAX, "_src", "scipy", "stats", ""),
)
_INSTALLED = tuple(
    {
        os.path.abspath(sysconfig.get_path(name)) + os.sep
        for name in ("purelib", "platlib", "stdlib", "platstdlib")
    }
)


def source_line(eqn: Any) -> SourceLine:
    """Where an equation comes from: the innermost frame of the user's code.

    If no frame is the user's, it is the innermost one of another library.
    """
    traceback = traceback_of(eqn)
    every = traceback.frames if traceback else []
    frames = [f for f in every if not _is_hidden(f)]
    users = [f for f in frames if not f.file_name.startswith(_INSTALLED)]
    first_of_user = frames.index(users[0]) if users else len(frames)
    inside = next((f for f in frames[:first_of_user] if _package_path(f.file_name)), None)
    frame = users[0] if users else inside
    if frame is None:
        return UNKNOWN
    library = f"{_package_path(inside.file_name)}:{inside.line_num}" if inside else ""
    line = _line_at(traceback, every.index(frame), library)
    return dataclasses.replace(line, callers=_calls(users[1:]))


def is_traced_here(eqn: Any, program: ClosedJaxpr) -> bool:
    """False if the traceback of an equation in a program is that of another equation.

    JAX traces its own jitted functions (`jnp.where`) once. If the first call is in a backward
    pass, the equations get the traceback of what was transposed then, for good. The function
    itself is missing in such a traceback (JAX 0.10 to 0.12).
    """
    file, name = function_file(program), function_name(program)
    if not file.startswith(_JAX):
        return True
    traceback = traceback_of(eqn)
    return any(
        f.file_name == file and f.function_name.endswith(name)
        for f in (traceback.frames if traceback else ())
    )


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
    traceback = traceback_of(eqn)
    if eqn.primitive.name != "stop_gradient" or traceback is None:
        return False
    frames = iter(traceback.frames)
    callers = (next(frames, None) for f in frames if f.function_name == "stop_gradient")
    caller = next(callers, None)
    return caller is not None and not caller.file_name.startswith(_JAX)


def rule_line(eqn: Any) -> SourceLine:
    """The line of the rule that made an equation of a derivative, if that was a rule of the
    user's: the innermost frame of the user's code below this package's."""
    traceback = eqn.source_info.traceback
    users = []
    for i, f in enumerate(traceback.frames if traceback else ()):
        if f.file_name.startswith(_folder(__file__)):
            break
        if not _is_hidden(f) and not f.file_name.startswith(_INSTALLED):
            users.append(i)
    if not users:
        return UNKNOWN
    callers = (traceback.frames[i] for i in users[1:])
    return dataclasses.replace(_line_at(traceback, users[0]), callers=_calls(callers))


def layer_line(eqn: Any) -> str:
    """The place in a layer or a loop of Equinox, or in a distribution of JAX, that the user's
    line calls, such as `equinox/nn/_linear.py:89`, or empty. `source_line` hides these."""
    traceback = traceback_of(eqn)
    for f in traceback.frames if traceback else ():
        if f.file_name.startswith(_LAYERS):
            return f"{_package_path(f.file_name)}:{f.line_num}"
        if not _is_hidden(f):
            break
    return ""


def called_functions(eqn: Any) -> list[str]:
    """The functions of JAX around an equation, up to the user's line, innermost first."""
    names = []
    for f in traceback_of(eqn).frames if traceback_of(eqn) else ():
        if not f.file_name.startswith(_JAX):
            break
        names.append(f.function_name)
    return names


def safe_function(eqns: Iterable[Any]) -> str:
    """The function of `eqx_grads.safe` that makes an equation, such as `safe.norm`: the first
    one that the user calls, or an empty string.

    - `eqns`: the equation and those that it is in, innermost first. JAX cuts tracebacks at a
        `jit`.
    """
    name = ""
    for eqn in eqns:
        traceback = traceback_of(eqn)
        for f in traceback.frames if traceback else ():  # innermost first
            if f.file_name.startswith(_SAFE) and not f.function_name.startswith(("_", "<")):
                name = f.function_name
            elif not _is_hidden(f):
                return name and f"safe.{name}"
    return name and f"safe.{name}"


def _calls(frames: Iterable[Any]) -> tuple[tuple[str, int, str], ...]:
    return tuple((f.file_name, f.line_num, f.function_name) for f in frames)


def _line_at(traceback: Any, i: int, library: str = "") -> SourceLine:
    frame = traceback.frames[i]
    # A frame has no columns.
    codes, instructions = traceback.raw_frames()
    span = traceback.code_addr2location(codes[i], instructions[i])
    return SourceLine(frame.file_name, frame.line_num, frame.function_name, library, span)


def _column_of_operation(file: str, first: int, start: int, last: int, end: int) -> int:
    """The column at which the name or the operator of an expression begins."""
    lines = [linecache.getline(file, i) for i in range(first, last + 1)]
    # Python counts bytes in UTF-8.
    before = lines[0].encode()[:start].decode(errors="replace")
    text = "".join([*lines[:-1], lines[-1].encode()[:end].decode(errors="replace")])
    text = text[len(before) :]
    try:
        node = ast.parse(f"({text})", mode="eval").body
    except SyntaxError:  # it is a statement
        return len(before)
    match node:
        case ast.BinOp(left=operand) | ast.Compare(left=operand):
            after = operand
        case ast.Call(func=ast.Attribute(value=value)) if not _is_name(value):
            after = value
        case ast.Subscript(value=value):
            after = value
        case _:
            return len(before)
    if after.end_lineno != 1:
        return len(before)
    # One byte is the parenthesis.
    return len(before) + len(f"({text}".encode()[: after.end_col_offset].decode()) - 1


def _is_hidden(frame) -> bool:
    name = frame.file_name
    return name.startswith(_HIDDEN) or name.startswith("<frozen")


def is_users_file(file: str) -> bool:
    """Whether a file is the user's, and not of Python or an installed package."""
    return not file.startswith((*_HIDDEN, *_INSTALLED, "<frozen"))


def _package_path(file: str) -> str:
    """The path of a file inside the folder of installed packages, or empty."""
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in file:
            return file.rpartition(marker)[2]
    return ""


def _is_name(node: ast.expr) -> bool:
    """Such as `jnp` and `jax.numpy`."""
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and _is_name(node.value)
    )
