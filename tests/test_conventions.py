"""The house rules, as tests: a rule that nothing checks is a rule that drifts."""

import ast
import importlib
import inspect
import pathlib
import tomllib
import types

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import pytest
from packaging.requirements import Requirement
from packaging.version import Version


ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / "eqx_grads").rglob("*.py"))
NAMESPACES = {
    "eqx_grads": eqg,
    "eqx_grads.nn": eqg.nn,
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
        for name, obj in vars(namespace).items()
        if not name.startswith("_")
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small_and_say_what_they_are(path):
    text = path.read_text()
    tree = ast.parse(text)
    docs = [
        ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DOCUMENTED)
    ]
    lines = text.count("\n") - sum(doc.count("\n") for doc in docs)
    assert lines <= 400, "Split this file."
    assert ast.get_docstring(tree), "Say in one line what this file is."
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "super", f"line {node.lineno}: no `super()`."


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"])
def test_the_front_door_is_names_and_nothing_else(path):
    _, *body = ast.parse(path.read_text()).body
    for node in body:
        assert isinstance(node, ast.ImportFrom), f"line {node.lineno}: not a name."
        assert node.level == 1
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
    abstract = inspect.isabstract(cls) or bool(getattr(cls, "__abstractvars__", ()))
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
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    floors = [Requirement(dependency) for dependency in project["dependencies"]]
    assert _versions(pins, "==") == _versions(floors, ">=")


def _versions(requirements: list[Requirement], operator: str) -> dict[str, Version]:
    versions = {}
    for requirement in requirements:
        (bound,) = requirement.specifier
        assert bound.operator == operator, f"{requirement}: one bound, with {operator}"
        versions[requirement.name] = Version(bound.version)
    return versions
