"""A release: one version everywhere, and a gate that fails if a step fails or does not run."""

import os
import pathlib
import re
import shutil
import subprocess
import tomllib

import eqx_grads as eqg
import pytest
import yaml


ROOT = pathlib.Path(__file__).parents[1]


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
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.splitlines()[-1]
    assert done.returncode == (outcome != "passed")
    assert last.startswith("=== passed" if outcome == "passed" else "=== FAILED")
    assert outcome in done.stdout
    assert all(step in last for step in steps)


@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_a_step_fails_without_its_python(versions, tmp_path):
    """A missing interpreter is not a reason to pass."""
    for name in ("sh", "make", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["make", "--no-print-directory", "test", f"VERSIONS={versions}"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "This step needs Python 3.1" in done.stderr
