"""Every example runs, as a reader would run it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _run(path, cwd, *args):
    result = subprocess.run(
        [sys.executable, str(path), *args],
        cwd=cwd,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    out = tmp_path / "out"
    _run(path, tmp_path, "--quick", "--out", str(out))
    left = [p.name for p in tmp_path.iterdir() if p != out]
    assert not left, f"Wrote outside of `--out`: {left}"


@pytest.mark.slow
def test_the_spiking_network_learns_and_only_with_the_rule(tmp_path):
    _run(ROOT / "examples" / "spiking_digits.py", tmp_path, "--seeds", "3")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["spike"] >= 0.95
    assert result["plain_step"] < 0.3  # guessing: 0.1
    picture = (tmp_path / "out" / "spiking-digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
