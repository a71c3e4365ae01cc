"""Make an executed notebook of each example: `python docs/notebooks.py [--quick] [NAME ...]`.

The docstring of a script becomes a text; its imports and constants, and each of its functions
and classes, a cell; and the call of `main` the last cell, which also shows the picture.
"""

import argparse
import ast
import os
import pathlib
from typing import Any


ROOT = pathlib.Path(__file__).parents[1]
# More than half a minute of CPU time. In a notebook, they run in their quick mode.
LONG = (
    "binary_network",
    "data_parallel",
    "equilibrium_digits",
    "nan_hunt",
    "speech",
    "spiking_convolution",
    "spiking_digits",
    "yin_yang",
)

LAST = """
import sys

from IPython.display import Image, display

sys.argv = {argv}
main()
display(Image("{picture}"))
"""


def cells(source: str) -> tuple[str, list[str]]:
    """The docstring of a script, and its code in pieces, comments included."""
    lines, tree = source.splitlines(), ast.parse(source)
    docstring, *nodes = tree.body
    *nodes, call = nodes  # `if __name__ == "__main__": main()`
    assert isinstance(call, ast.If), "A script ends with the call of `main`."
    pieces, end, before = [], docstring.end_lineno or 0, None
    for node in nodes:
        piece = "\n".join(lines[end : node.end_lineno])
        defines = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if pieces and not defines and before == type(node).__name__.startswith("Import"):
            pieces[-1] += "\n" + piece
        else:
            pieces.append(piece)
        # What is neither an import nor a definition is with its like.
        before = None if defines else type(node).__name__.startswith("Import")
        end = node.end_lineno or end
    return ast.get_docstring(tree) or "", [piece.strip("\n") for piece in pieces]


def notebook(path: pathlib.Path, out: pathlib.Path, *, quick: bool) -> Any:
    """The notebook of a script, not yet executed, whose picture is written to `out`."""
    import nbformat.v4 as v4

    title, _, text = cells(path.read_text())[0].partition("\n")
    out = pathlib.Path(os.path.relpath(out, path.parent))  # the notebook names no machine
    argv = [path.name, *(["--quick"] if quick else []), "--out", str(out)]
    picture = out / f"{path.stem.replace('_', '-')}.png"
    made = v4.new_notebook()
    made.metadata.kernelspec = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    made.cells = [v4.new_markdown_cell(f"# {title}\n{text}")]
    code = [f'__file__ = "{path.name}"  # the script that this notebook was made from']
    code += cells(path.read_text())[1]
    code.append(LAST.strip().format(argv=argv, picture=picture))
    made.cells += [v4.new_code_cell(cell) for cell in code]
    return made


def main():
    parser = argparse.ArgumentParser(description="Make an executed notebook of each example.")
    parser.add_argument("names", nargs="*", help="of scripts, without `.py` (all)")
    parser.add_argument("--quick", action="store_true", help="run all in their quick mode")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "notebooks")
    args = parser.parse_args()
    import nbclient
    import nbformat

    paths = [ROOT / "examples" / f"{name}.py" for name in args.names]
    args.out.mkdir(parents=True, exist_ok=True)
    for path in paths or sorted((ROOT / "examples").glob("*.py")):
        quick = args.quick or path.stem in LONG
        made = notebook(path, args.out.absolute() / "out" / path.stem, quick=quick)
        # In the folder of the examples, where their data are.
        resources = {"metadata": {"path": str(path.parent)}}
        nbclient.NotebookClient(made, timeout=1200, resources=resources).execute()
        nbformat.write(made, args.out / f"{path.stem}.ipynb")
        print(f"{args.out / path.stem}.ipynb", flush=True)


if __name__ == "__main__":
    main()
