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


def test_every_claim_is_on_the_page():
    scripts = [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py"))]
    claims = {name for name in scripts if not PAGE.claim_of(name).startswith("No claim")}
    listed = [name for names in PAGE.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(claims), "Add it to `SECTIONS` of `benchmarks/page.py`."


def test_the_page_is_up_to_date():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text == PAGE.page(), "Run `python benchmarks/page.py`."
    for image in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
        assert (ROOT / "docs" / image).exists()


def test_every_result_says_how_it_was_measured():
    for names in PAGE.SECTIONS.values():
        for name in names:
            header, body = PAGE.result_of(name)
            assert set(header) == {"command", "on", "clock"}
            assert header["command"].startswith(f"python benchmarks/{name}.py")
            assert body


def test_a_table_is_read_by_the_names_of_its_columns():
    body = "Text.\n\n| a | b | b |\n| --- | --- | --- |\n| 1 | 2.5 / 3 | x |\n"
    (row,) = PAGE.table_of(PAGE.Result({}, body))
    assert row == {"a": "1", "b": "2.5 / 3", "b 2": "x"}
    assert PAGE.first_number(row["b"]) == 2.5
    assert PAGE.first_number("100,000") == 100000
