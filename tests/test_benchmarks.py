"""Every benchmark runs and states its claim. The figures are not judged here."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


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
