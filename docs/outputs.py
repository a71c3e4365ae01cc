"""Run the pages and docstrings that show what they print, and write their `text` blocks.

A page, or a docstring, is one program. Its file has the title of the first block, as in
`python title="ball.py"`, and the blocks follow each other in it. A `text` block has what the
blocks between it and the one before print. `...` in it matches any text, and a block with it
is written by hand. A `text` block above all code, or with a title, is not an output.

    python docs/outputs.py              # all pages, and all docstrings
    python docs/outputs.py docs/index.md eqx_grads/ste/_uniform.py
"""

import ast
import contextlib
import doctest
import functools
import io
import pathlib
import re
import sys
import tempfile
import textwrap
import types


ROOT = pathlib.Path(__file__).parents[1]
_BLOCK = re.compile(
    r'^(?P<indent> *)```(?P<kind>python|text)(?: title="(?P<title>[^"\n]*)")?\n'
    r"(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)


def _blocks(text: str) -> list[re.Match]:
    """The programs of a page, and its outputs."""
    blocks = [b for b in _BLOCK.finditer(text) if not (b["kind"] == "text" and b["title"])]
    while blocks and blocks[0]["kind"] == "text":
        blocks.pop(0)
    # An example that is included is run by its own test, and so is a page that includes one.
    return [] if any(b["text"].startswith("--8<--") for b in blocks) else blocks


def has_outputs(text: str) -> bool:
    return any(block["kind"] == "text" for block in _blocks(text))


_ALL = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in _ALL if has_outputs(page.read_text())]


@functools.cache
def docstrings(source: str) -> dict[str, tuple[int, int]]:
    """The first line and the end of each docstring with outputs, by what it documents."""
    lines, found = source.splitlines(keepends=True), {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
            if ast.get_docstring(node) is not None:
                first, end = node.body[0].lineno - 1, node.body[0].end_lineno or 0
                if has_outputs("".join(lines[first:end])):
                    found[getattr(node, "name", "")] = first, end
    return found


FILES = [
    file
    for file in sorted((ROOT / "eqx_grads").rglob("*.py"))
    if "```text" in file.read_text() and docstrings(file.read_text())
]


def _output(written: str, printed: str) -> str:
    """The printed text, or the written one if they agree except for `...`."""
    printed = re.sub(" +$", "", printed, flags=re.MULTILINE).strip("\n") + "\n"
    agree = doctest.OutputChecker().check_output(written, printed, doctest.ELLIPSIS)
    return written if agree else printed


def with_outputs(text: str, folder: pathlib.Path) -> str:
    """Run a page or a docstring, in a file in `folder`, and return it with what it prints."""
    blocks = _blocks(text)
    codes = [textwrap.dedent(block["text"]) for block in blocks]
    file = folder / (blocks[0]["title"] or "page.py")
    programs = [c for b, c in zip(blocks, codes, strict=True) if b["kind"] == "python"]
    file.write_text("\n".join(programs))
    # Classes look their module up, and so does pickle.
    module = sys.modules["code_blocks"] = types.ModuleType("code_blocks")
    parts, end, first_line, printed = [], 0, 0, io.StringIO()
    for block, code in zip(blocks, codes, strict=True):
        parts.append(text[end : block.start("text")])
        end = block.end("text")
        if block["kind"] == "text":
            output = _output(code, printed.getvalue().replace(f"{folder}/", ""))
            parts.append(textwrap.indent(output, block["indent"]))
            printed = io.StringIO()
            continue
        parts.append(block["text"])
        program = compile("\n" * first_line + code, str(file), "exec")
        with contextlib.redirect_stdout(printed):
            exec(program, vars(module))
        first_line += code.count("\n") + 1
    return "".join([*parts, text[end:]])


def _of_file(source: str) -> str:
    """The source of a module, whose docstrings show what they print."""
    lines = source.splitlines(keepends=True)
    for first, end in sorted(docstrings(source).values(), reverse=True):
        with tempfile.TemporaryDirectory() as folder:
            lines[first:end] = [with_outputs("".join(lines[first:end]), pathlib.Path(folder))]
    return "".join(lines)


if __name__ == "__main__":
    for path in [pathlib.Path(name) for name in sys.argv[1:]] or [*PAGES, *FILES]:
        with tempfile.TemporaryDirectory() as folder:
            text, folder = path.read_text(), pathlib.Path(folder)
            text = _of_file(text) if path.suffix == ".py" else with_outputs(text, folder)
            path.write_text(text)
