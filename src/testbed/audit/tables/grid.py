"""Read the tables of a page (Markdown, HTML) or the one of a CSV file: headings, rows, and what is said of them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import NamedTuple

MOST_AROUND = 12  # lines beside a table that are looked at
LONGEST_LINE = 3000  # characters of a line beside a table; a longer one is cut
MOST_NOTE = 1000  # characters
LONGEST_NAME = 200
_MARK = r"\[\^\w{1,20}\]|\[\d{1,2}\]|\[[a-e]\]|\([a-e*†‡]\)|\\?\*{1,3}|[†‡§¹²³⁴]"
_NOTE = re.compile(rf"\s*(?:<su[bp]>)?({_MARK})(?:</su[bp]>)?\)?:?\s*(\S.*)")
_OF_FIGURES = re.compile(
    r"(?i)\b(?:numbers?|figures?|entry|entries|values?|rows?|timings?|timed?|times|results?|measured?|taken"
    r"|read off|ran|run on)\b"
)
# rows that a sentence names otherwise than the table does
_OF_SOME = re.compile(
    r"(?i)\b(?:the (?:original|baseline|reference|former|latter|other|first|last|second|port|fork|competitor)"
    r"|ours|theirs|upstream|only)\b"
)
_NOT_MEASURED = re.compile(
    r"(?i)\b(?:expected|projected|predicted|estimated|extrapolated|placeholder|simulated"
    r"|theoretical(?! (?:peak|max\w*|FLOP|(?:\w+ )?performance)))[^\w.;]+(?:(?!peak)\w+[^\w.;]+){0,3}"
    r"(?:times?|speed-?ups?|throughput|performance|benchmarks?|values|results|numbers|figures|gains?|improvements?)\b"
    r"|(?<!peak )\b(?:times?|speed-?ups?|throughput|values|results|numbers|figures)\W+(?:\w+\W+){0,2}(?:are|is|were) "
    r"(?:expected|projected|predicted|estimate[sd]?|theoretical|extrapolated|not measured|placeholders?)\b"
    r"|\b(?:values|results|numbers|figures|rows)\W+(?:\w+\W+){0,2}(?:are|is|come|comes|were|taken)\W+"
    r"(?:(?:from|of|the|our|a|an)\W+){0,2}(?:\w+\W+)?(?:roofline|simulat(?:or|ion)"
    r"|(?:cost|performance|analytical) model)\b"
)
SEPARATOR = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-*:?\s*)*\|?\s*")


@dataclass(frozen=True)
class Row:
    line: int  # of the file, from 1
    cells: tuple[str, ...]
    said: str = ""  # footnotes and sentences that apply to this row alone


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[Row, ...]  # as wide as the header
    line: int = 0  # of its header
    around: str = ""  # the paragraphs right above and below, and the heading above
    of_all: str = ""  # the same without footnotes and sentences that are about some of the rows


class Note(NamedTuple):
    """A line of a page that begins with a mark of a footnote, from 0."""

    at: int
    mark: str
    text: str


def page_tables(text: str) -> list[Table]:
    """Return the Markdown tables of a page, then its HTML tables. Rows of another width than the first are left out."""
    lines = text.splitlines()
    notes = [
        Note(at, match[1].replace("\\", ""), match[2])
        for at, line in enumerate(lines)
        if (match := _NOTE.match(line)) and not re.fullmatch(r"(\*+)[^*]+\1", line.strip())  # a text in italics
    ]
    found = [*_markdown(lines), *_html(text)]
    return [_table(rows, lines, notes, begin, end, caption) for rows, begin, end, caption in found]


def _markdown(lines: Sequence[str]) -> Iterator[tuple[list[Row], int, int, str]]:
    """Yield the rows of each table, the header first, the lines between which it stands, and no caption."""
    at = 1
    while at < len(lines):
        if "|" in lines[at - 1] and "|" in lines[at] and SEPARATOR.fullmatch(lines[at]):
            end = at + 1
            while end < len(lines) and "|" in lines[end] and lines[end].strip():
                end += 1
            yield [Row(each + 1, _cells(lines[each])) for each in (at - 1, *range(at + 1, end))], at - 1, end, ""
            at = end
        at += 1


def _cells(line: str) -> tuple[str, ...]:
    inner = re.sub(r"(?<!\\)\|$", "", line.strip().removeprefix("|"))
    return tuple(cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", inner))


class _Html(HTMLParser):
    """Collects the tables of a page: of each its rows, of each row its line and cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[tuple[int, list[str]]]] = []
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
            self.tables[-1][-1][1].append("")
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._is_cell &= tag not in ("td", "th", "tr", "table")
        self._is_caption &= tag != "caption"

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.tables[-1][-1][1][-1] += data
        elif self._is_caption:
            self.captions[-1] += data


def _html(text: str) -> Iterator[tuple[list[Row], int, int, str]]:
    """Yield the rows of each table, about where it begins and ends, and its caption."""
    if "<table" not in text.lower():
        return
    page = _Html()
    page.feed(text)
    for table, caption in zip(page.tables, page.captions, strict=True):
        rows = [Row(line, tuple(" ".join(cell.split()) for cell in cells)) for line, cells in table if cells]
        if len(rows) > 1:
            yield rows, max(0, rows[0].line - 2), rows[-1].line + 1, " ".join(caption.split())


def _table(
    rows: Sequence[Row], lines: Sequence[str], notes: Sequence[Note], begin: int, end: int, caption: str
) -> Table:
    """Return a table whose first row is its header, with the text above line `begin` and below line `end`."""
    above, below = lines[max(0, begin - MOST_AROUND) : begin][::-1], lines[end : end + MOST_AROUND]
    title = next((line.lstrip("# ") for line in above if line.startswith("#")), "")
    around = f"{_paragraph(above)}\n\n{_paragraph(below)}\n\n{caption}".rstrip("\n")
    footnotes = {
        note.mark: note.text for note in reversed(notes)  # the first below the table counts
        if note.at >= end and (note.at < end + MOST_AROUND or note.mark[0] not in "*(")  # far away those make lists
    }  # fmt: skip
    return _noted(rows, around, title, footnotes)


def _paragraph(lines: Sequence[str]) -> str:
    """Return the first paragraph, up to an empty line, a heading or another table; a few empty lines may come first."""
    found: list[str] = []
    for line in lines:
        is_text = bool(line.strip()) and "|" not in line and not line.lstrip().startswith(("#", "```"))
        if is_text:
            found.append(line[:LONGEST_LINE])
        elif found or line.strip():
            break
    return "\n".join(found)


def _noted(rows: Sequence[Row], around: str, title: str, footnotes: dict[str, str]) -> Table:
    """Return the table whose first row is its header, with what the text says of each row alone, and of all.

    It says it of one by a mark in a cell, by the row's name in a sentence about figures, or by "the last row". Rows of
    another width than the header are left out.
    """
    kept = [row for row in rows[1:] if len(row.cells) == len(rows[0].cells)]
    names = list(map(name_of, kept))
    plain = [[re.sub(r"\*\*|__|`|\\", "", cell) for cell in row.cells] for row in kept]
    marks = [{mark for cell in cells for mark in re.findall(_MARK, cell)} for cells in plain]
    lines = around.split("\n")
    of_marks = {
        line for line in lines if (match := _NOTE.match(line)) and match[1].replace("\\", "") in set().union(*marks)
    }
    said: list[list[str]] = [[text for mark, text in footnotes.items() if mark in each] for each in marks]
    of_all = [title]
    for sentence in sentences_of("\n".join(line for line in lines if line not in of_marks)):
        about = rows_named(names, sentence)
        about |= {at for place, at in (("first row", 0), ("last row", len(kept) - 1)) if place in sentence.lower()}
        if len(about) == 1 and kept and _OF_FIGURES.search(sentence):
            said[min(about)].append(sentence)
        if len(about) in (0, len(kept)) and not _OF_SOME.search(sentence):
            of_all.append(sentence)
    noted = tuple(replace(row, said=" ".join(each)[:MOST_NOTE]) for row, each in zip(kept, said, strict=True))
    return Table(rows[0].cells, noted, rows[0].line, f"{around}\n\n{title}", "\n".join(of_all))


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences, items of lists and paragraphs of a text, each in one line."""
    for sentence in re.split(r"(?<=[.!?;])\s+|\n\s*\n|\n(?=[-*] )", text):
        yield " ".join(sentence.split())


def rows_named(names: Sequence[str], words: str, flags: int = 0) -> set[int]:
    """Return the rows whose names stand in a text as they are written; a name has at least three characters."""
    return {at for at, name in enumerate(names)
            if len(name) > 2 and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", words, flags)}  # fmt: skip


def name_of(row: Row) -> str:
    """Return the first cell that has letters and no more than LONGEST_NAME characters, without markup."""
    texts = (cell for cell in row.cells if len(cell) <= LONGEST_NAME)
    cells = (" ".join(re.sub(r"\*\*|__|`|\\|\[([^\]]*)\]\([^)]*\)", r"\1", cell).split()) for cell in texts)
    return next((re.sub(rf" ?(?:{_MARK})+$", "", cell) for cell in cells if re.search("[A-Za-z]", cell)), "")


def warning_in(text: str) -> str:
    """Return the sentence that says of the figures beside it that they were not measured."""
    sentences = (" ".join(re.sub(r"\*\*|__|`|^[#*\s]+", "", each[:500]).split())
                 for each in re.split(r"(?<=[.!?])\s+|\n", text))  # fmt: skip
    return next((each for each in sentences if _NOT_MEASURED.search(each)), "")


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
    return [_noted(rows, comments, "", {})] if len(rows) > 1 else []
