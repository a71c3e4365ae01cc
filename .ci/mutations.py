"""Mutants of a source file: the file with one expression or statement changed.

A mutant has another sign, factor or index, lacks a term, or takes the other branch. A test
suite that passes on a mutant does not test what was changed (`mutants.py` counts those).
Texts of errors, docstrings and annotations are not changed. Neither is the condition of an `if`
that only raises: that mutant would always raise, which any test notices.
"""

import ast
import math
import zlib
from typing import NamedTuple


KINDS = ("sign", "factor", "index", "term", "branch")


class Mutant(NamedTuple):
    path: str  # relative to the root of the repository
    kind: str
    line: int  # of the statement, as `reached.py` counts them
    start: int  # in bytes, as is `end`
    end: int
    before: str
    after: str
    within: str  # the qualified name of the function
    name: str  # the same while the function and what is changed in it stay the same

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, of which some may not compile."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    found: dict[str, Mutant] = {}
    for mutant in finder.found:
        if mutant.before != mutant.after:
            found.setdefault(mutant.name, mutant)
    return list(found.values())


def _compiles(mutant: Mutant, source: bytes) -> bool:
    try:
        compile(mutant.apply(source), mutant.path, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def sample(sources: dict[str, bytes], number: int, seed: int) -> list[Mutant]:
    """About `number` mutants, in proportion to the square root of how many each file has. The
    kinds alternate, and no two mutants change the same statement.

    The choice from a file depends on that file only.
    """
    pools = {path: mutants_of(path, source) for path, source in sources.items()}
    total = sum(math.sqrt(len(pool)) for pool in pools.values())
    chosen = []
    for path, pool in sorted(pools.items()):
        if pool:
            share = max(1, round(number * math.sqrt(len(pool)) / total))
            chosen += _in_turn(pool, sources[path], share, seed)
    return chosen


def _in_turn(pool: list[Mutant], source: bytes, share: int, seed: int) -> list[Mutant]:
    by_kind = {kind: [m for m in pool if m.kind == kind] for kind in KINDS}
    for kind in KINDS:
        by_kind[kind].sort(key=lambda m: _hash(f"{seed} {m.name}"), reverse=True)
    kinds = sorted(KINDS, key=lambda kind: _hash(f"{seed} {pool[0].path} {kind}"))
    chosen, lines = [], set()
    while len(chosen) < share and any(by_kind.values()):
        for kind in kinds:
            while by_kind[kind]:
                mutant = by_kind[kind].pop()
                if mutant.line not in lines and _compiles(mutant, source):
                    lines.add(mutant.line)
                    chosen.append(mutant)
                    break
    return chosen[:share]


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


# ---------------------------------------------------------------- what is changed

_OTHER_COMPARISON = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_SYMBOL = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
_TWO_BRANCHES = ("where", "select")  # of which the last two arguments are the branches
_DROPPED = ("conj", "real", "flip", "stop_gradient", "transpose", "abs", "sign")
_TEXT = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.ListComp)


class _Finder(ast.NodeVisitor):
    """Visits the code of a file and notes what could be changed in it."""

    def __init__(self, path: str, source: bytes):
        self.path = path
        self.source = source
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.scope: list[str] = []
        self.statement = 0
        self.found: list[Mutant] = []

    # -- positions and texts

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self.line_starts[node.lineno - 1] + node.col_offset  # type: ignore
        end = self.line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore
        return start, end

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _note(self, kind: str, node: ast.AST, after: str) -> None:
        start, end = self._span(node)
        before = self.source[start:end].decode()
        within = ".".join(self.scope)
        # Where a function has the same expression twice, the first of the two is changed.
        name = f"{self.path}::{within}: {before} -> {after}"
        self.found.append(
            Mutant(
                self.path,
                kind,
                self.statement,
                start,
                end,
                before,
                after,
                within,
                name,
            )
        )

    # -- what is visited

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        if isinstance(
            node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert
        ):
            return
        if isinstance(node, ast.Call) and "error" in self._callee(node).lower():
            return
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scope.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self._constant(default, "branch")
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self.scope:
            self._note("term", node, "pass")
            self.visit(node.value)

    # -- signs, factors and terms

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._note("sign", node, f"({self._text(node.operand)})")
        if isinstance(node.op, ast.Not):
            self._note("branch", node, f"bool({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        left, right = f"({self._text(node.left)})", f"({self._text(node.right)})"
        is_text = any(
            isinstance(side, _TEXT)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        match node.op:
            case ast.Add() if is_text:
                self._note("term", node, left)
            case ast.Add() | ast.Sub():
                other = "-" if isinstance(node.op, ast.Add) else "+"
                self._note("sign", node, f"({left} {other} {right})")
                self._note("term", node, left)
                if isinstance(node.op, ast.Add):
                    self._note("term", node, right)
            case ast.Mult() if not is_text:
                self._note("factor", node, left)
                self._note("factor", node, right)
            case ast.Div():
                self._note("factor", node, left)
                self._note("factor", node, f"({left} * {right})")
            case ast.BitAnd() | ast.BitOr():
                self._note("term", node, left)
                self._note("term", node, right)
            case ast.MatMult():
                self._note("term", node, f"(0 * ({left} @ {right}))")
            case _:
                pass
        if type(node.op) in _SYMBOL and not is_text:
            for side, name in ((node.left, "left"), (node.right, "right")):
                if isinstance(side, ast.Constant) and isinstance(side.value, int | float):
                    number = _other_number(side.value)
                    symbol = _SYMBOL[type(node.op)]
                    after = (
                        f"({number} {symbol} {right})"
                        if name == "left"
                        else f"({left} {symbol} {number})"
                    )
                    self._note("factor", node, after)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        target, value = self._text(node.target), self._text(node.value)
        if isinstance(node.op, ast.Add | ast.Sub):
            other = "-" if isinstance(node.op, ast.Add) else "+"
            if not isinstance(node.value, _TEXT):
                self._note("sign", node, f"{target} {other}= {value}")
            self._note("term", node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """A derivative that is zero."""
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for value in values:
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
                self._note("term", value, f"(0 * ({self._text(value)}))")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = node.value
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            self._note("term", value, f"(0 * ({self._text(value)}))")
        self.generic_visit(node)

    # -- indices

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not self.scope:
            return  # a type
        value = self._text(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            number = _integer(part)
            if number is not None:
                self._note("index", part, str(0 if number == -1 else number + 1))
            if isinstance(part, ast.Slice) and part.step is None:
                lower, upper = part.lower, part.upper
                if lower is not None and upper is None and len(parts) == 1:
                    self._note("index", node, f"{value}[: {self._text(lower)}]")
                elif upper is not None and lower is None and len(parts) == 1:
                    self._note("index", node, f"{value}[{self._text(upper)} :]")
                for bound in (lower, upper):
                    number = None if bound is None else _integer(bound)
                    if bound is not None and number is not None:
                        self._note("index", bound, str(number + 1))
        self.generic_visit(node)

    # -- calls

    def _callee(self, node: ast.Call) -> str:
        match node.func:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                return name
            case _:
                return ""

    def visit_Call(self, node: ast.Call) -> None:
        callee = self._callee(node)
        if callee in _TWO_BRANCHES and len(node.args) == 3 and not node.keywords:
            condition, taken, other = map(self._text, node.args)
            function = self._text(node.func)
            self._note("branch", node, f"{function}({condition}, {other}, {taken})")
        if callee in _DROPPED:
            if len(node.args) == 1 and not node.keywords:
                self._note("sign", node, f"({self._text(node.args[0])})")
            elif not node.args and isinstance(node.func, ast.Attribute):
                self._note("sign", node, f"({self._text(node.func.value)})")
        for keyword in node.keywords:
            number = _integer(keyword.value)
            if keyword.arg in ("axis", "axes", "in_axes", "out_axes") and number is not None:
                self._note("index", keyword.value, str(-1 if number == 0 else 0))
            if keyword.arg != "strict":  # of `zip`: the lengths are equal
                self._constant(keyword.value, "branch")
            if keyword.arg is not None and isinstance(keyword.value, ast.Name | ast.Attribute):
                rest = [self._text(arg) for arg in node.args]
                rest += [self._text(other) for other in node.keywords if other is not keyword]
                self._note("term", node, f"{self._text(node.func)}({', '.join(rest)})")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in ("T", "mT"):
            self._note("index", node, f"({self._text(node.value)})")
        self.generic_visit(node)

    # -- branches

    def _constant(self, node: ast.AST, kind: str) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            self._note(kind, node, str(not node.value))

    def visit_If(self, node: ast.If) -> None:
        only_raises = isinstance(node.body[-1], ast.Raise)
        if not only_raises and not isinstance(node.test, ast.Compare):
            self._note("branch", node.test, f"not ({self._text(node.test)})")
        if not only_raises or isinstance(node.test, ast.Compare | ast.BoolOp):
            self.visit(node.test)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        taken, test, other = map(self._text, (node.body, node.test, node.orelse))
        self._note("branch", node, f"(({other}) if {test} else ({taken}))")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._note("branch", test, f"(not ({self._text(test)}))")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self._text(node.left), self._text(node.comparators[0])
            other = _OTHER_COMPARISON[type(node.ops[0])]
            self._note("branch", node, f"(({left}) {other} ({right}))")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        joint, other = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        values = [f"({self._text(value)})" for value in node.values]
        self._note("branch", node, f"({other.join(values)})")
        for i in range(len(values)):
            rest = joint.join(values[:i] + values[i + 1 :])
            self._note("term", node, f"({rest})")
        self.generic_visit(node)


def _integer(node: ast.AST) -> int | None:
    """Of a literal, which may have a sign."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case _:
            return None


def _other_number(number: float) -> str:
    if isinstance(number, int):
        return str(number + 1)
    return repr(2 * number if number else 1.0)
