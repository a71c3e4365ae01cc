"""The picture of a `MemoryReport`: layers, lines and arrays in columns."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..._errors import optional_import
from ..report import show_place
from .residuals import is_recomputable, Residual
from .show_bytes import show_bytes


# A box that is less high, as a share of the axes, has no text. One that is less than a pixel or
# so is drawn together with its neighbors.
_LEAST_TEXT = 0.022
_LEAST_BOX = 0.004


def plot_memory(residuals: Sequence[Residual], *, axes: Any = None) -> Any:
    """Draw an icicle: each column divides the boxes of the one to the left."""
    mpl = optional_import("matplotlib", "MemoryReport.plot", "plot")
    if axes is None:
        from matplotlib import pyplot

        axes = pyplot.subplots(figsize=(11.0, 5.5), layout="constrained")[1]
    total = sum(r.bytes for r in residuals)
    rows = [(_labels(r), r) for r in residuals]
    has_parts = any(labels[1] for labels, _ in rows)
    titles = ["layer", "inner layer", "line", "array"]
    columns = [0, 1, 2, 3] if has_parts else [0, 2, 3]
    rows = [([labels[i] for i in columns], r) for labels, r in rows]
    colors = mpl.colormaps["tab20"](range(20))[:, :3]
    widths = {0: 1.0, 1: 1.3, 2: 1.9, 3: 1.7}
    edges = [0.0]
    for i in columns:
        edges.append(edges[-1] + widths[i])
    shades: dict[str, int] = {}
    for depth, label, start, size, parts in _boxes(rows, 0, 0, total):
        first = parts[0][0][0]
        color = colors[2 * shades.setdefault(first, len(shades)) % len(colors)]
        is_array = depth == len(columns) - 1
        again = is_array and all(is_recomputable(r) for _, r in parts)
        _draw(
            axes,
            (edges[depth], edges[depth + 1]),
            (start, size, total),
            label,
            _lighter(color, (0.35, 0.5, 0.62, 0.72)[columns[depth]]),
            hatch="////" if again else None,
        )
    _decorate(axes, [titles[i] for i in columns], edges, total, residuals)
    return axes


def _labels(r: Residual) -> list[str]:
    first, _, rest = r.path.partition(".")
    place = show_place(r.file, r.line) or "unknown"
    shape = f"{r.dtype}[{','.join(map(str, r.shape))}]"
    steps = f"  in {r.n_steps} steps" if r.n_steps > 1 else ""
    name = "carry" if r.kind == "carry" else r.primitive
    line = f"{place}  {r.code}" if r.code else place
    # Arrays with and without hatching are different boxes.
    array = f"{name}  {shape}{steps}" + (_AGAIN if is_recomputable(r) else "")
    return [first or "no layer", rest, line, array]


Rows = Sequence[tuple[list[str], Residual]]
_AGAIN = "\u200b"  # takes no space


def _boxes(
    rows: Rows, depth: int, start: int, total: int
) -> Iterator[tuple[int, str, int, int, Rows]]:
    """`depth, label, start, size, rows` of each box, largest first in each larger box. Those
    too small to be seen are one."""
    if not rows or depth == len(rows[0][0]):
        return
    parts: dict[str, list[Any]] = {}
    for labels, r in rows:
        parts.setdefault(labels[depth], []).append((labels, r))
    size_of = lambda part: sum(r.bytes for _, r in part)
    ordered = sorted(parts.items(), key=lambda item: -size_of(item[1]))
    small = [label for label, part in ordered if size_of(part) < _LEAST_BOX * total]
    for label, part in ordered:
        if label in small:
            continue
        size = size_of(part)
        is_array = depth == len(part[0][0]) - 1
        text = f"{len(part)} × {label}" if is_array and len(part) > 1 else label
        yield depth, text.replace(_AGAIN, ""), start, size, part
        yield from _boxes(part, depth + 1, start, total)
        start += size
    rest = [row for label in small for row in parts[label]]
    if rest:
        yield depth, f"{len(rest)} small", start, size_of(rest), rest


def _draw(axes, across, down, label, color, hatch):
    left, right = across
    start, size, total = down
    axes.barh(
        start,
        right - left,
        left=left,
        height=size,
        align="edge",
        color=color,
        edgecolor="white",
        linewidth=1.0,
        hatch=hatch,
    )
    if size < _LEAST_TEXT * total:
        return
    text = f"{label}\n{show_bytes(size)}" if size > 2.2 * _LEAST_TEXT * total else label
    drawn = axes.text(
        left + 0.04,
        start + size / 2,
        text,
        va="center",
        ha="left",
        fontsize=8,
        parse_math=False,
        clip_on=True,
    )
    # The text ends where the box does.
    box = axes.patches[-1]
    drawn.set_clip_path(box)


def _lighter(color, share):
    return tuple(c + (1 - c) * share for c in color)


def _decorate(axes, titles, edges, total, residuals):
    axes.set(xlim=(0, edges[-1]), ylim=(total or 1, 0))
    centers = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    axes.set_xticks(centers, titles)
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0)
    # Between 4 and 8 ticks, at multiples of a power of two.
    axes.set_yticks(range(0, total + 1, 2 ** max(0, total.bit_length() - 3)))
    axes.yaxis.set_major_formatter(lambda size, _: show_bytes(size))
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    title = f"{show_bytes(total)} kept for the backward pass"
    if any(map(is_recomputable, residuals)):
        title += "  (hatched: elementwise from the rest)"
    axes.set_title(title, loc="left", fontsize=10)
