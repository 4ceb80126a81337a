"""Read the tables that are written as HTML in a Markdown file."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

from testbed.audit.tables.grid import Row, Table, above

MOST_SPANNED = 100  # rows or columns of one cell; more is a mistake


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
    lines = text.splitlines()
    return [table for opened in parser.found if (table := _table(opened, lines))]


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


def _table(opened: _Open, lines: list[str]) -> Table | None:
    """Return a table whose first row, or all rows of headings at its top, are the header."""
    rows = _spread(opened.rows)
    num_headings = next((at for at, (_, cells) in enumerate(opened.rows) if not all(cell.is_heading for cell in cells)),
                        len(rows)) or 1  # fmt: skip
    width = max((len(cells) for _, cells in rows), default=0)
    head, body = rows[:num_headings], rows[num_headings:]
    if not body or any(len(cells) != width for _, cells in head):
        return None
    header = tuple(" ".join(dict.fromkeys(cells[at] for _, cells in head)).strip() for at in range(width))
    return Table(header, tuple(Row(line, tuple(cells)) for line, cells in body if len(cells) == width),
                 *above(lines, opened.line - 1), opened.line)  # fmt: skip


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
