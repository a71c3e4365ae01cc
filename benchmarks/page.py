"""No claim: write `docs/benchmarks.md` and its plots from the saved results.

`results/NAME.md` has what `NAME.py` printed: three lines that say by which command, on which
machine and by which clock, an empty line, and then the tables with what has to be known to read
them. The claims on the page are those of the scripts. The page begins with
`results/introduction.md`.

    python benchmarks/page.py [--quick]

With `--quick`, nothing is written.
"""

import argparse
import ast
import pathlib
import re
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure


HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
# By section of the page, the scripts.
SECTIONS = {
    "Recurrent layers": ("recurrent", "sizes", "delta_rule"),
    "Scans": ("scans", "auto", "online", "bounded_loops"),
    "Spiking neurons": ("spiking",),
    "Losses": ("linear_cross_entropy",),
    "Solvers": ("fixed_point", "implicit", "events"),
    "Safe mathematics": ("safe", "safe_reductions"),
    "Quantization": ("quantization",),
    "Rules": ("overhead", "drop_ins", "jax_drop_ins", "checkers"),
    "Host functions": ("host",),
    "Many devices": ("processes",),
    "On a GPU": ("gpu",),
}
BLUE, LIGHT_BLUE, ORANGE, RED, GRAY = "#3d85c6", "#8fbce6", "#e07b1a", "#c0504d", "#888888"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eqx_grads",
    "font.size": 9,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GRAY
    ),
}


class Result(NamedTuple):
    header: dict[str, str]
    body: str


def claim_of(name: str) -> str:
    docstring = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""
    claim = docstring.split("\n\n")[0].replace("\n", " ").removeprefix("Claim: ")
    claim = claim.removesuffix("; `docs/benchmarks.md` has the table.")
    return claim[0].upper() + claim[1:].removesuffix(".") + "."


def result_of(name: str) -> Result:
    header, body = (RESULTS / f"{name}.md").read_text().split("\n\n", 1)
    body = re.sub(r"<!-- --8<--.*?-->\n\n", "", body)  # which part other pages include
    return Result(dict(line.split(": ", 1) for line in header.splitlines()), body.strip())


def table_of(result: Result) -> list[dict[str, str]]:
    """The first table, by the names of its columns; a name that is there twice is numbered."""
    paragraphs = result.body.split("\n\n")
    lines = next(text for text in paragraphs if text.startswith("|")).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    seen: list[str] = []
    for name in rows[0]:
        seen.append(f"{name} {seen.count(name) + 1}" if name in seen else name)
    return [dict(zip(seen, row, strict=True)) for row in rows[2:]]


def first_number(cell: str) -> float:
    return float(cell.replace(",", "").split()[0])


def page() -> str:
    parts = [(RESULTS / "introduction.md").read_text()]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts.append(f"### `{name}.py`\n\n{claim_of(name)}\n")
            header, body = result_of(name)
            where = f"{header['on']}. Clock: {header['clock']}."
            parts.append(f"`{header['command']}`: {where}\n\n{body}\n")
    return "\n".join(parts)


def speeds(result: Result) -> Figure:
    """Bars of the recurrent layers, Flax and PyTorch."""
    rows = table_of(result)[::-1]
    bars = {
        "gates kept": BLUE,
        "states kept": LIGHT_BLUE,
        "Flax": ORANGE,
        "PyTorch": RED,
    }
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, color) in enumerate(bars.items()):
        places = [row + 0.3 - 0.2 * i for row in range(len(rows))]
        axes.barh(
            places, [first_number(row[name]) for row in rows], 0.2, color=color, label=name
        )
    axes.axvline(1, color=GRAY, linewidth=0.8)
    labels = [f"{row['layer']} {row['T, B, H, I']}" for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlabel("speed relative to plain scan")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def memory(result: Result) -> Figure:
    """Temporary megabytes against the number of steps, for each cell."""
    rows = table_of(result)
    methods = {
        "plain scan": RED,
        '`"sqrt"`': ORANGE,
        "`truncate=100`": LIGHT_BLUE,
        "`online=True`": BLUE,
    }
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    for axes, cell in zip(figure.subplots(1, len(cells), sharey=True), cells, strict=True):
        mine = [row for row in rows if row["cell"] == cell]
        steps = [first_number(row["T"]) for row in mine]
        for name, color in methods.items():
            megabytes = [float(row[name].split(", ")[1]) for row in mine]
            axes.loglog(steps, megabytes, ".-", color=color, label=name.replace("`", ""))
        axes.set_title(cell)
        axes.set_xlabel("steps")
        axes.spines[["top", "right"]].set_visible(False)
        axes.minorticks_off()
    figure.axes[0].set_ylabel("MB")
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="write nothing, for the tests")
    args = parser.parse_args()
    text = page()
    with mpl.rc_context(STYLE):
        figures = {"recurrent-speed": speeds, "online-memory": memory}
        drawn = {
            name: draw(result_of(script))
            for (name, draw), script in zip(
                figures.items(), ("recurrent", "online"), strict=True
            )
        }
        if args.quick:
            print(text)
            return
        for name, figure in drawn.items():
            metadata = {"Date": None, "Creator": None}
            path = DOCS / "images" / f"{name}.svg"
            figure.savefig(path, metadata=metadata, transparent=True)
    (DOCS / "benchmarks.md").write_text(text)


if __name__ == "__main__":
    main()
