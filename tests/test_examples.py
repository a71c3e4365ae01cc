"""Every example runs, as a reader would run it."""

import os
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, str(path), "--quick", "--out", str(out)],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    left = [p.name for p in tmp_path.iterdir() if p != out]
    assert not left, f"Wrote outside of `--out`: {left}"
