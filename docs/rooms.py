"""Draws `docs/images/rooms.svg`, the picture in "How it works": `python docs/rooms.py`.

A room is a package or a file in `eqx_grads/`. The rows are the layers of `pyproject.toml`, the
text in a box is the first sentence of the room's docstring, and an arrow is an import. An arrow
that follows from two or more others is left out of the drawing; the title of a box (shown by a
browser when the mouse is over it) lists every room that it imports.
"""

import ast
import html
import pathlib
import textwrap
import tomllib
from typing import NamedTuple


ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "eqx_grads"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

# In pixels: the picture, a box, the space between boxes and between rows, a line of text.
WIDTH, BOX, GAP, ROW_GAP, MARGIN, LINE = 1430, 245, 36, 44, 20, 15
CHARACTERS = 34  # in a line of text


def layers() -> list[list[str]]:
    """The rooms of each layer, from top to bottom."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = config["tool"]["importlinter"]["contracts"]
    return [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]


def imports() -> set[tuple[str, str]]:
    """The pairs of rooms whose first one imports from the second."""
    pairs = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parent.parts
        room = package[0] if package else path.stem
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.ImportFrom) and node.level):
                continue
            start = package[: len(package) - node.level + 1]
            for alias in node.names:
                other = [*start, *(node.module or "").split("."), alias.name]
                pairs.add((room, next(part for part in other if part)))
    return {(a, b) for a, b in pairs if a not in (b, "__init__")}


def described(room: str) -> str:
    """The first sentence of the docstring of a room."""
    path = PACKAGE / room / "__init__.py"
    path = path if path.exists() else PACKAGE / f"{room}.py"
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return doc.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".").replace("`", "")


def inner_rooms(room: str) -> list[str]:
    return sorted(path.parent.name for path in (PACKAGE / room).glob("*/__init__.py"))


def without_implied(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The arrows that do not follow from two or more others."""
    targets = {a: {c for b, c in arrows if b == a} for a, _ in arrows}

    def reached(room):
        below = targets.get(room, set())
        return below.union(*(reached(other) for other in below))

    return sorted(
        (a, b) for a, b in arrows if not any(b in reached(other) for other in targets[a])
    )


def draw() -> str:
    """The picture, as SVG."""
    arrows, rows = imports(), _rows()
    bottom = rows[-1][0].y + rows[-1][0].height
    drawn, used = without_implied(arrows), [set() for _ in rows]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + MARGIN}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#00798c"/></marker>',
        '<rect width="100%" height="100%" fill="white"/>',
        *(_arrow(rows, source, target, drawn, used) for source, target in drawn),
        *(_draw_box(box, arrows) for row in rows for box in row),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class Box(NamedTuple):
    room: str
    x: int
    y: int
    height: int
    lines: list[str]


def _rows() -> list[list[Box]]:
    rows, y = [], MARGIN
    for rooms in layers():
        texts = [_text(room) for room in rooms]
        height = 34 + LINE * max(map(len, texts))
        left = (WIDTH - len(rooms) * BOX - (len(rooms) - 1) * GAP) // 2
        xs = [left + i * (BOX + GAP) for i in range(len(rooms))]
        rows.append(
            [Box(r, x, y, height, text) for r, x, text in zip(rooms, xs, texts, strict=True)]
        )
        y += height + ROW_GAP
    return rows


def _text(room: str) -> list[str]:
    inner = ", ".join(inner_rooms(room))
    lines = textwrap.wrap(described(room), CHARACTERS)
    return lines + (textwrap.wrap(f"inside: {inner}", CHARACTERS) if inner else [])


def _arrow(rows, source, target, drawn, used) -> str:
    """From the bottom of a box to the top of another, around the boxes of the rows between.

    `used`: for each row, where arrows pass through it already.
    """
    boxes = {box.room: (box, i) for i, row in enumerate(rows) for box in row}
    (start, first), (end, last) = boxes[source], boxes[target]
    x = _end(boxes, source, target, [b for a, b in drawn if a == source])
    x_end = _end(boxes, target, source, [a for a, b in drawn if b == target])
    path, y = f"M{x} {start.y + start.height}", start.y + start.height
    for i in range(first + 1, last):
        between = rows[i][0]
        x_next = _free(rows[i], x + (x_end - x) // (last - i + 1), used[i])
        used[i].add(x_next)
        path += _curve(x, y, x_next, between.y - 8) + f"V{between.y + between.height + 8}"
        x, y = x_next, between.y + between.height + 8
    path += _curve(x, y, x_end, end.y)
    return f'<path d="{path}" fill="none" stroke="#00798c" marker-end="url(#tip)"/>'


def _curve(x1, y1, x2, y2) -> str:
    middle = (y1 + y2) // 2
    return f"C{x1} {middle} {x2} {middle} {x2} {y2}"


def _end(boxes, room, other, others) -> int:
    """Where an arrow begins or ends: every arrow of a box has a place of its own."""
    others = sorted(others, key=lambda name: (boxes[name][0].x, name))
    return boxes[room][0].x + BOX * (1 + others.index(other)) // (1 + len(others))


def _free(row, x: int, used: set[int]) -> int:
    """The place nearest to `x` at which an arrow passes between the boxes of a row."""

    def is_free(place):
        in_box = any(box.x - 10 < place < box.x + BOX + 10 for box in row)
        return not in_box and all(abs(place - other) >= 8 for other in used)

    return min(filter(is_free, range(MARGIN // 2, WIDTH)), key=lambda place: abs(place - x))


def _draw_box(box: Box, arrows) -> str:
    room, x, y, height, lines = box
    below = ", ".join(sorted(b for a, b in arrows if a == room)) or "no other room"
    texts = [
        f'<text x="{x + 10}" y="{y + 38 + LINE * i}" fill="#444">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f"<g><title>{room} imports {below}</title>",
            f'<rect x="{x}" y="{y}" width="{BOX}" height="{height}" rx="4" fill="#f3f7f8" '
            'stroke="#9db8bd"/>',
            f'<text x="{x + 10}" y="{y + 20}" font-family="monospace" font-size="14" '
            f'font-weight="bold" fill="#2b2b2b">{room}</text>',
            *texts,
            "</g>",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
