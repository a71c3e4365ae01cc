"""Record which statements each test reaches, and how long the test takes, for `mutants.py`.

When a file of `eqx_grads` is compiled, a call that records the statement is inserted before
each statement; the line numbers stay those of the source. A statement that runs at import
counts for no test.
"""

import ast
import builtins
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def record_reached(root: Path, cache: Path) -> "Reached":
    """Called before `eqx_grads` is imported. `cache` is a folder for the compiled files."""
    plugin = Reached()
    compile_, package = builtins.compile, str(root / "eqx_grads")

    def instrumented(source: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if str(filename).startswith(package):
            path = str(Path(filename).relative_to(root))
            tree = _Instrumented(path).visit(ast.parse(source))
            source = ast.fix_missing_locations(tree)
        return compile_(source, filename, *args, **kwargs)

    sys.pycache_prefix = str(cache)
    builtins.compile = instrumented
    # A name that every file has without importing it, and no function closes over.
    setattr(builtins, _REPORT, plugin.report)
    return plugin


_REPORT = "__reached__"


class _Instrumented(ast.NodeTransformer):
    def __init__(self, path: str):
        self.path = path

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        block = []
        for statement in statements:
            is_docstring = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if not is_docstring and not isinstance(statement, ast.Nonlocal | ast.Global):
                key = ast.Constant(f"{self.path}:{statement.lineno}")
                call = ast.Call(ast.Name(_REPORT, ast.Load()), [key], [])
                block.append(ast.copy_location(ast.Expr(call), statement))
            block.append(self.visit(statement))
        return block

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._inside(node)

    def _inside(self, node: Any) -> Any:
        for field in ("body", "orelse", "finalbody"):
            if getattr(node, field, None):
                setattr(node, field, self._block(getattr(node, field)))
        for case in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            case.body = self._block(case.body)
        return node

    visit_If = visit_For = visit_While = visit_With = visit_Try = visit_Match = _inside


class Reached:
    """A pytest plugin."""

    def __init__(self):
        self.lines: set[str] = set()
        self.tests: dict[str, dict[str, Any]] = {}

    def report(self, line: str) -> None:
        self.lines.add(line)

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.lines.clear()
        self.began = time.process_time()
        self.tests[nodeid] = {"passed": True}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:  # skipped and expected failures tell nothing
            self.tests[report.nodeid]["passed"] = False

    @pytest.hookimpl
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid]["seconds"] = round(time.process_time() - self.began, 3)
        self.tests[nodeid]["lines"] = sorted(self.lines)
