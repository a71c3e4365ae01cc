"""How a report is shown: a headline, a table of what was found, and a text for each cure."""

import abc
import html
from collections.abc import Sequence
from typing import Any


class AbstractReport(abc.ABC):
    """What a diagnosis found. False if that is nothing.

    `print` shows a headline, a table with a line for each record of `found`, and notes; a
    notebook shows the same as HTML.
    """

    found: Sequence[Any]

    @property
    @abc.abstractmethod
    def headline(self) -> str:
        """One sentence that says what was found."""

    @abc.abstractmethod
    def rows(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """The names of the columns, and the cells of each record."""

    def notes(self) -> Sequence[str]:
        """Sentences below the table, such as what to do."""
        return ()

    def __bool__(self) -> bool:
        return bool(self.found)

    def __str__(self) -> str:
        columns, rows = self.rows()
        parts = [self.headline]
        if rows:
            parts.append(text_table(columns, rows))
        parts.extend(self.notes())
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns, rows = self.rows()
        parts = [f"<p><b>{html.escape(self.headline)}</b></p>"]
        if rows:
            parts.append(_html_table(columns, rows))
        parts.extend(f"<p>{html.escape(note)}</p>" for note in self.notes())
        return "\n".join(parts)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, width=48) -> str:
    """Aligned columns. A cell longer than `width` is continued on the next line."""
    # A column without content is left out.
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    cells = [[_wrap(row[i], width) for i in kept] for row in rows]
    head = [[columns[i]] for i in kept]
    widths = [
        max(len(text) for row in [head, *cells] for text in row[i]) for i in range(len(kept))
    ]
    lines = []
    for row in [head, [["-" * w] for w in widths], *cells]:
        for k in range(max(map(len, row))):
            texts = [cell[k] if k < len(cell) else "" for cell in row]
            line = "  ".join(t.ljust(w) for t, w in zip(texts, widths, strict=True))
            lines.append(line.rstrip())
    return "\n".join(lines)


def _wrap(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def _html_table(columns, rows) -> str:
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    line = lambda tag, cells: (
        "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"
    )
    body = "\n".join(line("td", [row[i] for i in kept]) for row in rows)
    return f"<table>\n{line('th', [columns[i] for i in kept])}\n{body}\n</table>"
