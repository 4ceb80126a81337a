"""Read the tables of a Markdown file, pipes and HTML, or the one of a CSV file: headings, and rows with their lines."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

MOST_SPANNED = 100  # rows or columns of one cell; more is a mistake
SEPARATOR = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-*:?\s*)*\|?\s*")


@dataclass(frozen=True)
class Row:
    line: int  # of the file, from 1
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[Row, ...]  # as wide as the header
    line: int = 0  # of its header


def markdown_tables(text: str) -> list[Table]:
    """Return the pipe tables of a Markdown text. Rows of another width than their header are left out."""
    lines = text.splitlines()
    found = []
    number = 1
    while number < len(lines):
        is_head = "|" in lines[number - 1] and "|" in lines[number] and SEPARATOR.fullmatch(lines[number])
        if not is_head:
            number += 1
            continue
        header, first = _cells(lines[number - 1]), number + 1
        end = first
        while end < len(lines) and "|" in lines[end] and lines[end].strip():
            end += 1
        rows = [Row(index + 1, _cells(lines[index])) for index in range(first, end)]
        found.append(Table(header, _as_wide(rows, header), number))
        number = end + 1
    return found


def csv_tables(text: str) -> list[Table]:
    """Return the table of a CSV or TSV text, or none where it has no rows. Semicolons are as good as commas."""
    delimiter = max(",\t;", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter)
    header: tuple[str, ...] = ()
    line = 0
    rows = []
    try:
        for cells in reader:
            stripped = tuple(cell.strip() for cell in cells)
            if header and any(stripped):
                rows.append(Row(reader.line_num, stripped))
            elif any(stripped):
                header, line = stripped, reader.line_num
    except csv.Error:
        return []
    return [Table(header, _as_wide(rows, header), line)] if rows else []


def _as_wide(rows: list[Row], header: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(row for row in rows if len(row.cells) == len(header))


def _cells(line: str) -> tuple[str, ...]:
    inner = line.strip().removeprefix("|")
    inner = re.sub(r"(?<!\\)\|$", "", inner)
    return tuple(cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", inner))


@dataclass
class _Cell:
    text: str = ""
    is_heading: bool = False
    across: int = 1
    down: int = 1


@dataclass
class _Open:
    line: int
    rows: list[tuple[int, list[_Cell]]] = field(default_factory=list)


def html_tables(text: str) -> list[Table]:
    """Return the tables of a text, cells that span several repeated in each of them."""
    parser = _Parser()
    parser.feed(text)
    return [table for opened in parser.found if (table := _table(opened))]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Open] = []
        self._open: list[_Open] = []  # the tables around the place, the innermost last

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._open.append(_Open(self.getpos()[0]))
        elif self._open and tag == "tr":
            self._open[-1].rows.append((self.getpos()[0], []))
        elif self._open and self._open[-1].rows and tag in ("td", "th"):
            spans = {name: int(value) for name, value in attrs if value and value.isascii() and value.isdigit()}
            across, down = (min(max(spans.get(name, 1), 1), MOST_SPANNED) for name in ("colspan", "rowspan"))
            self._open[-1].rows[-1][1].append(_Cell("", tag == "th", across, down))
        elif tag == "br":
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._open:
            self.found.append(self._open.pop())

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1].rows and self._open[-1].rows[-1][1]:
            self._open[-1].rows[-1][1][-1].text += data


def _table(opened: _Open) -> Table | None:
    """Return a table whose first row, or all rows of headings at its top, are the header."""
    rows = _spread(opened.rows)
    num_headings = next((at for at, (_, cells) in enumerate(opened.rows) if not all(cell.is_heading for cell in cells)),
                        len(rows)) or 1  # fmt: skip
    width = max((len(cells) for _, cells in rows), default=0)
    head, body = rows[:num_headings], rows[num_headings:]
    if not body or any(len(cells) != width for _, cells in head):
        return None
    header = tuple(" ".join(dict.fromkeys(cells[at] for _, cells in head)).strip() for at in range(width))
    return Table(header, tuple(Row(line, tuple(cells)) for line, cells in body if len(cells) == width), opened.line)


def _spread(rows: list[tuple[int, list[_Cell]]]) -> list[tuple[int, list[str]]]:
    """Return the text of each place of the table."""
    found = []
    hanging: dict[int, tuple[int, str]] = {}  # column -> rows that its cell still covers, and its text
    for line, cells in rows:
        texts: list[str] = []
        waiting = [(" ".join(cell.text.split()), cell.down) for cell in cells for _ in range(cell.across)]
        while waiting or len(texts) in hanging:
            at = len(texts)
            left, text = hanging.pop(at, (0, ""))
            if not left:
                text, left = waiting.pop(0)
            texts.append(text)
            if left > 1:
                hanging[at] = (left - 1, text)
        found.append((line, texts))
    return found
