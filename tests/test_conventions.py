"""The house rules, as tests: a rule that nothing checks is a rule that drifts."""

import ast
import importlib
import inspect
import pathlib
import re
import tomllib
import types

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.solvers
import eqx_grads.testing as eqgt
import pytest
from packaging.requirements import Requirement
from packaging.version import Version


ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / "eqx_grads").rglob("*.py"))
NAMESPACES = {
    "eqx_grads": eqg,
    "eqx_grads.losses": eqg.losses,
    "eqx_grads.nn": eqg.nn,
    "eqx_grads.safe": eqg.safe,
    "eqx_grads.solvers": eqx_grads.solvers,
    "eqx_grads.ste": eqg.ste,
    "eqx_grads.surrogates": eqg.surrogates,
    "eqx_grads.tangents": eqg.tangents,
    "eqx_grads.testing": eqgt,
}


def _public(namespace: types.ModuleType) -> dict[str, object]:
    """All names of a package, which is a front door; of a file, those it defines."""
    is_package = "__path__" in vars(namespace)
    return {
        name: obj
        for name in dir(namespace)
        if not name.startswith("_")
        and (obj := getattr(namespace, name)) is not None
        and not isinstance(obj, types.ModuleType)
        and (is_package or getattr(obj, "__module__", None) == namespace.__name__)
    }


PUBLIC = {
    f"{prefix}.{name}": obj
    for prefix, namespace in NAMESPACES.items()
    for name, obj in _public(namespace).items()
}


def _modules() -> dict[str, type[eqx.Module]]:
    """Every `eqx.Module` of this library, public or not."""
    found = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        for obj in vars(importlib.import_module(name)).values():
            if isinstance(obj, type) and issubclass(obj, eqx.Module):
                if obj.__module__ == name:
                    found[f"{name}.{obj.__qualname__}"] = obj
    return found


MODULES = _modules()
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def _relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


_OUTPUT = re.compile(r"\n\n( *)```text\n.*?\n\1```", re.DOTALL)


@pytest.mark.parametrize("path", SOURCES, ids=_relative)
def test_files_are_small_and_say_what_they_are(path):
    text = path.read_text()
    tree = ast.parse(text)
    written = _OUTPUT.sub("", text)  # without what `docs/outputs.py` writes
    assert len(written.splitlines()) <= 500, "Split this file."
    assert ast.get_docstring(tree), "Say in one line what this file is."
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "super", f"line {node.lineno}: no `super()`."


def _code_lines(function: ast.FunctionDef, lines: list[str]) -> int:
    """Without blank lines, comments and docstrings."""
    code = {
        number
        for number in range(function.lineno, function.end_lineno + 1)
        if lines[number - 1].strip() and not lines[number - 1].lstrip().startswith("#")
    }
    for node in ast.walk(function):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            doc = node.body[0]
            code -= set(range(doc.lineno, doc.end_lineno + 1))
    return len(code)


@pytest.mark.parametrize("path", SOURCES, ids=_relative)
def test_functions_are_short(path):
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            n = _code_lines(node, text.splitlines())
            assert n <= 60, f"`{node.name}` has {n} lines of code."


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"])
def test_the_front_door_is_names_and_nothing_else(path):
    _, *body = ast.parse(path.read_text()).body
    if path == ROOT / "eqx_grads" / "__init__.py":
        _, _, *body = body
        end = next(i for i, node in enumerate(body) if isinstance(node, ast.If))
        assert ast.unparse(body[end + 1]).startswith("__version__ = '")
        body = [*body[:end], *body[end].body]
    for node in body:
        assert isinstance(node, ast.ImportFrom), f"line {node.lineno}: not a name."
        assert node.level in (1, 2)  # 2: a public room whose files are in a private one
        for alias in node.names:
            assert alias.asname == alias.name, f"Write `{alias.name} as {alias.name}`."


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    assert inspect.getdoc(PUBLIC[name])
    pages = "".join(p.read_text() for p in (ROOT / "docs" / "api").glob("*.md"))
    assert f"::: {name}\n" in pages, f"Add `::: {name}` to a page in docs/api."


@pytest.mark.parametrize("name", MODULES)
def test_classes_are_abstract_or_final(name):
    cls = MODULES[name]
    kinds = ("__abstractvars__", "__abstractclassvars__")
    abstract = inspect.isabstract(cls) or any(getattr(cls, kind, ()) for kind in kinds)
    assert cls.__name__.lstrip("_").startswith("Abstract") == abstract
    for base in cls.__mro__[1 : cls.__mro__.index(eqx.Module)]:
        base_name = base.__name__
        assert base_name.lstrip("_").startswith("Abstract"), f"{base_name} is final."
        for attr, value in vars(base).items():
            if callable(value) and not attr.startswith("__") and attr in vars(cls):
                unwritten = getattr(base, "__abstractmethods__", ())
                assert attr in unwritten, f"{attr} is already written."


def test_the_oldest_versions_tested_are_the_ones_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith(("#", "jaxlib"))]
    promised = [*project["dependencies"], *project["optional-dependencies"]["solvers"]]
    floors = [Requirement(dependency) for dependency in promised]
    assert _versions(pins, "==") == _versions(floors, ">=")


def _versions(requirements: list[Requirement], operator: str) -> dict[str, Version]:
    versions = {}
    for requirement in requirements:
        (bound,) = requirement.specifier
        assert bound.operator == operator, f"{requirement}: one bound, with {operator}"
        versions[requirement.name] = Version(bound.version)
    return versions
