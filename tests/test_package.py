"""The package: a quick import, one version everywhere, a gate that fails if a step fails, and
plots and benchmarks that are complete and run."""

import ast
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import eqx_grads as eqg
import pytest
import yaml


ROOT = pathlib.Path(__file__).parents[1]


def run(command, cwd=ROOT, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


# ---------------------------------------------------------------- the import


def test_names_that_are_found_later():
    """Type checkers see them, and so does `dir`."""
    body = ast.parse(pathlib.Path(eqg.__file__).read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If)]
    seen = {(x.module, name.name) for x in block.body for name in x.names}
    found = {(None, name) for name in eqg._MODULES}
    assert seen == found | {(module, name) for name, module in eqg._MODULE_OF.items()}
    assert {"filter_scan", "implicit", "explain_nan", "nn", "testing"} <= set(dir(eqg))
    for name in dir(eqg):
        assert getattr(eqg, name) is getattr(eqg, name)
    with pytest.raises(AttributeError, match="'eqx_grads' has no attribute 'explain'"):
        eqg.explain  # noqa: B018


# What a module computes when it is imported, it would keep as a tracer of this program.
FIRST_USE = """
import sys

import jax
import eqx_grads as eqg

rooms = {name.split(".")[1] for name in sys.modules if name.startswith("eqx_grads.")}
assert not rooms & {"_diagnosis", "_drop_ins", "_host", "_solvers", "nn", "testing"}, rooms

jax.jit(lambda x: ([getattr(eqg, name) for name in dir(eqg)], x)[1])(1.0)
for name, module in list(sys.modules.items()):
    if name.startswith("eqx_grads."):
        for key, value in vars(module).items():
            for x in value.values() if isinstance(value, dict) else [value]:
                assert not isinstance(x, (jax.core.Tracer, jax.Array)), (name, key)
"""


def test_the_first_use_may_be_in_a_program():
    result = run([sys.executable, "-c", FIRST_USE])
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- releases


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## (\d\S*) \((.*)\)$", changelog, re.MULTILINE)[0]
    assert eqg.__version__ == version == citation["version"]
    assert citation["date-released"] == date
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["repository-code"] == project["urls"]["Homepage"]
    assert citation["license"] == project["license"]


@pytest.mark.parametrize(
    ("make", "steps", "outcome"),
    [
        ("cat; exit 0", ["check", "docs"], "passed"),  # `cat` reads no steps
        ('[ "$2" != check ]', ["check", "docs"], "FAILED"),
        ('[ "$2" != docs ]', ["check", "docs"], "FAILED"),
        ("kill -TERM $PPID", ["check", "docs"], "NOT RUN"),  # interrupted
        ("exit 0", [], "FAILED"),
    ],
)
def test_the_gate_passes_only_if_every_step_ran_and_passed(make, steps, outcome, tmp_path):
    for folder in ("bin", ".ci"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / ".ci" / "steps").write_text("\n".join(steps))
    (tmp_path / "bin" / "make").write_text(f"#!/bin/sh\n{make}\n")
    (tmp_path / "bin" / "make").chmod(0o755)
    script = ["bash", str(tmp_path / ".ci" / "run")]
    done = run(script, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    last = done.stdout.splitlines()[-1]
    assert done.returncode == (outcome != "passed")
    assert last.startswith("=== passed" if outcome == "passed" else "=== FAILED")
    assert outcome in done.stdout
    assert all(step in last for step in steps)


# ---------------------------------------------------------------- plots and benchmarks


def _plots():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("plots", ROOT / "docs" / "plots.py")
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    return plots


PLOTTED = {
    # A spike is drawn with each surrogate.
    "surrogates": (eqg.surrogates, "eqx_grads.surrogates.", {"AbstractSurrogate", "spike"}),
    "ste": (eqg.ste, "eqx_grads.ste.", set()),
    # Probes do not change a gradient.
    "gradient-ops": (eqg, "eqx_grads._gradient_ops.", {
        "GradientStatistics", "probe", "tap_gradient", "watch_gradient"}),
}  # fmt: skip


@pytest.mark.parametrize("page", PLOTTED)
def test_every_name_has_its_plot(page):
    plots, (module, room, without) = _plots(), PLOTTED[page]
    of_room = lambda x: str(getattr(x, "__module__", "")).startswith(room)
    names = {n for n, x in vars(module).items() if not n.startswith("_") and of_room(x)}
    names -= without
    assert len(names) >= 8
    assert set(plots.PLOTS[page]) == names, "Add it to `docs/plots.py`."
    drawn = {path.stem for path in (plots.FOLDER / page).glob("*")}
    assert drawn == names, "Run `python docs/plots.py`."
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    for name in names:
        assert f"](../images/plots/{page}/{name}.svg)](#{module.__name__}.{name})" in text


@pytest.mark.slow
def test_all_plots_can_be_drawn(tmp_path):
    plots = _plots()
    plots.save(tmp_path)
    names = lambda folder: {path.relative_to(folder) for path in folder.rglob("*.svg")}
    assert names(tmp_path) == names(plots.FOLDER)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name
)
def test_benchmark_runs(path, tmp_path):
    """The figures are not judged here."""
    assert ast.get_docstring(ast.parse(path.read_text())), "State the claim."
    command = [sys.executable, str(path), "--quick"]
    result = run(command, tmp_path, MPLBACKEND="Agg", PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stdout + result.stderr
