"""The site needs no network, and its generated pages and pictures are up to date."""

import importlib.util
import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()


def _load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _entries(key: str) -> list[str]:
    """The items of a list at the top level of `mkdocs.yml`, without their options."""
    _, rest = re.split(rf"^{key}:\n", CONFIG, flags=re.MULTILINE)
    section = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^ {4}- ([^\s:]+)", section, re.MULTILINE)


def test_styles_and_scripts_are_in_the_repository():
    for name in [*_entries("extra_css"), *_entries("extra_javascript")]:
        assert (DOCS / name).is_file(), name


def test_the_theme_fetches_nothing():
    assert re.search(r"^ {4}font: false", CONFIG, re.MULTILINE)
    # With the address of a repository on a known host, the theme asks it for a number of stars.
    assert not re.search(r"^(repo_url|repo_name):", CONFIG, re.MULTILINE)
    assert _entries("plugins") == ["search", "mkdocstrings"]


def test_styles_refer_to_files_beside_them():
    for style in DOCS.rglob("*.css"):
        for address in re.findall(r"url\(([^)]*)\)", style.read_text()):
            assert not re.match(r"[\"']?(https?:)?//", address), address
            # Each font is offered in three formats. The first one is there, and is used.
            assert not address.endswith(".woff2") or (style.parent / address).is_file()


@pytest.mark.parametrize(
    "kind", [r"!\[[^]]*\]\(https?:", r"<(img|script|iframe|link)[^>]*https?:"]
)
def test_pages_load_nothing_from_elsewhere(kind):
    pages = [page for page in DOCS.rglob("*.md") if re.search(kind, page.read_text())]
    assert not pages


def test_formulas_are_in_the_syntax_that_katex_reads():
    """It takes `q_{\\min}`, and not `q_\\min`."""
    for path in [*DOCS.rglob("*.md"), *(ROOT / "eqx_grads").rglob("*.py")]:
        assert not re.search(r"[_^]\\+(min|max|log|exp|sin|cos|tanh)\b", path.read_text()), path


def test_the_license_of_katex_is_beside_it():
    license_ = (DOCS / "javascripts" / "katex" / "LICENSE").read_text()
    assert license_.startswith("The MIT License")


# ---------------------------------------------------------------- how the library is built

HOW = (DOCS / "guides" / "how-it-works.md").read_text()
ROOMS = _load(DOCS / "rooms.py")


def test_the_picture_shows_the_imports():
    assert ROOMS.PICTURE.read_text() == ROOMS.draw(), "Run `python docs/rooms.py`."


def test_the_page_names_the_layers():
    _, table = HOW.split("| layer |", 1)
    rows = re.findall(r"^\| (`.*?`) \|", table.split("\n\n")[0], re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == ROOMS.layers()


def test_the_paths_exist():
    places = [ROOT, *(ROOT / "eqx_grads" / room for room in ("", "ste", "testing"))]
    for path in set(re.findall(r"`(\w*/[\w/.]*|_\w+\.py)`", HOW)):
        assert any((place / path).exists() for place in places), path


# ---------------------------------------------------------------- the benchmarks

pytest.importorskip("matplotlib")
PAGE = _load(ROOT / "benchmarks" / "page.py")
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


RESULT = PAGE.Result(
    {}, "Text.\n\n| a | b | b |\n| --- | --- | --- |\n| x | 2.5 / 0.9 (3) | 4 |\n"
)


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
