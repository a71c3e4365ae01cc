"""Every code block that a reader may copy is run: README, docs, docstrings.

The blocks of one page (or one docstring) are one program. They run in this process, so
under the strict promotion and the run-time type checks of all other tests. Pages that
show what they print print it.
"""

import ast
import importlib.util
import pathlib
import re
import sys
import textwrap
import types

import jax
import pytest

from .helpers import skip_without_checkpointed_loops


pytestmark = pytest.mark.thorough
ROOT = pathlib.Path(__file__).parents[1]


def _outputs():
    spec = importlib.util.spec_from_file_location("outputs", ROOT / "docs" / "outputs.py")
    outputs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(outputs)
    return outputs


OUTPUTS = _outputs()
FENCE = re.compile(
    r'^( *)```python(?: title="[^"\n]*")?\n(.*?)^\1```', re.MULTILINE | re.DOTALL
)


def _blocks(text: str, first_line: int = 1) -> str:
    """The code blocks of `text` as one program, at their original line numbers."""
    program, line = "", 1
    for match in FENCE.finditer(text):
        code = textwrap.dedent(match[2])
        if code.startswith("--8<--"):  # an example, included; `test_examples` runs it
            continue
        start = first_line + text.count("\n", 0, match.start(2))
        program += "\n" * (start - line) + code
        line = start + code.count("\n")
    return program


def _programs():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text()
        # The tests below run those with outputs.
        if path not in OUTPUTS.PAGES:
            yield path, "", _blocks(text)
    for path in sorted((ROOT / "eqx_grads").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text if "```python" in text else "")):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
                doc = ast.get_docstring(node, clean=False)
                if doc is not None and not OUTPUTS.has_outputs(doc):
                    name = "" if isinstance(node, ast.Module) else node.name
                    yield path, name, _blocks(doc, node.body[0].lineno)


# They run all checks on several rules, calls of the host in loops, or whole layers.
LONG = ("testing-a-rule.md", "host-code.md", "quantize.md", "solvers.md")
PROGRAMS = [
    pytest.param(
        path,
        program,
        id=f"{path.relative_to(ROOT)}:{name}",
        marks=pytest.mark.slow if path.name in LONG else (),
    )
    for path, name, program in _programs()
    if program
]


@pytest.mark.parametrize(("path", "program"), PROGRAMS)
def test_code_blocks_run(path, program, monkeypatch):
    # A module of its own, as a script has: classes look theirs up, and so does pickle.
    module = types.ModuleType("code_blocks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(program, str(path), "exec"), vars(module))


WITH_OUTPUTS = [
    pytest.param(path, marks=pytest.mark.slow if path.name in LONG else ())
    for path in OUTPUTS.PAGES
]


@pytest.mark.parametrize("path", WITH_OUTPUTS, ids=lambda path: path.name)
def test_pages_print_what_they_say(path, monkeypatch, tmp_path):
    if path == ROOT / "docs" / "guides" / "events.md":  # a loop of Diffrax, differentiated
        skip_without_checkpointed_loops()
    monkeypatch.setitem(sys.modules, "code_blocks", None)  # restored after the test
    text = path.read_text()
    printed = OUTPUTS.with_outputs(text, tmp_path)
    # Types are others in double precision, and bytes with JAX 0.12, which keeps less.
    is_exact = path.parent.name != "my-gradient-is" and " MB" not in text
    if not jax.config.jax_enable_x64 and (is_exact or jax.__version_info__ < (0, 11)):
        assert printed == text, f"Run `python docs/outputs.py {path.relative_to(ROOT)}`."


def _docstrings_with_outputs():
    for path in OUTPUTS.FILES:
        source = path.read_text()
        for name, (first, end) in OUTPUTS.docstrings(source).items():
            text = "".join(source.splitlines(keepends=True)[first:end])
            yield pytest.param(path, text, id=f"{path.relative_to(ROOT)}:{name}")


@pytest.mark.parametrize(("path", "text"), list(_docstrings_with_outputs()))
def test_docstrings_print_what_they_say(path, text, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "code_blocks", None)
    printed = OUTPUTS.with_outputs(text, tmp_path)
    if not jax.config.jax_enable_x64:  # with which types, draws and digits are others
        assert printed == text, f"Run `python docs/outputs.py {path.relative_to(ROOT)}`."
