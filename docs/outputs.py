"""Run the guide pages, and write what they print into their `text` blocks.

A page is one program. Its file has the title of the page's first block, as in
`python title="ball.py"`, and the blocks follow each other in it. A `text` block has what the
blocks between it and the one before print.

    python docs/outputs.py
"""

import contextlib
import io
import pathlib
import re
import sys
import tempfile
import types


PAGES = sorted((pathlib.Path(__file__).parent / "guides" / "my-gradient-is").glob("*.md"))
_BLOCK = re.compile(
    r'^```(python|text)(?: title="([^"\n]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL
)


def title_of(text: str) -> str:
    """The name of the file of a page, or empty if the page has none."""
    first = _BLOCK.search(text)
    return (first[2] or "") if first else ""


def with_outputs(text: str, folder: pathlib.Path) -> str:
    """Run a page, in a file in `folder`, and return the page with what it prints."""
    blocks = list(_BLOCK.finditer(text))
    file = folder / title_of(text)
    file.write_text("\n".join(block[3] for block in blocks if block[1] == "python"))
    # Classes look their module up, and so does pickle.
    module = sys.modules["code_blocks"] = types.ModuleType("code_blocks")
    parts, end, first_line, printed = [], 0, 0, io.StringIO()
    for block in blocks:
        parts.append(text[end : block.start(3)])
        end = block.end(3)
        if block[1] == "text":
            parts.append(printed.getvalue().rstrip("\n") + "\n")
            printed = io.StringIO()
            continue
        parts.append(block[3])
        code = compile("\n" * first_line + block[3], str(file), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
        first_line += block[3].count("\n") + 1
    return "".join([*parts, text[end:]])


if __name__ == "__main__":
    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            text = page.read_text()
            if title_of(text):
                page.write_text(with_outputs(text, pathlib.Path(folder)))
