"""Mutants of a source file: the file with one expression or statement changed.

A mutant is a fault that somebody could have made: another sign, branch or mask, an index that
is off by one, two swapped elements of a tuple, or a missing term, sum, cast, check, conjugate
or part of the key of a cache. A suite that passes on a mutant does not test what was changed
(`mutants.py` counts those). Texts of errors, docstrings and annotations stay.
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
_NOT_MUTATED = re.compile(r"/(__init__|plot|progress|show_bytes|versions|replay_choice)\.py$")
_TEXTS = re.compile(r"__repr__|__str__|message|_text|describe|phrase|warn")
_CACHE = re.compile(r"cache|digest|__eq__|__hash__|^key|return key|(\.|def )_?key\(", re.I)
_CHECK = re.compile(r"^_?(check|require|refuse|reject|validate)")


class Mutant(NamedTuple):
    path: str  # relative to the root of the repository
    kind: str
    line: int
    key: str  # of the statement, as `reached.py` has them
    start: int  # in bytes, as is `end`: where to write `planted`
    end: int
    planted: str
    before: str
    after: str
    name: str  # the same while the function and what is changed in it stay the same


def plant(sources: dict[str, bytes], mutants: list[Mutant]) -> dict[str, bytes]:
    """The sources, with the mutant of number `i` where `__mutant__(i)` is true."""
    planted = dict(sources)
    for i, m in sorted(enumerate(mutants), key=lambda pair: -pair[1].start):
        text, new = planted[m.path], m.planted.replace("__mutant__()", f"__mutant__({i})")
        planted[m.path] = text[: m.start] + new.encode() + text[m.end :]
    return planted


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
    root of how many the room has. The choice from a room depends on its code and its share.
    Kinds and files alternate. No two mutants change the same statement."""
    rank = lambda m: zlib.crc32(f"{seed} {m.name}".encode())
    rooms: dict[str, list[Mutant]] = {}
    for path, source in sorted(sources.items()):
        rooms.setdefault(room_of(path), []).extend(mutants_of(path, source))
    rooms = {room: pool for room, pool in sorted(rooms.items()) if pool}
    unit = (number - least * len(rooms)) / sum(math.sqrt(len(pool)) for pool in rooms.values())
    chosen: list[Mutant] = []
    for pool in rooms.values():
        n_of: Counter[str] = Counter()
        for _ in range(least + round(unit * math.sqrt(len(pool)))):
            if pool:
                m = min(pool, key=lambda m: (n_of[m.kind], n_of[m.path], rank(m)))
                pool = [other for other in pool if other.key != m.key]
                n_of.update([m.kind, m.path])
                chosen.append(m)
    return chosen


class _Finder(ast.NodeVisitor):
    """Visits the code of a file and notes what could be changed in it."""

    def __init__(self, path: str, source: bytes):
        self.path, self.source = path, source
        self.lines = source.splitlines(keepends=True)
        self.starts = list(itertools.accumulate(map(len, self.lines), initial=0))
        self.scope: list[str] = []
        self.statement, self.runs_later = 1, False
        self.found: dict[str, Mutant] = {}

    def visit(self, node: Any) -> None:
        skipped = ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr
        if isinstance(node, skipped) or re.search("error|warn|isinstance", _callee(node), re.I):
            return
        if isinstance(node, ast.FunctionDef) and _TEXTS.search(node.name):
            return
        outer = self.statement, len(self.scope), self.runs_later
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        line = self.lines[self.statement - 1].decode()
        if self.scope and self.runs_later:  # at import, a fault would stop everything
            is_cache = _CACHE.search(".".join(self.scope[-1:]) + line) is not None
            for kind, changed, after in _changes(node, is_cache):
                self._note("cache" if is_cache else kind, node, changed, after, line)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.scope.append(node.name)
            node.decorator_list = []
        for field, child in ast.iter_fields(node):
            is_body = field == "body" and isinstance(node, ast.FunctionDef | ast.Lambda)
            self.runs_later = outer[2] or is_body
            if field not in ("annotation", "returns"):
                for part in child if isinstance(child, list) else [child]:
                    if isinstance(part, ast.AST):
                        self.visit(part)
        self.statement, _, self.runs_later = outer
        del self.scope[outer[1] :]

    def _note(self, kind: str, node: Any, changed: Any, after: str, line: str) -> None:
        place = lambda line, column: self.starts[line - 1] + column
        start = place(changed.lineno, changed.col_offset)
        end = place(changed.end_lineno, changed.end_col_offset)
        before = self.source[start:end].decode()
        within = ".".join(self.scope)
        # Where a function has the same expression twice, the first of the two is changed.
        name = f"{self.path}::{within}: {' '.join(before.split())} -> {after}"
        key = statement_key(self.path, self.scope, line)
        planted = f"(({after}) if __mutant__() else ({before}))"
        if after == "pass":
            planted = f"if not __mutant__(): {before}"
        elif isinstance(node, ast.Assign) and changed in node.targets:
            start = end = place(node.end_lineno, node.end_col_offset)
            planted = f"; {before} = {planted}"
        fields = (start, end, planted, before, after, name)
        self.found.setdefault(name, Mutant(self.path, kind, self.statement, key, *fields))


# ---------------------------------------------------------------- what is changed

# Capital letters are any expressions. A call may have more arguments, which remain.
_RULES = """
sign        -A : A;  A + B : A - B;  A - B : A + B
term        A + B : A;  A + B : B;  A - B : A;  A * B : A;  A * B : B;  A / B : A
off by one  A < B : A <= B;  A <= B : A < B;  A > B : A >= B;  A >= B : A > B
off by one  A // B : A // B + 1;  A % B : (A + 1) % B;  range(A) : range(A - 1)
off by one  range(A, B) : range(A, B - 1)
branch      not A : bool(A);  A if B else C : C if B else A;  A == B : A != B;  A != B : A == B
branch      A is B : A is not B;  A is not B : A is B
branch      A in B : A not in B;  A not in B : A in B;  A or B : A and B
branch      A and B : A or B;  A and B : A;  A and B : B;  A or B : A;  A or B : B
branch      M.where(A, B, C) : M.where(A, C, B);  M.select(A, B, C) : M.select(A, C, B)
branch      M.cond(A, B, C) : M.cond(A, C, B);  M.maximum(A, B) : M.minimum(A, B)
mask        ~A : A;  A & B : A;  A & B : B;  A | B : A;  A | B : B
mask        any(A) : all(A);  all(A) : any(A);  M.any(A) : M.all(A);  M.all(A) : M.any(A)
sum         M.sum(A) : M.max(A);  sum(A) : max(A);  M.psum(A) : A;  M.pmean(A) : A
conjugate   M.conj(A) : A;  M.real(A) : A;  M.stop_gradient(A) : A
cast        A.astype(B) : A;  M.asarray(A, B) : M.asarray(A);  M.convert_element_type(A) : A
"""


def _parsed(text: str) -> Any:
    return ast.parse(text.strip(), mode="eval").body


_PATTERNS = [
    (line[:12].strip(), _parsed(before), after.strip())
    for line in _RULES.strip().splitlines()
    for before, after in (rule.split(" : ") for rule in line[12:].split("; "))
]
_Changes = Iterator[tuple[str, ast.AST, str]]


def _matches(pattern: Any, node: Any, found: dict[str, str]) -> bool:
    """Whether the node has this form. `found` has its parts."""
    match pattern:
        case ast.Name(id) if len(id) == 1:
            found[id] = ast.unparse(node)
            return not _is_sequence(node)
        case ast.Call(function, args):
            return (
                isinstance(node, ast.Call)
                and _matches(function, node.func, found)
                and _matches(args, node.args[: len(args)], found)
            )
        case ast.AST():
            fields = set(pattern._fields) - {"ctx", "kind", "type_comment"}
            parts = ((getattr(pattern, field), getattr(node, field, None)) for field in fields)
            return type(pattern) is type(node) and all(_matches(*pair, found) for pair in parts)
        case list():
            pairs = zip(pattern, node, strict=False)
            return len(pattern) == len(node) and all(_matches(*pair, found) for pair in pairs)
    return pattern == node


def _changes(node: Any, is_cache: bool) -> _Changes:
    """The kind, what is changed, and by what."""
    for kind, pattern, after in _PATTERNS:
        found: dict[str, str] = {}
        if _matches(pattern, node, found) and not re.fullmatch(r"\d+", found.get("A", "")):
            changed = re.sub(r"\b[A-Z]\b", lambda name, f=found: f"({f[name[0]]})", after)
            if after.endswith(")") and "(" in after and isinstance(pattern, ast.Call):
                more = [*node.args[len(pattern.args) :], *node.keywords]
                changed = ", ".join([changed[:-1], *map(ast.unparse, more)]) + ")"
            yield kind, node, changed if len(after) == 1 else f"({changed})"
    match node:
        case ast.BoolOp(op, values) if len(values) > 2:
            symbol = " and " if isinstance(op, ast.And) else " or "
            parts = [f"({ast.unparse(value)})" for value in values]
            for i in range(len(parts)):
                yield "branch", node, f"({symbol.join(parts[:i] + parts[i + 1 :])})"
        case ast.AugAssign(_, _, value) if not _is_sequence(value):
            yield "term", node, "pass"
        case ast.If(test, [*_, ast.Raise()], []):
            yield "check", test, f"False and ({ast.unparse(test)})"
        case ast.If(test) if not isinstance(test, ast.Compare | ast.BoolOp):
            yield "branch", test, f"not ({ast.unparse(test)})"
        case ast.comprehension(ifs=[test]):
            yield "branch", test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(ast.Call() as call):
            yield "check" if _CHECK.search(_callee(call)) else "term", node, "pass"
        case ast.Return(ast.Tuple() as pair) | ast.Lambda(body=ast.Tuple() as pair):
            yield from _swapped(pair)
        case ast.Assign([target], value):
            for pair in (target, value):
                yield from _swapped(pair) if isinstance(pair, ast.Tuple) else ()
        case ast.Subscript(slice=part):
            for index in part.elts if isinstance(part, ast.Tuple) else [part]:
                bounds = [index.lower, index.upper] if isinstance(index, ast.Slice) else [index]
                for bound in bounds:
                    if re.fullmatch(r"-?\w+", ast.unparse(bound) if bound else ""):
                        yield "off by one", bound, f"{ast.unparse(bound)} + 1"
        case ast.Constant(float(x)) if 1e-20 < abs(x) < 0.1 or 99 < abs(x) < 1e20:
            yield "tolerance", node, repr(x * 10)
            yield "tolerance", node, repr(x / 10)
        case ast.keyword("dtype" | "preferred_element_type", value):
            yield "cast", value, "None"
        case ast.Tuple(elements, ast.Load()) if is_cache and len(elements) > 1:
            for i in range(len(elements)):
                rest = [f"{ast.unparse(x)}, " for x in elements[:i] + elements[i + 1 :]]
                yield "cache", node, f"({''.join(rest)})"


def _swapped(pair: ast.Tuple) -> _Changes:
    parts = list(map(ast.unparse, pair.elts))
    for i in range(len(parts) - 1):
        if not any(part.startswith("*") for part in parts[i : i + 2]):
            other = [*parts[:i], parts[i + 1], parts[i], *parts[i + 2 :]]
            yield "residual", pair, f"({', '.join(other)})"


def _callee(node: Any) -> str:
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_sequence(node: Any) -> bool:
    sequences = ast.List | ast.Tuple | ast.Dict | ast.ListComp | ast.JoinedStr | ast.Starred
    return isinstance(node, sequences) or isinstance(getattr(node, "value", None), str)
