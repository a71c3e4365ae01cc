"""Record which statements each test reaches, and how long the test takes, for `mutants.py`.

When a file of `eqx_grads` is compiled, a call that records the statement is inserted before
each statement; the line numbers stay those of the source. A test can use what a test before it
has computed. So the caches are cleared before each test, and a test also reaches what its
fixtures reached.
"""

import ast
import builtins
import functools
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from mutations import statement_key


_REPORT = "__reached__"
_lru_cache = functools.lru_cache


def record_reached(root: Path, cache: Path) -> "Reached":
    """Called before `eqx_grads` is imported. `cache` is a folder for the compiled files."""
    plugin = Reached()
    compile_, package = builtins.compile, str(root / "eqx_grads")

    def instrumented(source: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        # jaxtyping's import hook compiles a tree, which it has from here.
        if str(filename).startswith(package) and not isinstance(source, ast.AST):
            text = source if isinstance(source, str) else bytes(source).decode()
            visitor = _Instrumented(str(Path(filename).relative_to(root)), text)
            source = ast.fix_missing_locations(visitor.visit(ast.parse(source)))
        return compile_(source, filename, *args, **kwargs)

    sys.pycache_prefix = str(cache)
    builtins.compile = instrumented
    # A name that every file has without importing it, and no function closes over.
    setattr(builtins, _REPORT, plugin.report)
    functools.lru_cache = plugin.lru_cache  # `functools.cache` calls it
    return plugin


class _Instrumented(ast.NodeTransformer):
    def __init__(self, path: str, source: str):
        self.path = path
        self.lines = source.splitlines()
        self.scope: list[str] = []

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
        call = ast.Call(ast.Name(_REPORT, ast.Load()), [ast.Constant(key)], [])
        return [ast.copy_location(ast.Expr(call), statement), statement]


class Reached:
    """A pytest plugin, for one file of tests."""

    def __init__(self):
        self.caches: list[Any] = []
        self.keys: set[str] = set()
        self.number: dict[str, int] = {}
        self.of_fixture: dict[str, set[str]] = {}
        self.at_import: list[int] = []
        self.tests: dict[str, dict[str, Any]] = {}

    def report(self, key: str) -> None:
        self.keys.add(key)

    def _numbers(self) -> list[int]:
        return sorted(self.number.setdefault(key, len(self.number)) for key in self.keys)

    def lru_cache(self, maxsize: Any = 128, typed: bool = False) -> Any:
        """`functools.lru_cache`, whose caches of the library and its tests can be cleared."""

        def decorate(f: Any) -> Any:
            cached = original(f)
            if f.__module__.partition(".")[0] in ("tests", "eqx_grads"):
                self.caches.append(cached)
            return cached

        original = _lru_cache(128 if callable(maxsize) else maxsize, typed)
        return decorate(maxsize) if callable(maxsize) else decorate

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        self.at_import = self._numbers()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        outside, self.keys = self.keys, set()
        try:
            return (yield)
        finally:
            self.of_fixture[fixturedef.argname] = self.keys
            self.keys = outside | self.keys

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        sys.modules["jax"].clear_caches()
        for cache in self.caches:
            cache.cache_clear()
        self.keys.clear()
        self.began = time.process_time()
        self.tests[nodeid] = {"passed": True}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: Any) -> None:
        self.keys = self.keys.union(*(self.of_fixture.get(n, ()) for n in item.fixturenames))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:  # skipped and expected failures tell nothing
            self.tests[report.nodeid]["passed"] = False

    @pytest.hookimpl
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid]["seconds"] = round(time.process_time() - self.began, 3)
        self.tests[nodeid]["reached"] = self._numbers()

    def result(self) -> dict[str, Any]:
        return {
            "statements": list(self.number),
            "at_import": self.at_import,
            "tests": self.tests,
        }
