"""Read tables that are drawn: grids and simple tables, and the tables of reStructuredText directives; and notebooks "
"as pages."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_BORDER = re.compile(r"\s*\+(?:[-=]+\+)+\s*")
_RULE = re.compile(r"\s*={2,}(?:\s+={2,})+\s*")
_DIRECTIVE = re.compile(r"\s*\.\. (list|csv)-table::\s*(.*)")


class Drawn(NamedTuple):
    """A table: its rows as (line from 1, cells), the header first, the lines from 0 between which it stands, its
    caption."""

    rows: list[tuple[int, tuple[str, ...]]]
    begin: int
    end: int
    caption: str = ""


def drawn_tables(lines: Sequence[str]) -> Iterator[Drawn]:
    at = 0
    while at < len(lines):
        found = None
        if directive := _DIRECTIVE.fullmatch(lines[at]):
            found = _of_directive(lines, at, directive[1], directive[2])
        elif _BORDER.fullmatch(lines[at]):
            found = _grid(lines, at)
        elif _RULE.fullmatch(lines[at]):
            found = _simple(lines, at)
        if found and len(found.rows) > 1:
            yield found
        at = max(at + 1, found.end if found else 0)


def _grid(lines: Sequence[str], begin: int) -> Drawn:
    end = begin
    rows = []
    while end < len(lines) and (_BORDER.fullmatch(lines[end]) or lines[end].strip().startswith("|")):
        if not _BORDER.fullmatch(lines[end]):
            rows.append((end + 1, tuple(cell.strip() for cell in lines[end].strip().strip("|").split("|"))))
        end += 1
    return Drawn(rows, begin, end)


def _simple(lines: Sequence[str], begin: int) -> Drawn:
    spans = [match.span() for match in re.finditer("=+", lines[begin])]
    ends = [start for start, _ in spans[1:]] + [10_000]
    rules, end, rows = 0, begin, []
    while end < len(lines) and rules < 3 and (lines[end].strip() or rules < 2):
        if _RULE.fullmatch(lines[end]):
            rules += 1
        elif lines[end].strip():
            rows.append(
                (end + 1, tuple(lines[end][start:stop].strip() for (start, _), stop in zip(spans, ends, strict=True)))
            )
        end += 1
    return Drawn(rows if rules > 1 else [], begin, end if rules > 1 else begin + 1)


def _of_directive(lines: Sequence[str], begin: int, kind: str, caption: str) -> Drawn:
    end = begin + 1
    rows: list[tuple[int, tuple[str, ...]]] = []
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith((" ", "\t"))):
        text = lines[end].strip()
        if kind == "list" and (item := re.match(r"(\* )?- ?(.*)", text)):
            if item[1]:
                rows.append((end + 1, ()))
            if rows:
                rows[-1] = (rows[-1][0], (*rows[-1][1], item[2]))
        elif kind == "csv" and text and not re.match(r":(?!header:)", text):
            cells = next(csv.reader([text.removeprefix(":header:").strip()], skipinitialspace=True), [])
            rows.append((end + 1, tuple(cell.strip() for cell in cells)))
        end += 1
    return Drawn(rows, begin, end, caption)


def page_of_notebook(text: str) -> str:
    """Return a notebook as a page: its texts, and each code cell with what it printed as one paragraph; else the
    text."""
    try:
        cells = json.loads(text)["cells"]
        parts = [_of_cell(cell) for cell in cells]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text
    return "\n\n".join(parts)


def _of_cell(cell: dict) -> str:
    source = "".join(cell.get("source", ""))
    if cell.get("cell_type") != "code":
        return source
    printed = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", ()))
    told = " ".join(line for each in (source, *map("".join, printed)) for line in each.splitlines() if line.strip())
    return re.sub(r"(?<=[.,]) +", "", re.sub(r"[|\n]", " ", told))
