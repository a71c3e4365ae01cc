"""The recipes: twenty-one questions, each with its thread. `test_docs` runs their code."""

import pathlib
import re

import pytest


PAGES = sorted((pathlib.Path(__file__).parents[1] / "docs" / "recipes").glob("*.md"))
INDEX = next(page for page in PAGES if page.name == "index.md").read_text()
RECIPE = re.compile(
    r"^## (?P<question>[^\n]*\?)\n\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
THREAD = re.compile(r"\[\w+#\d+\]\(https://github\.com/[\w-]+/[\w-]+/(?:issues|pull)/\d+\)")
RECIPES = {
    match["question"]: (page.name, match["text"])
    for page in PAGES
    for match in RECIPE.finditer(page.read_text())
}


@pytest.mark.thorough
def test_the_index_lists_all_questions():
    listed = re.findall(r"^- \[(.*\?)\]\(([\w-]+\.md)#", INDEX, re.MULTILINE)
    assert len(listed) == 21
    assert dict(listed) == {question: page for question, (page, _) in RECIPES.items()}


@pytest.mark.parametrize("question", RECIPES)
def test_a_recipe_starts_with_its_thread_and_shows_what_it_prints(question):
    page, text = RECIPES[question]
    thread = THREAD.match(text)
    assert thread, "Link the thread in which it was asked."
    (entry,) = (
        line for line in INDEX.splitlines() if line.startswith(f"- [{question}]({page}#")
    )
    assert entry.endswith(f"({thread[0]})")
    blocks = re.findall(r"^```(\w+)$", text, re.MULTILINE)
    assert blocks == ["python", "text"]
