"""`docs/benchmarks.md` is what `benchmarks/page.py` makes of the saved results."""

import importlib.util
import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parents[1]
pytest.importorskip("matplotlib")


def _page():
    spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page


PAGE = _page()


SCRIPTS = {claim.script for claims in PAGE.SECTIONS.values() for claim in claims}


def test_every_claim_is_on_the_page():
    scripts = [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py"))]
    claims = {name for name in scripts if not PAGE.claim_of(name).startswith("No claim")}
    assert claims == SCRIPTS, "Add it to `SECTIONS` of `benchmarks/page.py`."


def test_the_page_is_up_to_date():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text == PAGE.page(), "Run `python benchmarks/page.py`."
    for image in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
        assert (ROOT / "docs" / image).exists()


def test_every_result_says_how_it_was_measured():
    for name in SCRIPTS:
        header, body = PAGE.result_of(name)
        assert set(header) == {"command", "on", "clock"}
        assert header["command"].startswith(f"python benchmarks/{name}.py")
        assert body


RESULT = PAGE.Result({}, "Text.\n\n| a | b | b |\n| --- | --- | --- |\n| x | 2.5 / 0.9 (3) | 4 |\n")


def test_a_table_is_read_by_the_names_of_its_columns():
    (row,) = PAGE.table_of(RESULT)
    assert row == {"a": "x", "b": "2.5 / 0.9 (3)", "b 2": "4"}
    assert PAGE.numbers(row["b"]) == [2.5, 0.9]
    assert PAGE.numbers("1,158 µs, 84.5") == [1158, 84.5]


def test_what_is_worse_is_bold():
    slower = PAGE.Table("a|b|b 2", speeds="b")
    assert PAGE.written(slower, RESULT).endswith("| x | **2.5 / 0.9 (3)** | 4 |")
    assert "**" not in PAGE.written(PAGE.Table(speeds="b 2"), RESULT)
    assert "**4**" in PAGE.written(PAGE.Table(times="b 2"), RESULT)
