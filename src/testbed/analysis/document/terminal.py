"""A document as text for a terminal: details first; verdicts last, next to the prompt."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from testbed.analysis.document.model import Block, Document, Statement, Table, plain

WIDTH = 110  # of wrapped sentences
GAP = "   "  # between columns


def text(document: Document, width: int | None = None) -> str:
    """Return sections, then headlines, verdicts and cautions, then notes; `width` is where sentences are wrapped."""
    groups = [lines for section in document.sections for block in section.blocks for lines in _block(block, width)]
    said = [
        *document.headlines,
        *(Statement(f"{verdict.kind}: ", verdict.sentence) for verdict in document.verdicts),
        *(Statement(f"Warning: {caution.title}: ", caution.text) for caution in document.cautions),
    ]
    groups += [_statements(said, width)] if said else []
    groups += [list(map(plain, lines)) for lines in document.notes]
    return "\n\n".join("\n".join(lines) for lines in groups)


def table_lines(table: Table) -> list[str]:
    """Return the header and the rows in columns."""
    rows = [list(table.columns), *([plain(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(range(len(row)), row, widths, strict=True)
        aligned = (cell.ljust(width) if table.is_text(column) else cell.rjust(width) for column, cell, width in cells)
        lines.append(GAP.join(aligned).rstrip())
    return lines


def _block(block: Block, width: int | None) -> list[list[str]]:
    if isinstance(block, Table):
        return [*([[block.title]] if block.title else []), [*table_lines(block), *([block.note] if block.note else [])]]
    if isinstance(block, tuple):
        return [_statements(block, width)]
    return [[block]] if isinstance(block, str) else []


def _statements(statements: Sequence[Statement], width: int | None) -> list[str]:
    lines = []
    for each in statements:
        indent = " " * len(each.label)
        wrapped = width and textwrap.wrap(each.sentence, width, subsequent_indent=indent, break_on_hyphens=False)
        lines += wrapped or [each.sentence]
    return lines
