"""The site is shown without the network, and draws its formulas by itself."""

import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()


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
