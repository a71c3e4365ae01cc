"""Mutants of a source file: the file with one expression or statement changed.

A mutant is a fault that somebody could have made. It has another sign, branch or mask, an index
that is off by one, or two swapped elements of a tuple. Or it lacks a term, a factor, a
statement, a sum, a cast, a check, a conjugate, a `stop_gradient` or a part of the key of a
cache. Or it has a tolerance ten times as large or as small. A suite that passes on a mutant
does not test what was changed (`mutants.py` counts those). Texts of errors, docstrings and
annotations stay.
"""

import ast
import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple


# Texts and pictures, what is for other versions of JAX, and which of two ways is faster.
_NOT_MUTATED = re.compile(r"/(__init__|plot|progress|show_bytes|versions|replay_cost)\.py$")
_TEXTS = re.compile(r"__repr__|__str__|message|_text|describe|phrase|warn")
_CACHE = re.compile(
    r"cache|digest|__eq__|__hash__|self\._(known|results)|^key|return key|(\.|def )_?key\(",
    re.IGNORECASE,
)
_MASK = re.compile(r"perturbed|mask|valid|kept|live|zero|moved|finite")
_CHECK = re.compile(r"^_?(check|require|refuse|reject|validate)")


class Mutant(NamedTuple):
    path: str  # relative to the root of the repository
    kind: str
    line: int
    key: str  # of the statement, as `reached.py` has them
    start: int  # in bytes, as is `end`
    end: int
    before: str
    after: str
    name: str  # the same while the function and what is changed in it stay the same

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def statement_key(path: str, scope: list[str], line: str) -> str:
    """The same while the function and the first line of the statement stay the same."""
    return f"{path}::{'.'.join(scope)}: {line.strip()}"


def room_of(path: str) -> str:
    """A package of `eqx_grads`, or of `eqx_grads.nn`."""
    parts = path.removeprefix("eqx_grads/").split("/")
    if len(parts) == 1:
        return "tangents" if "tangent" in path else path
    return "/".join(parts[: 1 + (parts[0] == "nn" and len(parts) > 2)])


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file. Some may not compile."""
    if _NOT_MUTATED.search(path):
        return []
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return list(finder.found.values())


def sample(sources: dict[str, bytes], number: int, seed: int, least: int = 10) -> list[Mutant]:
    """About `number` mutants: `least` of each room, and the others in proportion to the square
    root of how many the room has. The choice from a room depends on its code and its share."""
    rooms: dict[str, list[Mutant]] = {}
    for path, source in sorted(sources.items()):
        if found := mutants_of(path, source):
            rooms.setdefault(room_of(path), []).extend(found)
    others = number - least * len(rooms)
    unit = others / sum(math.sqrt(len(pool)) for pool in rooms.values())
    shares = {room: least + round(unit * math.sqrt(len(pool))) for room, pool in rooms.items()}
    return [
        m for room in sorted(rooms) for m in _of_room(room, rooms[room], shares[room], seed)
    ]


def _of_room(room: str, pool: list[Mutant], share: int, seed: int) -> list[Mutant]:
    """The kinds alternate, and each mutant is from the file that has the fewest so far. No two
    mutants change the same statement."""
    rank = lambda text: zlib.crc32(f"{seed} {text}".encode())
    chosen: list[Mutant] = []
    n_of: Counter[str] = Counter()
    kinds = sorted({m.kind for m in pool}, key=lambda kind: rank(f"{room} {kind}"))
    for kind in itertools.cycle(kinds):
        if len(chosen) == share or not pool:
            break
        if of_kind := [m for m in pool if m.kind == kind]:
            mutant = min(of_kind, key=lambda m: (n_of[m.path], rank(m.name)))
            pool = [m for m in pool if m.key != mutant.key]
            n_of[mutant.path] += 1
            chosen.append(mutant)
    return chosen


class _Finder(ast.NodeVisitor):
    """Visits the code of a file and notes what could be changed in it."""

    def __init__(self, path: str, source: bytes):
        self.path = path
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.starts = list(itertools.accumulate(map(len, self.lines), initial=0))
        self.scope: list[str] = []
        self.statement = 1
        self.found: dict[str, Mutant] = {}

    def visit(self, node: ast.AST) -> None:
        skipped = ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr
        if isinstance(node, skipped) or re.search("error|warn|isinstance", _callee(node), re.I):
            return
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        line = self.lines[self.statement - 1].decode()
        for kind, changed, after in _changes(node, ".".join(self.scope[-1:]) + line):
            # At import, a fault would stop everything.
            if self.scope or kind == "tolerance":
                self._note(kind, changed, after, line)
        super().visit(node)

    def _note(self, kind: str, node: Any, after: str, line: str) -> None:
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        before = self.source[start:end].decode()
        within = ".".join(self.scope)
        # Where a function has the same expression twice, the first of the two is changed.
        name = f"{self.path}::{within}: {' '.join(before.split())} -> {after}"
        key = statement_key(self.path, self.scope, line)
        fields = (self.path, kind, self.statement, key, start, end, before, after, name)
        self.found.setdefault(name, Mutant(*fields))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not _TEXTS.search(node.name):
            self._inside(node, [*node.args.defaults, *node.args.kw_defaults, *node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, node.body)

    def _inside(self, node: Any, parts: list[Any]) -> None:
        self.scope.append(node.name)
        for part in filter(None, parts):
            self.visit(part)
        self.scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)


# ---------------------------------------------------------------- what is changed

_COMPARISONS = "Lt <=,LtE <,Gt >=,GtE >,Eq !=,NotEq ==,Is is not,IsNot is,In not in,NotIn in"
_OTHER_COMPARISON = dict(pair.split(" ", 1) for pair in _COMPARISONS.split(","))
_OTHER_FUNCTION = {"sum": "max", "any": "all", "all": "any", "maximum": "minimum"}
# Functions that are dropped: their first argument, or the object of the method, remains.
_DROPPED = {
    **dict.fromkeys(("psum", "pmean", "psum_gradient"), "sum"),
    **dict.fromkeys(("conj", "conjugate", "real", "stop_gradient"), "conjugate"),
    **dict.fromkeys(("astype", "convert_element_type"), "cast"),
}
_ORDER = ast.Lt | ast.LtE | ast.Gt | ast.GtE
_SEQUENCE = ast.List | ast.Tuple | ast.Dict | ast.ListComp
_Changes = Iterator[tuple[str, ast.AST, str]]


def _callee(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name
        case _:
            return ""


def _is_text(node: ast.AST) -> bool:
    is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_string or isinstance(node, ast.JoinedStr)


def _changes(node: ast.AST, place: str) -> _Changes:
    """The kind, what is changed, and by what. `place` has the function's name and the line."""
    text = ast.unparse
    is_cache = _CACHE.search(place) is not None
    branch = lambda test: (
        "cache" if is_cache else "mask" if _MASK.search(text(test)) else "branch"
    )
    match node:
        case ast.UnaryOp(ast.USub(), value) if not isinstance(value, ast.Constant):
            yield "sign", node, f"({text(value)})"
        case ast.UnaryOp(ast.Invert(), value):
            yield "mask", node, f"({text(value)})"
        case ast.UnaryOp(ast.Not(), value):
            yield branch(value), node, f"bool({text(value)})"
        case ast.BinOp() if not _is_text(node.left) and not _is_text(node.right):
            yield from _other_operation(node)
        case ast.AugAssign(target, op, value) if not _is_text(value):
            yield "term", node, "pass"
            if isinstance(op, ast.Add) and not isinstance(value, _SEQUENCE):
                yield "sign", node, f"{text(target)} -= {text(value)}"
        case ast.Compare(left, [op], [right]):
            kind = "off by one" if isinstance(op, _ORDER) else branch(node)
            other = _OTHER_COMPARISON[type(op).__name__]
            yield kind, node, f"(({text(left)}) {other} ({text(right)}))"
        case ast.BoolOp(op, values):
            symbol, other = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            parts = [f"({text(value)})" for value in values]
            yield branch(node), node, f"({f' {other} '.join(parts)})"
            for i in range(len(parts)):
                rest = f" {symbol} ".join(parts[:i] + parts[i + 1 :])
                yield branch(node), node, f"({rest})"
        case ast.If(test, [*_, ast.Raise()], []):
            yield "check", test, f"False and ({text(test)})"
        case ast.If(test) if not isinstance(test, ast.Compare | ast.BoolOp):
            yield branch(test), test, f"not ({text(test)})"
        case ast.IfExp(test, taken, other):
            yield branch(test), node, f"(({text(other)}) if {text(test)} else ({text(taken)}))"
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield branch(test), test, f"(not ({text(test)}))"
        case ast.Expr(ast.Call() as call):
            kind = "check" if _CHECK.search(_callee(call)) else "cache" if is_cache else "term"
            yield kind, node, "pass"
        case ast.Return(ast.Tuple() as pair) | ast.Lambda(body=ast.Tuple() as pair):
            yield from _swapped(pair)
        case ast.Assign([target], value):
            for pair in (target, value):
                if isinstance(pair, ast.Tuple):
                    yield from _swapped(pair)
        case ast.Call():
            yield from _other_call(node, branch)
        case ast.Subscript(slice=part):
            for index in part.elts if isinstance(part, ast.Tuple) else [part]:
                yield from _other_index(index)
        case ast.Constant(float() as number) if 0 < abs(number) < 0.1 or abs(number) > 99:
            yield "tolerance", node, repr(number * 10)
            yield "tolerance", node, repr(number / 10)
        case ast.Attribute(value, "eps" | "tiny"):
            yield "tolerance", node, f"({text(node)} * 10)"
            yield "tolerance", node, f"({text(node)} * 0.1)"
        case ast.Tuple(elements, ast.Load()) if is_cache and len(elements) > 1:
            for i in range(len(elements)):
                rest = "".join(f"{text(x)}, " for x in elements[:i] + elements[i + 1 :])
                yield "cache", node, f"({rest})"
        case _:
            pass


def _other_operation(node: ast.BinOp) -> _Changes:
    left, right = f"({ast.unparse(node.left)})", f"({ast.unparse(node.right)})"
    is_one = isinstance(node.right, ast.Constant) and node.right.value == 1
    term = "off by one" if is_one else "term"
    match node.op:
        case ast.Add() | ast.Sub():
            is_sum = isinstance(node.op, ast.Add)
            if not isinstance(node.left, _SEQUENCE) and not isinstance(node.right, _SEQUENCE):
                yield "sign", node, f"({left} {'-' if is_sum else '+'} {right})"
            yield term, node, left
            if is_sum and not is_one:
                yield term, node, right
        case ast.Mult():
            yield "term", node, left
            yield "term", node, right
        case ast.Div():
            yield "term", node, left
        case ast.FloorDiv():
            yield "off by one", node, f"({left} // {right} + 1)"
        case ast.Mod():
            yield "off by one", node, f"(({left} + 1) % {right})"
        case ast.BitAnd() | ast.BitOr():
            yield "mask", node, left
            yield "mask", node, right
        case _:
            pass


def _swapped(pair: ast.Tuple) -> _Changes:
    parts = list(map(ast.unparse, pair.elts))
    for i in range(len(parts) - 1):
        if not any(part.startswith("*") for part in parts[i : i + 2]):
            other = [*parts[:i], parts[i + 1], parts[i], *parts[i + 2 :]]
            yield "residual", pair, f"({', '.join(other)})"


def _other_call(node: ast.Call, branch: Any) -> _Changes:
    name, function = _callee(node), ast.unparse(node.func)
    args = [ast.unparse(arg) for arg in node.args]
    options = {option.arg: ast.unparse(option) for option in node.keywords}
    call = lambda function, *parts: f"{function}({', '.join(parts)})"
    if name in ("where", "select", "cond") and len(args) >= 3:
        rest = (args[2], args[1], *args[3:], *options.values())
        yield branch(node.args[0]), node, call(function, args[0], *rest)
    if function == "sum" and len(args) == 2:
        yield "sum", node, f"({args[1]})"
    elif name in _OTHER_FUNCTION:
        kind = {"sum": "sum", "maximum": "branch"}.get(name, "mask")
        rest = [option for key, option in options.items() if key != "dtype"]
        other = function.removesuffix(name) + _OTHER_FUNCTION[name]
        yield kind, node, call(other, *args, *rest)
    if name in _DROPPED:
        is_method = isinstance(node.func, ast.Attribute) and len(args) == (name == "astype")
        kept = ast.unparse(node.func.value) if is_method else "".join(args[:1])  # type: ignore
        yield _DROPPED[name], node, f"({kept})"
    if name in ("asarray", "array") and len(args) == 2:
        yield "cast", node, call(function, args[0])
    if name == "range" and len(args) <= 2:
        yield "off by one", node.args[-1], f"{args[-1]} - 1"
    for option in node.keywords:
        if option.arg in ("dtype", "preferred_element_type"):
            rest = [other for key, other in options.items() if key != option.arg]
            yield "cast", node, call(function, *args, *rest)
        if option.arg in ("axis", "axes", "in_axes", "out_axes") and _integer(option.value):
            yield "off by one", option.value, "-1" if ast.unparse(option.value) == "0" else "0"


def _other_index(index: ast.AST) -> _Changes:
    if _integer(index):
        number = ast.literal_eval(index)  # type: ignore
        yield "off by one", index, str(0 if number == -1 else number + 1)
    if isinstance(index, ast.Slice):
        for bound in filter(None, (index.lower, index.upper)):
            step = "-" if isinstance(bound, ast.UnaryOp) else "+"
            yield "off by one", bound, f"{ast.unparse(bound)} {step} 1"


def _integer(node: ast.AST) -> bool:
    """Whether it is a literal, which may have a sign."""
    return re.fullmatch(r"-?\d+", ast.unparse(node)) is not None
