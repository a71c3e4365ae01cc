"""Run the pages that show what they print, and write what they print into their `text` blocks.

A page is one program. Its file has the title of the page's first block, as in
`python title="ball.py"`, and the blocks follow each other in it. A `text` block has what the
blocks between it and the one before print. `...` in it stands for any text, and a block with it
is written by hand. A `text` block above all code is no output, and neither is one with a title.

    python docs/outputs.py              # all pages
    python docs/outputs.py docs/index.md
"""

import contextlib
import doctest
import io
import pathlib
import re
import sys
import tempfile
import types


DOCS = pathlib.Path(__file__).parent
_BLOCK = re.compile(
    r'^```(python|text)(?: title="([^"\n]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL
)


def _blocks(text: str) -> list[re.Match]:
    """The programs of a page, and its outputs."""
    blocks = [block for block in _BLOCK.finditer(text) if not (block[1] == "text" and block[2])]
    while blocks and blocks[0][1] == "text":
        blocks.pop(0)
    # An example that is included is run by its own test, and so is a page that includes one.
    return [] if any(block[3].startswith("--8<--") for block in blocks) else blocks


def has_outputs(text: str) -> bool:
    return any(block[1] == "text" for block in _blocks(text))


_ALL = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in _ALL if has_outputs(page.read_text())]


def _output(written: str, printed: str) -> str:
    """What was printed; what is written, if they agree but for `...`."""
    printed = re.sub(" +$", "", printed, flags=re.MULTILINE).strip("\n") + "\n"
    agree = doctest.OutputChecker().check_output(written, printed, doctest.ELLIPSIS)
    return written if agree else printed


def with_outputs(text: str, folder: pathlib.Path) -> str:
    """Run a page, in a file in `folder`, and return the page with what it prints."""
    blocks = _blocks(text)
    file = folder / (blocks[0][2] or "page.py")
    file.write_text("\n".join(block[3] for block in blocks if block[1] == "python"))
    # Classes look their module up, and so does pickle.
    module = sys.modules["code_blocks"] = types.ModuleType("code_blocks")
    parts, end, first_line, printed = [], 0, 0, io.StringIO()
    for block in blocks:
        parts.append(text[end : block.start(3)])
        end = block.end(3)
        if block[1] == "text":
            parts.append(_output(block[3], printed.getvalue().replace(f"{folder}/", "")))
            printed = io.StringIO()
            continue
        parts.append(block[3])
        code = compile("\n" * first_line + block[3], str(file), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
        first_line += block[3].count("\n") + 1
    return "".join([*parts, text[end:]])


if __name__ == "__main__":
    for page in [pathlib.Path(name) for name in sys.argv[1:]] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(with_outputs(page.read_text(), pathlib.Path(folder)))
