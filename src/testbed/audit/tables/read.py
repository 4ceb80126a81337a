"""Read the tables of a file: those with a known result, and rows that compare two of their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from testbed.audit.reported import Reported
from testbed.audit.tables.columns import IN_WORDS, QUANTITIES, RESULTS, Column, Grid, grid_of, only, quantity_of
from testbed.audit.tables.figures import figure_of, is_number, plain
from testbed.audit.tables.grid import Row, Table, csv_tables, markdown_tables, warning_in
from testbed.audit.tables.prose import claims_in
from testbed.audit.tables.rows import LEARNT
from testbed.audit.tables.sentences import Spoken, quotes_in, sentences_in
from testbed.audit.tables.side_by_side import side_by_side
from testbed.audit.tables.text_figures import sums_in
from testbed.errors import InputError

FORM = "table"
# what --columns takes too
SHORT = {
    "gpus": "devices", "gpu": "devices", "workers": "devices", "ranks": "devices", "mbs": "micro_batch", "gbs": "batch",
    "seq_len": "length", "time": "time_s", "step_time": "step_s", "throughput": "rate", "accum": "accumulation",
}  # fmt: skip
LEAST_TURNED = 2  # quantities in a first column
_OF_TWO = re.compile(
    r"(?i)\b(?:speed-?ups?|improve\w*|gains?|changes?|delta|diff\w*|savings?|factor|ratio|notes?|faster|impact)\b"
)
MOST_ROWS = 2000  # more are the steps of a run, and no table of results
SUFFIXES = {".md": markdown_tables, ".csv": csv_tables, ".tsv": csv_tables}


def tables_in(path: Path, text: str, named: Mapping[str, str] | None = None) -> list[Reported]:
    """Return what the tables of a file say, as one; nothing where no table has a result that is known.

    `named` is `--columns`: quantity -> heading, or a number for every row.

    Raises:
        InputError: `named` has a heading that no table has, or one without figures.
    """
    found = SUFFIXES.get(path.suffix.lower(), markdown_tables)(text)
    tables = [table for table in found if len(table.rows) <= MOST_ROWS]
    headings = sorted({plain(heading) for table in tables for heading in table.header} - {""})
    for heading in (named or {}).values():
        if heading not in headings and not is_number(heading):
            raise InputError(f"--columns: {path} has no column '{heading}'; it has {', '.join(headings) or 'none'}")
    tables = [_turned(table) for table in tables]
    every = [grid_of(table, named or {}) for table in tables]
    every = [_with_quality(grid, every) for grid in every]
    grids = tuple(grid for grid in every if _is_of_results(grid, bool(named)))
    is_page = path.suffix.lower() not in (".csv", ".tsv") and bool(grids)
    refused = {line for grid in every if grid not in grids for line in grid.lines}
    for quantity, heading in (named or {}).items():
        if not any(column.quantity == quantity and any(column.figures) for grid in grids for column in grid.columns):
            raise InputError(f"--columns: {path} has no figure that can be read under '{heading}'")
    if is_page and (warning := warning_in(text, is_page=True)):
        grids = tuple(grid if grid.warning else replace(grid, warning=warning) for grid in grids)
    pairs = tuple(grid_of(each, {}) for table in tables for each in side_by_side(table))
    spoken = list(sentences_in(text)) if is_page else []
    grids = tuple(_with_batch(grid, spoken) for grid in grids)
    details = {
        "grids": grids,
        "refused": refused,
        "pairs": pairs,
        "said": claims_in(spoken, grids),
        "quotes": quotes_in(spoken, grids),
        "sums": sums_in(spoken, grids),
    }
    return [Reported(path=path, name=str(path), form=FORM, details=details)] if grids or pairs else []


def columns_named(typed: Sequence[str]) -> dict[str, str]:
    """Return what `--columns 'devices=#GPUs,length=2048'` says, by quantity. A heading may hold commas.

    Raises:
        InputError: it is not a list of QUANTITY=HEADING, has another quantity than QUANTITIES, or one of two twice.
    """
    named: dict[str, str] = {}
    for part in (part for text in typed for part in re.split(r",(?=\s*\w+\s*=)", text)):
        quantity, separator, heading = (" ".join(word.split()) for word in part.partition("="))
        said = f"--columns {quantity}{separator}{heading}"
        if not separator or not quantity or not heading:
            raise InputError(f"{said}: write QUANTITY=HEADING, such as devices=#GPUs, or QUANTITY=NUMBER")
        name = SHORT.get(quantity.lower(), quantity.lower())
        if name not in QUANTITIES:
            raise InputError(f"{said}: no such quantity; there are {', '.join(QUANTITIES)}")
        if name in named:
            raise InputError(f"{said}: {name} is '{named[name]}' already; name each quantity once")
        if heading in named.values() and not is_number(heading):
            raise InputError(f"{said}: '{heading}' is another quantity already; name each heading once")
        named[name] = heading
    return named


def _turned(table: Table) -> Table:
    """Return a table that has its quantities in the first column with them as headings; others as they are."""
    names = [plain(row.cells[0]) for row in table.rows]
    known = [quantity for name in names if (quantity := quantity_of(name))]
    headings = [heading for heading in map(plain, table.header) if not _OF_TWO.search(heading)]
    if len(known) < LEAST_TURNED or not {*known} & {*RESULTS} or any(map(quantity_of, headings)):
        return table
    columns = zip(*(row.cells for row in table.rows), strict=True)
    rows = [
        Row(table.line, (heading, *cells))
        for at, (heading, cells) in enumerate(zip(table.header, columns, strict=True))
        if at == 0 or not _OF_TWO.search(heading)
    ]
    return Table(("name", *names), tuple(rows[1:]), table.line, table.around)


def _with_quality(grid: Grid, every: Sequence[Grid]) -> Grid:
    """Return a table without a loss or a score with those that another table of the file gives for all of its rows."""
    names = [text.lower() for text in grid.columns[0].texts]
    if any(grid.column(name) for name in LEARNT) or len({*names}) < 2 or any(map(is_number, names)):
        return grid
    heading = grid.columns[0].heading.lower()
    for other in (each for each in every if each.columns[0].heading.lower() == heading):
        place = {text.lower(): row for row, text in enumerate(other.columns[0].texts)}
        learnt = [column for column in other.columns if column.quantity in LEARNT and not column.is_of_words]
        if learnt and len(place) == len(other.lines) and {*names} <= {*place}:
            columns = list(grid.columns)
            for each in learnt:
                cells = [(each.figures[place[name]], each.texts[place[name]]) for name in names]
                figures, texts = zip(*cells, strict=True)
                columns.append(replace(each, figures=figures, texts=texts, is_of_words=True))
            return replace(grid, columns=tuple(columns))
    return grid


def _with_batch(grid: Grid, spoken: Sequence[Spoken]) -> Grid:
    """Return a table of micro batches with the one global batch that its section says of all, if that can be."""
    if grid.column("batch") or not grid.column("micro_batch") or grid.column("accumulation"):
        return grid
    section = " ".join(each.words for each in spoken if grid.lines[0] in each.section)
    said = only(IN_WORDS["batch"], section)
    figure = figure_of(said, "count") if said else None
    sizes = [
        each.value * (devices.value if (devices := grid.figure("devices", row)) else 1)
        for row in range(len(grid.lines)) if (each := grid.figure("micro_batch", row))
    ]  # fmt: skip
    if figure is None or said is None or any(figure.value % size for size in sizes):
        return grid
    cells = (figure,) * len(grid.lines), (said,) * len(grid.lines)
    return replace(grid, columns=(*grid.columns, Column("batch in the text", "batch", *cells, is_of_words=True)))


def _is_of_results(grid: Grid, is_named: bool) -> bool:
    known = {column.quantity for column in grid.columns if column.quantity and any(column.figures)}
    return bool(known) and (
        is_named or bool(known & {*RESULTS}) or (len(known) > 1 and bool(known & {"batch", "devices"}))
    )
