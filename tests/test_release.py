"""A release: one version everywhere, and workflows that run the steps of `.ci/run`."""

import pathlib
import re
import shlex
import tomllib

import eqx_grads as eqg
import yaml


ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN = (ROOT / ".ci" / "run").read_text()
WORKFLOWS = ROOT / ".github" / "workflows"


def _jobs(workflow):
    return yaml.safe_load((WORKFLOWS / f"{workflow}.yml").read_text())["jobs"]


def _array(name):
    """An array of the shell script `.ci/run`."""
    (words,) = re.findall(rf"^{name}=\((.*?)\)", RUN, re.MULTILINE | re.DOTALL)
    return shlex.split(words)


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


def test_the_workflow_runs_the_steps_that_are_required():
    job = _jobs("tests")["required"]
    assert job["strategy"]["matrix"] == {"step": _array("required")}
    assert _commands(job) == ["make ${{ matrix.step }}"]


def test_the_workflows_run_the_steps_that_are_reported():
    switches, slow = _jobs("tests")["reported"], _jobs("weekly")["slow"]
    assert switches["strategy"]["matrix"] == {"switches": _array("switches")}
    assert switches["continue-on-error"]
    assert _commands(switches) == ['make test-switches SWITCHES="${{ matrix.switches }}"']
    (parts,) = re.findall(r"^parts=(\d+)$", RUN, re.MULTILINE)
    all_parts = [f"{i + 1}/{parts}" for i in range(int(parts))]
    assert slow["strategy"]["matrix"] == {"part": all_parts}
    assert _commands(slow) == ["make test-slow PART=${{ matrix.part }}"]
    reported = re.findall(r"^reported \d+ ([\w-]+)", RUN, re.MULTILINE)
    assert reported == ["test-switches", "test-slow", "notebooks"]
    assert _commands(_jobs("weekly")["notebooks"]) == ["make notebooks"]


def test_what_is_published_was_built_and_tested():
    jobs = _jobs("release")
    assert jobs["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert jobs["publish"]["needs"] == ["tests", "build"]
    assert _commands(jobs["build"])[0] == "make wheel"


def test_every_command_of_a_workflow_is_a_target():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS.glob("*.yml"):
        for job in _jobs(path.stem).values():
            for command in _commands(job) if "steps" in job else ():
                words = command.split()
                if words[0] == "make" and "$" not in words[1]:
                    assert words[1] in targets, f"{path.name}: {command}"
    assert set(_array("required")) <= targets
