"""Read the tables of a page (Markdown, HTML, drawn with + and -) or the one of a CSV file: headings, rows, lines."""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser

MOST_AROUND = 12  # lines beside a table that are looked at
MOST_NOTE = 1000  # characters
WIDEST = 400  # characters of the border of a drawn table
_LETTERS = "ᵃᵇᶜᵈᵉ"
_MARK = rf"\[\^\w{{1,20}}\]|\[\d{{1,2}}\]|\[[a-e]\]|\([a-e*†‡]\)|\\?\*{{1,3}}|[†‡§¹²³⁴{_LETTERS}]"
_OF_FIGURES = re.compile(
    r"(?i)\b(?:numbers?|figures?|entry|entries|values?|rows?|timings?|times?|results?|measured?|taken|read off|ran"
    r"|run on)\b"
)
_NOT_MEASURED = re.compile(
    r"(?i)\b(?:expected|projected|predicted|estimated|theoretical(?! (?:peak|max\w*|FLOP))|extrapolated|placeholder"
    r"|simulated)[^\w.;]+(?:(?!peak)\w+[^\w.;]+){0,3}"
    r"(?:times?|speed-?ups?|throughput|performance|benchmarks?|values|results|numbers|figures|gains?|improvements?)\b"
    r"|(?<!peak )\b(?:times?|speed-?ups?|throughput|values|results|numbers|figures)\W+(?:\w+\W+){0,2}(?:are|is|were) "
    r"(?:expected|projected|predicted|estimate[sd]?|theoretical|extrapolated|not measured|placeholders?)\b"
)
# of all figures of a page
_OF_PAGE = re.compile(
    r"(?i)\b(?:this (?:file|page|document|section)|all (?:the )?(?:numbers|values|figures|results|times|timings))\b"
    r" (?:are|is|were|was|contains?|holds?|shows?|lists?) (?:only |all |just )?"
    r"(?:\w+ ){0,2}(?:placeholders?|projected|projections|expected|estimate[sd]?|theoretical|simulated|extrapolated)\b"
    r"|\bstopped after (?:step|iteration) \d|\bscaled (?:up )?the (?:time|rate)s?\b"
    r"|\b(?:list|show|give|report)s? the (?:output|prediction|estimate)s? of\b"
)
_BORDER = re.compile(r"\s*\+(?:[-=]{2,}\+)+\s*")
SEPARATOR = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-*:?\s*)*\|?\s*")


@dataclass(frozen=True)
class Row:
    line: int  # of the file, from 1
    cells: tuple[str, ...]
    footnote: str = ""
    said: str = ""  # the sentences beside the table that are about this row alone


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[Row, ...]  # as wide as the header
    line: int = 0  # of its header
    around: str = ""  # the paragraphs right above and below, and the heading above


def markdown_tables(text: str) -> list[Table]:
    """Return the pipe tables of a Markdown text. Rows of another width than their header are left out."""
    lines = text.splitlines()
    footnotes = {match[1]: match[2] for line in lines if (match := re.match(r"(\[\^\w{1,20}\]):\s*(.*)", line))}
    found = []
    notes = _may_be_notes(lines)
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
        above, below = lines[number - 2 :: -1] if number > 1 else [], lines[end:]
        around = f"{_paragraph(above)}\n{_paragraph(below)}\n{_title(above)}"
        noted = _with_notes(
            _as_wide(rows, header),
            f"{around}\n\n{_section(below)}",
            footnotes | _marked_lines(lines, notes, end),
            header,
        )
        found.append(Table(header, noted, number, around))
        number = end + 1
    return [*found, *html_tables(text), *drawn_tables(text)]


class _Html(HTMLParser):
    """Collects the tables of a page: of each its rows, of each row its line and cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[tuple[int, list[str]]]] = []
        self._is_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append((self.getpos()[0], []))
        elif tag in ("td", "th") and self.tables and self.tables[-1]:
            self.tables[-1][-1][1].append("")
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._is_cell &= tag not in ("td", "th", "tr", "table")

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.tables[-1][-1][1][-1] += data


def html_tables(text: str) -> list[Table]:
    """Return the tables that a page has as HTML; rows of another width than the first are left out."""
    if "<table" not in text.lower():
        return []
    page, lines, found = _Html(), text.splitlines(), []
    page.feed(text)
    notes = _may_be_notes(lines)
    for table in page.tables:
        rows = [Row(line, tuple(" ".join(cell.split()) for cell in cells)) for line, cells in table if cells]
        if len(rows) > 1:
            found.append(_with_text(rows, lines, notes, rows[0].line - 3, rows[-1].line + 1))
    return found


def _with_text(rows: list[Row], lines: list[str], notes: list[int], above_at: int, below_at: int) -> Table:
    """Return a table whose first row is its header, with the text that ends above and begins below these lines."""
    above, below = lines[above_at::-1] if above_at >= 0 else [], lines[below_at:]
    around = f"{_paragraph(above)}\n{_paragraph(below)}\n{_title(above)}"
    header = rows[0].cells
    noted = _with_notes(_as_wide(rows[1:], header), around, _marked_lines(lines, notes, below_at), header)
    return Table(header, noted, rows[0].line, around)


def drawn_tables(text: str) -> list[Table]:
    """Return the tables that are drawn with + and -, as in reStructuredText, or as tabulate and PrettyTable print."""
    lines = _of_simple_tables(text.splitlines())
    notes = _may_be_notes(lines) if "+-" in text or "==" in text else []
    found, at = [], 0
    while at < len(lines):
        end = at
        while end < len(lines) and (_BORDER.fullmatch(lines[end]) or (end > at and lines[end].lstrip()[:1] == "|")):
            end += 1
        groups: list[list[Row]] = [[]]  # the lines between two borders
        for number in range(at, end):
            if _BORDER.fullmatch(lines[number]):
                groups.append([])
            else:
                groups[-1].append(Row(number + 1, _cells(lines[number])))
        groups = [group for group in groups if group]
        if len(groups) > 1:
            of_header, *others = groups
            rows = [_joined(of_header), *(row for group in others for row in _rows_of(group))]
            found.append(_with_text(rows, lines, notes, at - 1, end))
        at = max(end, at + 1)
    return found


def _rows_of(group: list[Row]) -> list[Row]:
    """Return one row for the lines between two borders where only the first has a name, else a row for each."""
    is_one = len(group) > 1 and not any(row.cells[0] for row in group[1:])
    return [_joined(group)] if is_one else group


def _of_simple_tables(lines: list[str]) -> list[str]:
    """Return lines with the simple tables of reStructuredText (`=== ===`) drawn as the others, line by line."""
    drawn, spans = list(lines), []
    for at, line in enumerate(lines):
        is_border = len(line) <= WIDEST and re.fullmatch(r" *=+(?: +=+)+ *", line) is not None
        if is_border:
            spans = [match.span() for match in re.finditer("=+", line)]
        elif not line.strip():
            spans = []
        if spans:
            ends = [*(begin for begin, _ in spans[1:]), None]
            cells = [line[begin:end].strip() for (begin, _), end in zip(spans, ends, strict=True)]
            drawn[at] = "+".join(["", *("=" * 3 for _ in cells), ""]) if is_border else f"| {' | '.join(cells)} |"
    return drawn


def _joined(lines: list[Row]) -> Row:
    """Return the row of which some cells take several lines."""
    parts = zip(*(row.cells for row in lines if len(row.cells) == len(lines[0].cells)), strict=True)
    return Row(lines[0].line, tuple(" ".join(filter(None, cell)) for cell in parts))


def _may_be_notes(lines: list[str]) -> list[int]:
    """Return which lines begin as a note, or have marks of notes: few, so that each table can look at all of them."""
    begins = re.compile(rf"\s*(?:<su[bp]>)?(?:{_MARK})|\s*\d{{1,2}}\. \S|.*[{_LETTERS}]")
    return [index for index, line in enumerate(lines) if begins.match(line)]


def _marked_lines(lines: list[str], notes: list[int], end: int) -> dict[str, str]:
    """Return text by mark of the lines below a table, from `end` on, that begin with a mark, as `* extrapolated`."""
    found: dict[str, str] = {}
    for place, line in ((index - end, lines[index]) for index in notes[bisect.bisect_left(notes, end) :]):
        match = re.match(rf"\s*(?:<su[bp]>)?({_MARK})(?:</su[bp]>)?\)?:?\s*(\S.*)", line)
        is_far = place >= MOST_AROUND and match is not None and match[1][0] in "*("  # of a list
        if match and not is_far and not re.fullmatch(r"(\*+)[^*]+\1", line.strip()):  # a text in italics
            found.setdefault(match[1].replace("\\", ""), match[2])
        if place < MOST_AROUND and (numbered := re.match(r"\s*(\d{1,2})\. (\S.*)", line)):
            found.setdefault(f"#{numbered[1]}", numbered[2])
        for mark, text in re.findall(rf"([{_LETTERS}])\s*([^{_LETTERS}]+)", line):  # several in one line
            found[mark] = text.strip()
    return found


def _with_notes(
    rows: tuple[Row, ...], around: str, footnotes: dict[str, str], header: tuple[str, ...]
) -> tuple[Row, ...]:
    """Return the rows with what the text says of each alone: by a mark in a cell, its name, or "the last row"."""
    names = [_name_of(row) for row in rows]
    notes_at = [at for at, heading in enumerate(header) if re.fullmatch(r"(?i)\W*(?:notes?|remarks?|ref)\W*", heading)]
    sentences = re.split(r"(?<=[.!?;])\s+|\n\s*\n|\n(?=[-*] )", around)
    notes: list[list[str]] = [[] for _ in rows]
    for sentence in sentences:
        words = " ".join(sentence.split())
        about = {at for at, name in enumerate(names)
                 if len(name) > 2 and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", words)}  # fmt: skip
        about |= {at for place, at in (("first row", 0), ("last row", len(rows) - 1)) if place in words.lower()}
        if len(about) == 1 and _OF_FIGURES.search(words):
            notes[about.pop()].append(words)
    said = [" ".join(note)[:MOST_NOTE] for note in notes]
    marked = []
    for row in rows:
        plain = [re.sub(r"(\*\*|__|`)", "", cell).replace("\\", "") for cell in row.cells]
        marks = {mark for cell in plain for mark in re.findall(_MARK, cell)}
        marks |= {f"#{row.cells[at]}" for at in notes_at}  # "1. job 51002" below a column Note
        marked.append(" ".join(text for mark, text in footnotes.items() if mark in marks)[:MOST_NOTE])
    return tuple(replace(row, footnote=note, said=words) for row, note, words in zip(rows, marked, said, strict=True))


def _name_of(row: Row) -> str:
    """Return the first cell with letters, without its markup."""
    cells = (" ".join(re.sub(r"\*\*|__|`|\\|\[([^\]]*)\]\([^)]*\)", r"\1", cell).split()) for cell in row.cells)
    return next((cell for cell in cells if re.search("[A-Za-z]", cell)), "")


def _section(below: list[str]) -> str:
    """Return the text below a table, up to a heading or another table."""
    text = itertools.takewhile(lambda line: not line.startswith("#") and "|" not in line, below[:MOST_AROUND])
    return "\n".join(text)


def warning_in(text: str, is_page: bool = False) -> str:
    """Return the sentence that says of the figures beside it, or of all of a page, that they were not measured."""
    parts = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n(?=[#*-])" if is_page else r"(?<=[.!?])\s+|\n", text)
    sentences = (" ".join(re.sub(r"\*\*|__|`|^[#*\s]+", "", each[:500]).split()) for each in parts)
    return next((each for each in sentences if (_OF_PAGE if is_page else _NOT_MEASURED).search(each)), "")


def _title(above: list[str]) -> str:
    """Return the heading right above a table and its paragraph."""
    return next((line.lstrip("# ") for line in above[:MOST_AROUND] if line.startswith("#")), "")


def _paragraph(lines: list[str]) -> str:
    """Return the first paragraph, up to an empty line, a heading or another table; a few empty lines may come first."""
    found: list[str] = []
    for line in lines[:MOST_AROUND]:
        is_text = bool(line.strip()) and "|" not in line and not line.lstrip().startswith(("#", "```"))
        if is_text:
            found.append(line)
        elif found or line.strip():
            break
    return "\n".join(found)


def csv_tables(text: str) -> list[Table]:
    """Return the table of a CSV or TSV text, or none where it has no rows. Semicolons are as good as commas."""
    comments = re.findall(r"(?m)^[ \t]*#(.*)$", text)
    text = re.sub(r"(?m)^[ \t]*#.*$", "", text)
    delimiter = max(",\t;", key=text.lstrip().partition("\n")[0].count)
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
    around = "\n".join(comments)
    noted = _with_notes(_as_wide(rows, header), around, {}, header)
    return [Table(header, noted, line, around)] if rows else []


def _as_wide(rows: list[Row], header: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(row for row in rows if len(row.cells) == len(header))


def _cells(line: str) -> tuple[str, ...]:
    inner = line.strip().removeprefix("|")
    inner = re.sub(r"(?<!\\)\|$", "", inner)
    return tuple(cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", inner))
