"""Read the tables of a page (Markdown, HTML, LaTeX) or the one of a CSV file: headings, rows, the text around them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import NamedTuple

MOST_CELLS = 200  # of a row
LONGEST_PAGE = 40_000  # characters
MOST_AROUND = 25  # lines beside a table that are looked at
LONGEST_LINE = 3000  # characters of a line beside a table; a longer one is cut
LONGEST_SENTENCE = 500
LONGEST_NAME = 200
_MARK = r"\[#\w{1,20}\]_?|\[\^\w{1,20}\]|\[\d{1,2}\]|\[[a-e]\]|\([a-e*†‡]\)|\\?\*{1,3}|[†‡§¹²³⁴]"
_NOTE = re.compile(rf"\s*(?:\.\. )?(?:<su[bp]>)?({_MARK})(?:</su[bp]>)?\)?:?\s*(\S.*)")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_HEADING = re.compile(r"(?i)^\s*<h([1-6])\b[^<>]*>")
_UNDERLINE = re.compile(r"([=-])\1{2,}\s*")
_SEPARATOR = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-*:?\s*)*\|?\s*")


@dataclass(frozen=True)
class Row:
    line: int  # of the file, from 1
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[Row, ...]  # as wide as the header
    line: int = 0  # of its header
    near: str = ""  # the paragraphs right above and below, and the caption
    section: str = ""  # the rest of the text up to the headings or tables above and below, and below higher headings
    page: str = ""  # the whole text outside tables
    titles: tuple[str, ...] = ()  # the headings above it, the nearest first
    footnotes: tuple[tuple[str, str], ...] = ()  # mark and text of those whose mark the table has

    @property
    def around(self) -> str:
        return "\n\n".join((self.near, *self.titles[:1]))


class _Found(NamedTuple):
    """The rows of a table, the header first, the lines from 0 between which it stands, its caption."""

    rows: list[Row]
    begin: int
    end: int
    caption: str = ""


class _Note(NamedTuple):
    """A line of a page that begins with a mark of a footnote, from 0."""

    at: int
    mark: str
    text: str


def page_tables(text: str) -> list[Table]:
    """Return the Markdown tables of a page, then its HTML tables. Rows of another width than the first are left out."""
    if "|" not in text and "<table" not in text.lower():  # a large log takes seconds below
        return []
    lines = text.splitlines()
    found = [*_markdown(lines), *_html(text)]
    lines = [_TAG.sub(" ", _HEADING.sub(lambda tag: "#" * int(tag[1]) + " ", line)) for line in lines]
    for at, line in enumerate(lines[1:], start=1):
        if _UNDERLINE.fullmatch(line) and lines[at - 1].strip() and "|" not in lines[at - 1]:  # a heading of two lines
            lines[at - 1], lines[at] = f"{'#' if line[0] == '=' else '##'} {lines[at - 1]}", ""
    notes = [
        _Note(at, _mark_of(match[1]), match[2])
        for at, line in enumerate(lines)
        for part in re.split(r"(?<=[.;]) (?=[†‡§¹²³⁴])", line)
        if (match := _NOTE.match(part)) and not re.fullmatch(r"(\*+)[^*]+\1", line.strip())  # a text in italics
    ]
    taken = {at for each in found for at in range(each.begin, each.end)}
    lines = ["# " if at in taken else line[:LONGEST_LINE] for at, line in enumerate(lines)]
    page = "\n".join(line for line in lines if not line.lstrip().startswith(("#", "```")))[:LONGEST_PAGE]
    return [replace(_table(each, lines, notes), page=page) for each in found]


def from_latex(text: str) -> str:
    """Return a LaTeX text whose tables have a line for each row as Markdown, line by line."""
    lines: list[str] = []
    is_inside, has_head = False, False
    for line in text.splitlines():
        line = re.sub(r"(?<!\\)%.*", "", line).strip()
        row, end, _ = line.partition("\\\\")
        if re.search(r"\\(?:begin|end)\{tabular", line):
            is_inside, has_head, line = "begin" in line, False, ""
        elif is_inside and end and 0 < row.count("&") < MOST_CELLS:
            cells = [_without_commands(cell) for cell in re.split(r"(?<!\\)&", row)]
            line = f"| {' | '.join(cells)} |"
            if not has_head:  # goes up a line, where the table begins, and its rule takes its place
                lines[-1], line, has_head = line, "|---" * len(cells) + "|", True
        elif is_inside and has_head:
            line = "|"
        else:
            line = _without_commands(re.sub(r"^\\(?!caption)\w+(?:\[[^\[\]]*\]|\{[^{}]*\})*$", "", line))
        lines.append(line)
    return "\n".join(lines)


def _without_commands(text: str) -> str:
    """Return the text of a piece of LaTeX, without commands and braces."""
    text = re.sub(r"\\multi(?:column|row)\{[^{}]*\}\{[^{}]*\}", "", text).replace(r"\times", "x")
    return " ".join(re.sub(r"\\([%&$#_])|\\[a-zA-Z]+\*?|[{}$~]", r" \1", text).split()).replace(" %", "%")


def _markdown(lines: Sequence[str]) -> Iterator[_Found]:
    at = 1
    while at < len(lines):
        is_head = 0 < lines[at - 1].count("|") <= MOST_CELLS and "|" in lines[at]
        if is_head and _SEPARATOR.fullmatch(lines[at]):
            end = at + 1
            while end < len(lines) and "|" in lines[end] and lines[end].strip():
                end += 1
            yield _Found([Row(each + 1, _cells(lines[each])) for each in (at - 1, *range(at + 1, end))], at - 1, end)
            at = end
        at += 1


def _cells(line: str) -> tuple[str, ...]:
    inner = re.sub(r"(?<!\\)\|$", "", line.strip().removeprefix("|"))
    return tuple(cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", inner))


class _Html(HTMLParser):
    """Collects the tables of a page: of each its rows, of each row its line and cells: text, columns, rows, is a
    head."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[tuple[int, list[list]]]] = []
        self.captions: list[str] = []  # of each table
        self._is_cell = self._is_caption = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
            self.captions.append("")
        self._is_caption = tag == "caption" and bool(self.tables)
        if tag == "tr" and self.tables:
            self.tables[-1].append((self.getpos()[0], []))
        elif tag in ("td", "th") and self.tables and self.tables[-1]:
            said = dict(attrs)
            spans = [
                min(int(text), 50) if (text := str(said.get(name) or "")).isdecimal() else 1
                for name in ("colspan", "rowspan")
            ]
            self.tables[-1][-1][1].append(["", *spans, tag == "th"])
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._is_cell &= tag not in ("td", "th", "tr", "table")
        self._is_caption &= tag != "caption"

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.tables[-1][-1][1][-1][0] += data
        elif self._is_caption:
            self.captions[-1] += data


def _html(text: str) -> Iterator[_Found]:
    if "<table" not in text.lower():
        return
    page = _Html()
    page.feed(text)
    for table, caption in zip(page.tables, page.captions, strict=True):
        rows = _spread([row for row in table if row[1]])
        if len(rows) > 1:
            yield _Found(rows, max(0, rows[0].line - 2), rows[-1].line + 1, " ".join(caption.split()))


def _spread(table: Sequence[tuple[int, list[list]]]) -> list[Row]:
    """Return rows with each cell in all of its columns and rows; of a head of two rows the lower cells, with the
    upper in brackets."""
    below: dict[int, tuple[str, int]] = {}  # of each column, a cell that goes on, and for how many rows
    rows: list[tuple[int, list[str], bool]] = []
    for line, cells in table:
        found: list[str] = []
        for text, columns, spans, _ in [*cells, ["", 0, 1, False]]:
            while len(found) in below:
                kept, left = below.pop(len(found))
                below |= {len(found): (kept, left - 1)} if left > 1 else {}
                found.append(kept)
            for _ in range(columns):
                below |= {len(found): (" ".join(text.split()), spans - 1)} if spans > 1 else {}
                found.append(" ".join(text.split()))
        rows.append((line, found, all(is_head for *_, is_head in cells)))
    head = next((at for at, (*_, is_head) in enumerate(rows) if not is_head), 0)
    if head > 1 and len({len(cells) for _, cells, _ in rows[:head]}) == 1:
        lower, upper = rows[head - 1][1], rows[head - 2][1]
        merged = [low if low == up or not up else f"{low} ({up})" for low, up in zip(lower, upper, strict=True)]
        rows[:head] = [(rows[0][0], merged, True)]
    return [Row(line, tuple(cells)) for line, cells, _ in rows]


def _table(found: _Found, lines: Sequence[str], notes: Sequence[_Note]) -> Table:
    """Return a table with the text above and below it; `lines` has a heading in place of each table's."""
    rows, begin, end, caption = found
    near, section = [caption], []
    for way in (range(begin - 1, max(-1, begin - MOST_AROUND), -1), range(end, min(len(lines), end + MOST_AROUND))):
        paragraphs = ["\n".join(each[:: way.step]) for each in _paragraphs([lines[at] for at in way])]
        near += paragraphs[:1]
        section += paragraphs[1:]
    titles: list[str] = []
    level = 9
    for at in range(begin - 1, -1, -1):
        if (heading := re.match(r"(#{1,6}) +(\S.*)", lines[at])) and len(heading[1]) < level:
            level = len(heading[1])
            titles.append(heading[2].strip("# "))
            section += ["\n".join(each) for each in _paragraphs(lines[at + 1 : begin])[:1]]
    kept = tuple(row for row in rows[1:] if len(row.cells) == len(rows[0].cells))
    marks = {mark for row in (rows[0], *kept) for mark in marks_of(row)}
    footnotes = {
        note.mark: note.text for note in reversed(notes)  # the first below the table counts
        if note.mark in marks and note.at >= end
        and (note.at < end + MOST_AROUND or note.mark[0] not in "*(")  # far away those make lists
    }  # fmt: skip
    near_text, section_text = (
        "\n\n".join(_without(footnotes, each) for each in part if each) for part in (near, section)
    )
    return Table(
        rows[0].cells, kept, rows[0].line, near_text, section_text, "", tuple(titles), tuple(footnotes.items())
    )


def marks_of(row: Row) -> set[str]:
    """Return the marks of footnotes in the cells of a row."""
    cells = (re.sub(r"\*\*|__|`|\\", "", cell) for cell in row.cells)
    return {_mark_of(mark) for cell in cells for mark in re.findall(_MARK, cell)}


def _mark_of(text: str) -> str:
    return text.replace("\\", "").rstrip("_")


def _without(footnotes: dict[str, str], text: str) -> str:
    """Return a paragraph without the lines that are footnotes of the table."""
    return "\n".join(line for line in text.split("\n")
                     if not ((match := _NOTE.match(line)) and _mark_of(match[1]) in footnotes))  # fmt: skip


def _paragraphs(lines: Sequence[str]) -> list[list[str]]:
    """Return the paragraphs up to a heading, a block of code or another table."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.lstrip().startswith(("#", "```")) or "|" in line:
            break
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [each for each in found if each]


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences, items of lists and paragraphs of a text, each in one line."""
    for sentence in re.split(r"(?<=[.!?])(?<!\bvs\.)(?<!\bca\.)(?<!\bincl\.)\s+|\n\s*\n|\n(?=[-*] )", text):
        if sentence.strip():
            yield " ".join(sentence.split())[:LONGEST_SENTENCE]


def name_in(cell: str) -> str:
    """Return a cell as a text may name it: without markup and marks of footnotes; empty where it has no letter."""
    name = " ".join(re.sub(r"\*\*|__|`|\\|\[([^\]]*)\]\([^)]*\)|<[^<>]*>", r"\1", cell[:LONGEST_NAME]).split())
    name = re.sub(rf" ?(?:{_MARK})+$", "", name)
    return name if re.search(r"[^\W\d_]", name) else ""


def csv_tables(text: str) -> list[Table]:
    """Return the table of a CSV or TSV text, or none where it has no rows. Semicolons are as good as commas."""
    comments = "\n".join(re.findall(r"(?m)^[ \t]*#(.*)$", text))
    text = re.sub(r"(?m)^[ \t]*#.*$", "", text)
    delimiter = max(",\t;", key=text.lstrip().partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter)
    try:
        rows = [Row(reader.line_num, tuple(cell.strip() for cell in cells)) for cells in reader]
    except csv.Error:
        return []
    rows = [row for row in rows if any(row.cells)]
    kept = tuple(row for row in rows[1:] if len(row.cells) == len(rows[0].cells))
    return [Table(rows[0].cells, kept, rows[0].line, comments)] if len(rows) > 1 else []
