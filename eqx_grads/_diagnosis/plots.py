"""`plot_gradient_flow`: gradient norms, layers by steps. And the picture of a memory report."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import ArrayLike

from .._errors import optional_import, rule_error
from .report import show_bytes, show_place


def plot_gradient_flow(
    flow: Mapping[str, ArrayLike],
    *,
    axes: Any = None,
    limits: tuple[float, float] | None = None,
) -> Any:
    r"""Plot the result of [`eqx_grads.gradient_flow`][]: layers by steps, colored by the norm
    of the gradient on a logarithmic scale.

    A norm that is zero or below the scale is black; one that is not finite is red.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp
        from matplotlib.figure import Figure

        flow = {"cell": 0.5 ** jnp.arange(20.0)[::-1], "readout": jnp.ones(1)}
        figure = Figure()
        axes = eqg.plot_gradient_flow(flow, axes=figure.add_subplot())
        assert axes.get_xlabel() == "step"
        ```

    **Arguments:**

    - `flow`: a dictionary from names to norms. The cells of a layer with fewer steps than the
        others are wider.
    - `axes`: the `matplotlib.axes.Axes` to draw in; by default, those of a new figure.
    - `limits`: the smallest and the largest norm of the scale; by default, the smallest
        positive and the largest norm in `flow`.

    **Returns:**

    The axes.

    **Raises:**

    `ModuleNotFoundError` if [Matplotlib](https://matplotlib.org), the extra `plot`, is not
    installed.
    """
    optional_import("matplotlib", "plot_gradient_flow", "plot")
    import matplotlib as mpl
    from matplotlib.colors import LogNorm

    rows = {name: np.asarray(norms, float).reshape(-1) for name, norms in flow.items()}
    if not rows:
        raise rule_error(
            "`plot_gradient_flow` was given nothing to draw.",
            do="Give it the result of `gradient_flow`, for a model with at least one layer.",
        )
    if axes is None:
        from matplotlib import pyplot

        size = (7.0, 1.2 + 0.4 * len(rows))
        axes = pyplot.subplots(figsize=size, layout="constrained")[1]

    all_norms = np.concatenate(list(rows.values()))
    low, high = _limits(all_norms) if limits is None else limits
    colors = mpl.colormaps["viridis"].with_extremes(under="black", bad="red")
    scale = LogNorm(low, high)
    steps = max(norms.size for norms in rows.values())
    mesh = None
    for i, norms in enumerate(rows.values()):
        edges = np.linspace(-0.5, steps - 0.5, norms.size + 1)
        # Zero would be masked on a logarithmic scale: put it below the scale instead.
        cells = np.ma.masked_invalid(np.where(norms == 0, low / 2, norms))[None]
        mesh = axes.pcolormesh(edges, (i - 0.5, i + 0.5), cells, cmap=colors, norm=scale)
    axes.set(xlabel="step", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows))
    extends = {(True, True): "both", (True, False): "min", (False, True): "max"}
    outside = bool(np.any(all_norms < low)), bool(np.any(all_norms > high))
    extend = extends.get(outside, "neither")
    axes.figure.colorbar(mesh, ax=axes, label="norm of the gradient", extend=extend)
    return axes


def _limits(norms) -> tuple[float, float]:
    positive = norms[np.isfinite(norms) & (norms > 0)]
    low, high = (positive.min(), positive.max()) if positive.size else (1.0, 1.0)
    # A logarithmic scale needs `low < high`.
    return (low, high) if low < high else (low / 2, high * 2)


# ---------------------------------------------------------------- memory

# A box that is less high, as a share of the axes, has no text. One that is less than a pixel or
# so is drawn together with its neighbors.
_LEAST_TEXT = 0.022
_LEAST_BOX = 0.004


def plot_memory(residuals: Sequence[Any], *, axes: Any = None) -> Any:
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
        _draw(
            axes,
            (edges[depth], edges[depth + 1]),
            (start, size, total),
            label,
            _lighter(color, (0.35, 0.5, 0.62, 0.72)[columns[depth]]),
        )
    _decorate(axes, [titles[i] for i in columns], edges, total)
    return axes


def _labels(r: Any) -> list[str]:
    first, _, rest = r.path.partition(".")
    place = show_place(r.file, r.line) or "unknown"
    shape = f"{r.dtype}[{','.join(map(str, r.shape))}]"
    steps = f"  in {r.n_steps} steps" if r.n_steps > 1 else ""
    name = "carry" if r.kind == "carry" else r.primitive
    line = f"{place}  {r.code}" if r.code else place
    return [first or "no layer", rest, line, f"{name}  {shape}{steps}"]


Rows = Sequence[tuple[list[str], Any]]


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
        yield depth, text, start, size, part
        yield from _boxes(part, depth + 1, start, total)
        start += size
    rest = [row for label in small for row in parts[label]]
    if rest:
        yield depth, f"{len(rest)} small", start, size_of(rest), rest


def _draw(axes, across, down, label, color):
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


def _decorate(axes, titles, edges, total):
    axes.set(xlim=(0, edges[-1]), ylim=(total or 1, 0))
    centers = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    axes.set_xticks(centers, titles)
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0)
    # Between 4 and 8 ticks, at multiples of a power of two.
    axes.set_yticks(range(0, total + 1, 2 ** max(0, total.bit_length() - 3)))
    axes.yaxis.set_major_formatter(lambda size, _: show_bytes(size))
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(f"{show_bytes(total)} kept for the backward pass", loc="left", fontsize=10)
