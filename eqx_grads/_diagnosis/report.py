"""Code that all reports share: the fields of a record, and how a report is shown."""

import abc
import dataclasses
import itertools
import os
import re
import textwrap
from collections.abc import Sequence


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
_WIDEST_CELL = 42
_WIDEST_CODE, _NARROWEST_CODE = 32, 19
_WIDEST_LINE = 96


def cells(
    record: AbstractRecord, *, leaf: str = "", kind: str = "", step: str = ""
) -> tuple[str, ...]:
    """The cells of a record in `COLUMNS`. A text that is given replaces the field."""
    return (
        leaf or record.leaf,
        kind or record.kind,
        record.primitive,
        show_place(record.file, record.line),
        _cut(record.code, record.column),
        record.path,
        step or ", ".join(map(str, record.step)),
    )


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
    if abs(n) < 1024:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB"):
        n /= 1024
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
    return f"{n / 1024:.3g} GiB"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text below the names of columns. A column without content is not shown.

    - `title`: a sentence above it, or empty.
    - `source`: the attribute of the report that has all records. Of many, the first are shown.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    source: str = "found"

    def text(self) -> str:
        kept = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        shown = self.rows[:_MOST_ROWS]
        cells = [[row[i] for i in kept] for row in (self.columns, *shown)]
        is_code = [name == "code" for name in cells[0]]
        longest = lambda i: max(len(word) for row in cells for word in _wrap(row[i], 1))
        least = [_NARROWEST_CODE if code else longest(i) for i, code in enumerate(is_code)]
        limits = [_WIDEST_CODE if code else _WIDEST_CELL for code in is_code]
        while True:
            wrap = lambda text, limit, code: (
                [_shortened(text, limit)] if code else _wrap(text, limit)
            )
            rows = [list(map(wrap, row, limits, is_code)) for row in cells]
            widths = [max(len(t) for row in rows for t in row[i]) for i in range(len(kept))]
            # Wrap the widest cells to less. Where that is not enough, cut the code.
            wide = [(is_code[i], -w, i) for i, w in enumerate(widths) if w > least[i]]
            if sum(widths) + 2 * len(widths) - 2 <= _WIDEST_TABLE or not wide:
                break
            limits[min(wide)[2]] = -min(wide)[1] - 1
        rows.insert(1, [["-" * w] for w in widths])
        lines = [self.title] if self.title else []
        for row in rows:
            for texts in itertools.zip_longest(*row, fillvalue=""):
                line = "  ".join(t.ljust(w) for t, w in zip(texts, widths, strict=True))
                lines.append(line.rstrip())
        if len(shown) < len(self.rows):
            n = len(self.rows) - len(shown)
            lines.append(f"... and {n} more: see `{self.source}`.")
        return "\n".join(lines)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """The lines of a text. Code in backticks, numbers of one thing, and an index are
    kept on one line."""
    text = re.sub(
        r"`[^`]*`|\d+ of \d+|\d+ and \d+ more|\([\d, .]+( times)?\)|\[[\d, ]+\](, \.\.\.)?",
        lambda code: code[0].replace(" ", "\0"),
        text,
    )
    lines = textwrap.wrap(
        text,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
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
            for line in _wrap(f"{subject}: {text}", _WIDEST_LINE, "  ")
        ]
        return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)

    __repr__ = __str__


def cures_of(records: Sequence[AbstractRecord]) -> list[tuple[str, str]]:
    """The notes on what to do about each kind. If a kind has several cures, each names its
    places."""
    places: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.cure:
            found = places.setdefault((record.kind, record.cure), [])
            found.append(show_place(record.file, record.line))
    kinds = [kind for kind, _ in places]
    notes = []
    for (kind, cure), of_cure in places.items():
        known = list(dict.fromkeys(filter(None, of_cure)))
        where = f" ({show_list(known, 3)})" if kinds.count(kind) > 1 and known else ""
        notes.append((kind + where, cure))
    return notes
