"""Code that all reports share: the fields of a record, and how a report is shown."""

import abc
import dataclasses
import itertools
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractRecord:
    """Something that a report found, and where.

    - `kind`: what it is, in a word or two. The documentation of each tool lists its kinds.
    - `leaf`: the path of the leaf of the model that it is about.
    - `primitive`: the operation; the name of the function for a call of a function with a rule,
        and the name of the array for an input of the loss.
    - `file`, `line`, `code`: the line of your code that it is on, and the text of that line.
        `column`: where the operation is in `code`, from zero, if that is known.
    - `library`: the place in an installed package that this line calls, or that calls it.
    - `path`: the path of the layer that the operation is in.
    - `step`: the step of each loop around the operation, outermost first.
    - `cure`: what to do, in sentences.

    A field that does not apply is empty, and 0 for `line`.
    """

    kind: str
    leaf: str = ""
    primitive: str = ""
    file: str = ""
    line: int = 0
    code: str = ""
    column: int = dataclasses.field(default=0, compare=False)
    library: str = ""
    path: str = ""
    step: tuple[int, ...] = ()
    cure: str = ""


# The columns of these fields, which are the first ones of every table.
COLUMNS = ("leaf", "kind", "operation", "line", "code", "layer", "step")

_MOST_ROWS = 12
_WIDEST_TABLE = 100
_WIDEST_CELL, _NARROWEST_CELL = 42, 9
_WIDEST_CODE = 32
_WIDEST_LINE = 96


def cells(record: AbstractRecord, *, kind: str = "", step: str = "") -> tuple[str, ...]:
    """The cells of a record in `COLUMNS`. A text that is given replaces the field."""
    return (
        record.leaf,
        kind or record.kind,
        record.primitive,
        show_place(record.file, record.line),
        _cut(record.code, record.column),
        record.path,
        step or ", ".join(map(str, record.step)),
    )


def with_detail(record: Any) -> str:
    """The kind, and the detail if there is one."""
    return f"{record.kind}: {record.detail}" if record.detail else record.kind


def rows_by_leaf(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for all that differ in the first cell only, which names their leaves."""
    leaves: dict[tuple[str, ...], list[str]] = {}
    for leaf, *rest in rows:
        leaves.setdefault(tuple(rest), []).append(leaf)
    return [(show_list(list(dict.fromkeys(of)), 4), *rest) for rest, of in leaves.items()]


def _cut(code: str, column: int) -> str:
    """The part of a line that has the operation, which begins at a column."""
    first = min(column, len(code) - (_WIDEST_CODE - 3))
    if first > 3 and column > _WIDEST_CODE // 2:
        code = "..." + code[first:]
    return _shortened(code, _WIDEST_CODE)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def show_place(file: str, line: int) -> str:
    """Such as `train.py:12`; empty if the file is not known."""
    return f"{os.path.basename(file)}:{line}" if file else ""


def show_list(names: Sequence[str], most: int) -> str:
    """Such as `a, b and 3 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def count(n: int, noun: str, plural: str = "") -> str:
    """Such as `1 cause` and `2 causes`."""
    return f"{n} {noun if n == 1 else plural or f'{noun}s'}"


def show_bytes(n: int | float) -> str:
    """Such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} GiB"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text below the names of columns. A column without content is not shown.

    - `source`: the attribute of the report that has all records. Of many, the first are shown.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    source: str = "found"

    def text(self) -> str:
        kept = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        shown = self.rows[:_MOST_ROWS]
        fitted = lambda row, limit: [_fitted(self.columns[i], row[i], limit) for i in kept]
        rows: list[list[list[str]]] = []
        widths: list[int] = []
        for limit in range(_WIDEST_CELL, _NARROWEST_CELL, -1):
            rows = [fitted(row, limit) for row in (self.columns, *shown)]
            widths = [
                max(len(t) for t in itertools.chain(*column))
                for column in zip(*rows, strict=True)
            ]
            if sum(widths) + 2 * len(widths) - 2 <= _WIDEST_TABLE:
                break
        rows.insert(1, [["-" * w] for w in widths])
        lines = []
        for row in rows:
            for texts in itertools.zip_longest(*row, fillvalue=""):
                line = "  ".join(t.ljust(w) for t, w in zip(texts, widths, strict=True))
                lines.append(line.rstrip())
        if len(shown) < len(self.rows):
            n = len(self.rows) - len(shown)
            lines.append(f"... and {n} more: see `{self.source}`.")
        return "\n".join(lines)


def _fitted(column: str, text: str, limit: int) -> list[str]:
    """The lines of a cell. Code is cut, and other text is wrapped, to less."""
    if column == "code":
        return [_shortened(text, min(limit + 10, _WIDEST_CODE))]
    return wrap(text, limit)


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """The lines of a text. Code in backticks is kept on one line."""
    text = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    lines = wrapper.wrap(text)
    return [line.replace("\0", " ") for line in lines] or [""]


class AbstractReport(abc.ABC):
    """The findings of a diagnosis. False if it found nothing.

    `print` shows a headline, a table with a row for each record of `found`, and notes.

    - `found`: the records.
    - `remarks`: what else there is to know, such as what could not be found out.
    """

    found: Sequence[AbstractRecord]
    remarks: Sequence[str]

    @property
    @abc.abstractmethod
    def headline(self) -> str:
        """One sentence: what was inspected, and how much was found."""

    @abc.abstractmethod
    def tables(self) -> Sequence[Table]:
        """The records as text. A table without rows is not shown."""

    @abc.abstractmethod
    def notes(self) -> Sequence[tuple[str, str]]:
        """Below the tables: pairs of a kind, or another subject, and sentences about it."""

    def __bool__(self) -> bool:
        return bool(self.found)

    def __str__(self) -> str:
        parts = [self.headline, *(table.text() for table in self.tables() if table.rows)]
        remarks = (("note", remark) for remark in self.remarks)
        notes = [
            line
            for subject, text in dict.fromkeys([*self.notes(), *remarks])
            for line in wrap(f"{subject}: {text}", _WIDEST_LINE, "  ")
        ]
        return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)

    __repr__ = __str__


def cures_of(records: Sequence[AbstractRecord]) -> list[tuple[str, str]]:
    """The notes on what to do about each kind."""
    return list(dict.fromkeys((record.kind, record.cure) for record in records if record.cure))
