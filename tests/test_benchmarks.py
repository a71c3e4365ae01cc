"""Every benchmark runs and states its claim. The figures are not judged here."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


def test_every_claim_says_where_it_was_measured():
    page = (ROOT / "docs" / "versions.md").read_text()
    for path in BENCHMARKS:
        if (ast.get_docstring(ast.parse(path.read_text())) or "").startswith("Claim"):
            assert f"| `benchmarks/{path.name}`, " in page, "Add a row to the table."


@pytest.mark.slow
@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_benchmark_runs(path, tmp_path):
    assert ast.get_docstring(ast.parse(path.read_text())), "State the claim."
    result = subprocess.run(
        [sys.executable, str(path), "--quick"],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
