"""Read the tables of a Markdown file, or the one of a CSV file: headings, and rows with their lines."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass

MOST_AROUND = 12  # lines beside a table that are looked at
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
    around: str = ""  # the paragraphs right above and below


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
        around = f"{_paragraph(lines[number - 2 :: -1] if number > 1 else [])}\n{_paragraph(lines[end:])}"
        found.append(Table(header, _as_wide(rows, header), number, around))
        number = end + 1
    return found


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
