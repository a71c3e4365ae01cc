"""Import the library with changed sources, and record which statements each test reaches."""

import ast
import builtins
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from mutations import statement_key


def import_as(change: Callable[[str], bytes | None]) -> None:
    """A file of `eqx_grads`, in this folder, will be imported with the source `change(path)`,
    if it is not `None`."""
    get_code = SourceFileLoader.get_code

    def changed(self: Any, fullname: str) -> Any:
        is_own = fullname.partition(".")[0] == "eqx_grads"
        path = self.get_filename(fullname)
        source = change(os.path.relpath(path)) if is_own else None
        return get_code(self, fullname) if source is None else self.source_to_code(source, path)

    SourceFileLoader.get_code = changed


class Reached:
    """A pytest plugin, for one file of tests. The caches of JAX are cleared before each test,
    which would not trace what another test has traced. Nor is what was compiled read again, so
    that the seconds are those of a fresh machine."""

    def __init__(self, send: Callable[[Any], None]):
        self.send = send
        self.keys: set[str] = set()
        self.number: dict[str, int] = {}
        self.tests: dict[str, Any] = {}
        builtins.__reached__ = self.keys.add  # type: ignore
        sys.modules["jax"].config.update("jax_enable_compilation_cache", False)
        import_as(lambda path: _Instrumented(path).source)

    def pytest_runtest_logstart(self) -> None:
        sys.modules["jax"].clear_caches()
        self.keys.clear()
        self.began, self.passed = time.process_time(), True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed &= report.passed  # skipped and expected failures tell nothing

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = round(time.process_time() - self.began, 3)
        numbers = {self.number.setdefault(key, len(self.number)) for key in self.keys}
        if self.passed:
            self.tests[nodeid] = seconds, sorted(numbers)

    def pytest_sessionfinish(self) -> None:
        self.send({"statements": list(self.number), "tests": self.tests})


class _Instrumented(ast.NodeTransformer):
    """A file with a call before each statement of its functions. `source` is its text."""

    def __init__(self, path: str):
        self.path, text = path, Path(path).read_text()
        self.lines, self.scope = text.splitlines(), []
        self.source = ast.unparse(
            ast.fix_missing_locations(self.visit(ast.parse(text)))
        ).encode()

    def generic_visit(self, node: Any) -> Any:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        self.scope += names
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody") if self.scope else ():
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, ast.ClassDef):
                setattr(node, field, [new for old in block for new in self._reported(old)])
        self.scope = self.scope[: len(self.scope) - len(names)]
        return node

    def _reported(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return [statement]  # a docstring is the first statement
        key = statement_key(self.path, self.scope, self.lines[statement.lineno - 1])
        return [ast.parse(f"__reached__({key!r})").body[0], statement]
