"""Every benchmark runs and states its claim; `docs/benchmarks.md` has the saved results. The
figures are not judged here."""

import ast
import importlib.util
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


def test_the_page_is_up_to_date():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text == page.page(), "Run `python benchmarks/page.py`."
    names = (path.stem for path in BENCHMARKS)
    claims = [name for name in names if not page.claim_of(name).startswith("No claim")]
    listed = [name for names in page.SECTIONS.values() for name in names]
    assert sorted(listed) == claims, "Add it to `SECTIONS` of `benchmarks/page.py`."
