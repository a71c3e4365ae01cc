"""The table of `docs/api/safe.md` is what its script writes."""

import importlib.util
import pathlib

import pytest


SCRIPT = pathlib.Path(__file__).parents[1] / "docs" / "safe_table.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("safe_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_jax(text):
    """What plain JAX gives differs between its versions."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row[:4] + row[5:]] for row in rows]


@pytest.mark.slow
def test_the_table_is_up_to_date(script):
    page = script.PAGE.read_text()
    written = page.split(script.START)[1].split(script.END)[0]
    assert _without_jax(written) == _without_jax(script.table()), "python docs/safe_table.py"


def test_ours_is_the_truth_wherever_there_is_one(script):
    page = script.PAGE.read_text()
    rows = _without_jax(page.split(script.START)[1].split(script.END)[0])[2:]
    assert len(rows) == len(script.ROWS)
    for *what, ours, truth, _ in rows:
        expected = "0" if "∞" in truth or truth == "none" else truth
        assert ours == expected, what
