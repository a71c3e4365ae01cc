"""A release: one version everywhere, and a gate that runs every step of `.ci/steps`."""

import json
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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEPS = (ROOT / ".ci" / "steps").read_text().splitlines()
WORKFLOWS = ROOT / ".github" / "workflows"


def _jobs(workflow):
    return yaml.safe_load((WORKFLOWS / f"{workflow}.yml").read_text())["jobs"]


def _commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## (\d\S*) \((.*)\)$", changelog, re.MULTILINE)[0]
    assert eqg.__version__ == version == citation["version"]
    assert citation["date-released"] == date


def test_the_citation_has_the_addresses_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    urls = PROJECT["urls"]
    assert citation["repository-code"] == urls["Homepage"]
    assert citation["url"] == urls["Documentation"]
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]


def test_the_workflow_runs_the_steps_of_the_gate(tmp_path):
    jobs, output = _jobs("tests"), tmp_path / "output"
    (command,) = _commands(jobs["list"])
    environment = {**os.environ, "GITHUB_OUTPUT": str(output)}
    subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment, check=True)
    name, _, listed = output.read_text().strip().partition("=")
    assert (name, json.loads(listed)) == ("steps", STEPS)
    assert jobs["list"]["outputs"] == {"steps": "${{ steps.list.outputs.steps }}"}
    matrix = {"step": "${{ fromJson(needs.list.outputs.steps) }}"}
    assert jobs["required"]["strategy"]["matrix"] == matrix
    assert _commands(jobs["required"]) == ["make ${{ matrix.step }}"]


def _gate(tmp_path, make, steps):
    """The exit status and the output of `.ci/run`, with another program as `make`."""
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
    return done.returncode, done.stdout


def test_the_gate_passes_if_every_step_passes(tmp_path):
    status, printed = _gate(tmp_path, "cat; exit 0", STEPS)  # `cat` reads no steps
    assert status == 0
    last = printed.splitlines()[-1]
    assert last.startswith("=== passed in ")
    for step in STEPS:
        assert f"=== make {step}: passed in " in printed
        assert re.search(rf"{re.escape(step)} \d+ s", last)


@pytest.mark.parametrize("step", [STEPS[0], STEPS[-1]])
def test_the_gate_fails_if_a_step_fails(step, tmp_path):
    bad = step.split()[0]
    status, printed = _gate(tmp_path, f'[ "$2" != {bad} ]', STEPS)
    assert status == 1
    assert printed.splitlines()[-1].startswith("=== FAILED in ")
    assert printed.count(": FAILED in ") == 1
    assert f"=== make {step}: FAILED in " in printed


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        ("kill -TERM $PPID", ["lint", "types"]),  # interrupted
        ("exit 0", []),
    ],
)
def test_the_gate_fails_if_a_step_does_not_run(make, steps, tmp_path):
    status, printed = _gate(tmp_path, make, steps)
    assert status == 1
    assert printed.splitlines()[-1].startswith("=== FAILED in ")
    assert ("NOT RUN" in printed) == bool(steps)


@pytest.mark.parametrize("target", ["test-oldest", "test-newest"])
def test_a_step_fails_without_its_python(target, tmp_path):
    """An interpreter that is missing is no reason to pass."""
    for name in ("sh", "make", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["make", "--no-print-directory", target],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "This step needs Python 3.1" in done.stderr


def test_what_is_published_was_built_and_tested():
    jobs = _jobs("release")
    assert jobs["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert jobs["publish"]["needs"] == ["tests", "build"]
    assert _commands(jobs["build"])[0] == "make wheel"


def test_every_command_of_a_workflow_is_a_target():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE))
    commands = [f"make {step}" for step in STEPS]
    for path in WORKFLOWS.glob("*.yml"):
        for job in _jobs(path.stem).values():
            commands += _commands(job) if "steps" in job else ()
    (weekly,) = _jobs("weekly").values()
    commands += [f"make {command}" for command in weekly["strategy"]["matrix"]["command"]]
    makes = [words for words in map(str.split, commands) if words[0] == "make"]
    assert {words[1] for words in makes} - {"${{"} <= targets
