"""No claim: write `docs/benchmarks.md` and its chart from the saved results.

`results/NAME.md` has what `NAME.py` printed: three lines that say by which command, on which
machine and by which clock, an empty line, and then tables with what has to be known to read
them. The page shows the claim of each script, and a part of its tables, in which the figures
of this library that are worse than the other's are bold. It begins with
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
SAVED = "https://github.com/eqx-grads/eqx-grads/blob/main/benchmarks/results"
BLUE, ORANGE, GRAY = "#3d85c6", "#e07b1a", "#888888"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eqx_grads",
    "font.size": 9,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GRAY
    ),
}


class Table(NamedTuple):
    """A part of a table of a result. The names of columns are separated by bars.

    - `columns`: which, or all.
    - `speeds`, `times`: the columns in which less than one, or more than one, is worse.
    - `rivals`: the columns of others, whose larger speed is better.
    - `without`: the rows that have this text are left out.
    """

    columns: str = ""
    speeds: str = ""
    times: str = ""
    rivals: str = ""
    without: str = "no row has this"
    number: int = 0
    note: str = ""


class Claim(NamedTuple):
    heading: str
    script: str
    tables: tuple[Table, ...]
    note: str = ""


SECTIONS = {
    "Recurrent layers": (
        Claim(
            "GRU and LSTM",
            "recurrent",
            (
                Table(
                    "layer|T, B, H, I|gates kept|bytes|states kept|bytes 2|Flax|PyTorch",
                    speeds="gates kept|states kept",
                    rivals="Flax|PyTorch",
                ),
            ),
            "Value and gradient of a layer with H units and I inputs, over T steps of B "
            "sequences: speed and bytes relative to the scan, with the batch inside / `vmap` "
            "outside. PyTorch's LSTM uses oneDNN. Compilation takes up to 1.4 times as long.",
        ),
        Claim(
            "Small layers",
            "sizes",
            (Table(speeds="speed|8 steps of one sequence with 4 units"),),
            "The program of the last column takes 11 to 20 microseconds.",
        ),
        Claim(
            "Linear recurrences",
            "recurrent",
            (
                Table(
                    "T, width|`linear_recurrence`|bytes|`associative_scan`|"
                    '`"associative"`|bytes 2',
                    speeds='`linear_recurrence`|`"associative"`',
                    number=1,
                ),
            ),
            "Speed and bytes relative to autodiff of `jax.lax.scan`. The last two columns are "
            '`method="associative"`, which is made for accelerators, relative to autodiff of '
            "`jax.lax.associative_scan`.",
        ),
        Claim(
            "Delta rules",
            "delta_rule",
            (
                Table(
                    "T, heads, size|ms|over plain|over chunks|plain, MB|chunks, MB|ours, MB",
                    speeds="over plain|over chunks",
                ),
            ),
            "For the gradient with respect to all arguments: milliseconds, the speed over "
            "both, and the temporary megabytes of each.",
        ),
    ),
    "Scans": (
        Claim(
            "`checkpoint` of `filter_scan`",
            "scans",
            (
                Table(
                    'cell|T, B, H, I|`"auto"`|bytes|`"replay"`|bytes 2|`"sqrt"`|bytes 3',
                    speeds='`"auto"`|`"replay"`|`"sqrt"`',
                    without="attention|user's|RNN",
                ),
            ),
            "Speed and bytes are relative to plain scan; the result has three more cells. "
            '`plain` means that `"auto"` chose the plain scan. A GRU over '
            '4096 steps needs 1/50 of the bytes with `"sqrt"`, at 0.97 of the speed, for a '
            "loss of the last state.",
        ),
        Claim(
            'What `"auto"` chooses, on 20 other cells',
            "auto",
            (Table(speeds="speed"),),
            "The constants of the cost model were chosen without these cells. The table is for "
            "an earlier rule. The current rule replays other shapes too, one of them at 0.92 "
            "to 1.02 of the speed.",
        ),
        Claim(
            "Online learning",
            "online",
            (Table(speeds="`online=True`"),),
            'Speed relative to `checkpoint="sqrt"`, and temporary megabytes, for 8 sequences, '
            "16 inputs and 32 units. An online scan carries as many numbers as the weights "
            "times the batch.",
        ),
        Claim(
            "Bounded loops, and `vmap` in chunks",
            "bounded_loops",
            (
                Table('steps, rows of `w`|Equinox, MB|`"sqrt"`, MB|CPU time', times="CPU time"),
                Table(number=1, note="An MLP of width 512 over 8192 examples:"),
            ),
            "If a loop takes few of its 4096 steps, the backward pass skips chunks, which "
            "takes time.",
        ),
    ),
    "Spiking neurons": (
        Claim(
            "LIF",
            "spiking",
            (Table("neurons|T, B, I, H|layer|bytes|snnTorch|Norse|Spyx", speeds="layer"),),
            "The layers ran on a busy machine, and the other libraries on a quiet one. "
            "Compilation takes up to 1.5 times as long.",
        ),
    ),
    "Losses": (
        Claim(
            "A large vocabulary",
            "linear_cross_entropy",
            (
                Table(
                    "tokens, features, vocabulary||MB|CPU|wall",
                    times="CPU|wall",
                    without="alone",
                ),
            ),
            "Where the matrix products take most of the time, it saves memory only.",
        ),
    ),
    "Solvers": (
        Claim(
            "Fixed points",
            "fixed_point",
            (Table(),),
            'Where 30 steps are enough, their autodiff is faster than `"implicit"`.',
        ),
        Claim(
            "Implicit functions",
            "implicit",
            (
                Table(
                    "system, linear solver||gradient|second|bytes",
                    times="gradient|second",
                    without="without its check|by hand",
                ),
            ),
            "Time relative to a hand-written rule around the same solver, in two runs on a "
            "busy machine. The check of the residual costs 0.05 ms.",
        ),
        Claim("Events", "events", (Table(),)),
    ),
    "Safe mathematics": (
        Claim(
            "Elementwise functions",
            "safe",
            (Table(times="time|time 2"),),
            "Value and gradient of a sum over 100,000 elements. The slowest functions compute "
            "two formulas, or a series.",
        ),
        Claim(
            "Reductions and decompositions",
            "safe_reductions",
            (Table(times="time"),),
            "Time relative to JAX's function, and bytes relative to the argument.",
        ),
    ),
    "Quantization": (
        Claim(
            "A training step of an MLP",
            "quantization",
            (Table(times="`LSQ`"),),
        ),
    ),
    "Rules": (
        Claim(
            "Eager calls and derivatives",
            "overhead",
            (Table(times="eqx_grads"),),
            "Under `jit` nothing is added: `tests/test_cost.py` compares the FLOPs and bytes "
            "of the compiled programs.",
        ),
        Claim("Drop-ins for Equinox", "drop_ins", (Table(times="ratio"),)),
        Claim("Drop-ins for JAX", "jax_drop_ins", (Table(times="ratio"),)),
        Claim(
            "`check_rule` finds the planted faults",
            "checkers",
            (Table(),),
            "Its authors planted them, and the others do not look for some kinds. "
            "The repository keeps 42 of them, of each kind. "
            "A fault counts if a checker rejects the wrong rule and accepts the right one.",
        ),
    ),
    "Host functions": (Claim("Calls of the host", "host", (Table(times="ratio"),)),),
    "Many devices": (
        Claim(
            "Two processes",
            "processes",
            (Table(times="relative to one process, same work"),),
            "By wall time, on a busy machine, two processes were no faster than one.",
        ),
    ),
    "On a GPU": (
        Claim(
            "One NVIDIA H200",
            "gpu",
            (
                Table(
                    "layer|T, B, H, I|gates kept|bytes|states kept|bytes 2|"
                    "cuDNN|bytes 3|PyTorch",
                    speeds="gates kept|states kept",
                    rivals="cuDNN|PyTorch",
                ),
                Table(number=1, note="A scan of a cell, in time and temporary memory:"),
                Table(
                    "T, width|`associative_scan`|`linear_recurrence`|speed",
                    speeds="speed",
                    number=2,
                    note="Linear recurrences against `associative_scan`, in time and MB. The "
                    "library has since changed to chunks of 16 steps. A prototype "
                    "took half the time of `associative_scan`.",
                ),
                Table(
                    "layer|T, B, I, H|plain scan|layer 2|speed",
                    speeds="speed",
                    number=4,
                    note="Spiking layers, in time and MB. Their chunks were shorter then.",
                ),
                Table(
                    "dtype|N, D, V|all logits|`lax.map`|default chunk|`chunk=4096`",
                    number=5,
                    note="`linear_cross_entropy` of N tokens with D features and a vocabulary "
                    "of V, in time and MB. It saves bytes, and no time. Since then, a "
                    "default chunk has at least $2^{25}$ logits.",
                ),
            ),
            "cuDNN is `jax.experimental.rnn`, and PyTorch calls cuDNN too.",
        ),
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
    return Result(dict(line.split(": ", 1) for line in header.splitlines()), body.strip())


def table_of(result: Result, number: int = 0) -> list[dict[str, str]]:
    """A table, by the names of its columns; a name that is there twice is numbered."""
    tables = [text for text in result.body.split("\n\n") if text.startswith("|")]
    lines = tables[number].splitlines()
    rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines]
    names = rows[0]
    seen = [
        f"{name} {names[:i].count(name) + 1}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]
    return [dict(zip(seen, row, strict=True)) for row in rows[2:]]


def numbers(cell: str) -> list[float]:
    """The numbers of a cell, such as `5.6 ms, 19 MB`, without what is in brackets."""
    cell = re.sub(r"\(.*?\)", "", cell).replace(" µs", "").replace(" ms", "")
    cell = re.sub(r"(?<=\d),(?=\d{3})", "", cell)
    return [float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", cell)]


def first_number(cell: str) -> float:
    return numbers(cell)[0]


def _names(text: str) -> list[str]:
    return text.split("|") if text else []


def _bold(table: Table, row: dict[str, str]) -> set[str]:
    """The columns in which this library is worse."""
    rivals = [max(numbers(row[name]), default=0.0) for name in _names(table.rivals)]
    best, worse = max([1.0, *rivals]), set()
    for name in _names(table.speeds):
        figures = numbers(row[name])
        speeds = figures[:1] if ", " in row[name] else figures  # `0.74, 0.11`: speed and MB
        worse |= {name} if min(speeds, default=best) < best else set()
    for name in _names(table.times):
        worse |= {name} if max(numbers(row[name]), default=0.0) > 1 else set()
    return worse


def written(table: Table, result: Result) -> str:
    rows = table_of(result, table.number)
    columns = _names(table.columns) or list(rows[0])
    titles = [re.sub(r" \d$", "", name) if name in rows[0] else name for name in columns]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        if not re.search(table.without, " ".join(row.values())):
            bold = _bold(table, row)
            cells = [f"**{row[name]}**" if name in bold else row[name] for name in columns]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*([table.note, ""] if table.note else []), *lines])


def page() -> str:
    parts, seen = [(RESULTS / "introduction.md").read_text()], set()
    for title, claims in SECTIONS.items():
        parts.append(f"## {title}\n")
        for claim in claims:
            text = (
                [claim.note] if claim.script in seen else [claim_of(claim.script), claim.note]
            )
            seen.add(claim.script)
            result = result_of(claim.script)
            tables = "\n\n".join(written(table, result) for table in claim.tables)
            parts.append(f"### {claim.heading}\n\n{' '.join(text).strip()}\n\n{tables}\n")
    parts.append(
        "## How each was measured\n\nThe results have all shapes, and more remarks. The "
        "machine was two shared cores of an AMD EPYC, x86-64, except for the GPU.\n"
    )
    parts.append("| result of `benchmarks/` | versions | clock |\n|---|---|---|")
    for name in dict.fromkeys(claim.script for claims in SECTIONS.values() for claim in claims):
        header = result_of(name).header
        versions = re.sub(r"two (shared )?cores of an AMD EPYC, x86-64; ", "", header["on"])
        link = f"[`{name}.py`]({SAVED}/{name}.md)"
        parts.append(f"| {link} | {versions} | {header['clock']} |")
    return "\n".join(parts) + "\n"


# ------------------------------------------------------------------------------ the chart


class Bar(NamedTuple):
    """The speeds and the bytes of one thing relative to the other, of all shapes."""

    label: str
    other: str
    speeds: list[float]
    bytes: list[float]
    on_gpu: bool = False


def bars() -> list[Bar]:
    recurrent, scans, spiking = map(result_of, ("recurrent", "scans", "spiking"))
    gpu, online, fixed = map(result_of, ("gpu", "online", "fixed_point"))
    layers, gpu_layers = table_of(recurrent), table_of(gpu)
    replayed = [
        r for r in table_of(scans) if r['`"auto"`'] != "plain" and float(r["bytes"]) < 1
    ]
    losses = table_of(result_of("linear_cross_entropy"))
    logits, ours = (
        [r for r in losses if name in r[""]] for name in ("all logits", "linear_cross_entropy")
    )
    pairs = list(zip(logits, ours, strict=True))
    points = {r[""].split(" (")[0]: r for r in table_of(fixed)}
    steps, contraction = points["30 steps in a scan, by autodiff"], points['`"fixed_point"`']

    def flat(rows, name):
        return [x for row in rows for x in numbers(row[name])]

    def ratios(rows, other, mine, place):
        return [numbers(r[other])[place] / numbers(r[mine])[place] for r in rows]

    def inverse(xs):
        return [1 / x for x in xs]

    gpu_scans, gpu_spiking, gpu_losses = (table_of(gpu, i) for i in (1, 4, 5))
    replay = '`checkpoint="replay"`'
    long = [r for r in table_of(online) if r["T"] == "100,000"]
    return [
        Bar("GRU, LSTM", "scan of the cell", flat(layers, "gates kept"), flat(layers, "bytes")),
        Bar(
            "GRU, LSTM",
            "scan of the cell",
            flat(gpu_layers, "states kept"),
            flat(gpu_layers, "bytes 2"),
            True,
        ),
        Bar(
            'checkpoint="auto"',
            "plain scan",
            flat(replayed, '`"auto"`'),
            flat(replayed, "bytes"),
        ),
        Bar(
            'checkpoint="replay"',
            "plain scan",
            ratios(gpu_scans, "plain scan", replay, 0),
            inverse(ratios(gpu_scans, "plain scan", replay, 1)),
            True,
        ),
        Bar(
            'checkpoint="sqrt"',
            "plain scan",
            flat(table_of(scans), '`"sqrt"`'),
            flat(table_of(scans), "bytes 3"),
        ),
        Bar(
            "online, 100,000 steps",
            "plain scan",
            ratios(long, "`online=True`", "plain scan", 0),
            inverse(ratios(long, "plain scan", "`online=True`", 1)),
        ),
        Bar(
            "LIF",
            "scan of the cell",
            flat(table_of(spiking), "layer"),
            flat(table_of(spiking), "bytes"),
        ),
        Bar(
            "LIF",
            "scan of the cell",
            flat(gpu_spiking, "speed"),
            inverse(ratios(gpu_spiking, "plain scan", "layer 2", 1)),
            True,
        ),
        Bar(
            "linear_cross_entropy",
            "all logits",
            [float(a["CPU"]) / float(b["CPU"]) for a, b in pairs],
            [float(b["MB"]) / float(a["MB"]) for a, b in pairs],
        ),
        Bar(
            "linear_cross_entropy",
            "all logits",
            ratios(gpu_losses, "all logits", "default chunk", 0),
            inverse(ratios(gpu_losses, "all logits", "default chunk", 1)),
            True,
        ),
        Bar(
            "fixed_point",
            "autodiff of 30 steps",
            [first_number(contraction["speed"]) / first_number(steps["speed"])],
            [
                first_number(contraction["temporary memory"])
                / first_number(steps["temporary memory"])
            ],
        ),
    ]


def chart() -> Figure:
    """For each thing, the range over all shapes and the median: speed, and bytes."""
    rows = bars()[::-1]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name, title in (
        (left, "speeds", "speed (right of 1 is faster)"),
        (right, "bytes", "temporary bytes (left of 1 is less)"),
    ):
        for y, row in enumerate(rows):
            xs, color = sorted(getattr(row, name)), ORANGE if row.on_gpu else BLUE
            axes.plot(
                [xs[0], xs[-1]], [y, y], color=color, linewidth=2.5, solid_capstyle="round"
            )
            axes.plot([xs[len(xs) // 2]], [y], "o", color=color)
        axes.axvline(1, color=GRAY, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.minorticks_off()
    left.set_xticks([0.5, 1, 2], ["1/2", "1", "2"])
    left.set_xlim(0.45, 2.7)
    right.set_xticks([1e-4, 1e-3, 1e-2, 0.1, 1], ["1e-4", "1e-3", "0.01", "0.1", "1"])
    labels = [f"{row.label} ({row.other})" for row in rows]
    left.set_yticks(range(len(rows)), labels)
    handles = [
        left.plot([], [], "o-", color=c, label=n)[0]
        for c, n in ((BLUE, "CPU"), (ORANGE, "GPU"))
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="write nothing, for the tests")
    args = parser.parse_args()
    text = page()
    with mpl.rc_context(STYLE):
        figure = chart()
        if args.quick:
            print(text)
            return
        metadata = {"Date": None, "Creator": None}
        path = DOCS / "images" / "benchmarks.svg"
        figure.savefig(path, metadata=metadata, transparent=True)
    (DOCS / "benchmarks.md").write_text(text)


if __name__ == "__main__":
    main()
