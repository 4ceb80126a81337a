"""Read the tables of a file that have a known result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from testbed.audit.reported import TABLE, Reported
from testbed.audit.tables.columns import QUANTITIES, RESULTS, Grid, grid_of, quantity_of
from testbed.audit.tables.figures import LONGEST, figure_of, is_number, plain
from testbed.audit.tables.grid import Row, Table, csv_tables, from_latex, page_tables
from testbed.audit.tables.sentences import quotes_in
from testbed.audit.words import BATCHES
from testbed.errors import InputError

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
SUFFIXES = {".md": page_tables, ".csv": csv_tables, ".tsv": csv_tables}


def tables_in(path: Path, text: str, named: Mapping[str, str] | None = None) -> list[Reported]:
    """Return what the tables of a file say, as one; nothing where no table has a result that is known.

    `named` is `--columns`: quantity -> heading, or a number for every row.

    Raises:
        InputError: `named` has a heading that no table has, or one without figures.
    """
    text = from_latex(text) if path.suffix.lower() == ".tex" else text
    found = SUFFIXES.get(path.suffix.lower(), page_tables)(text)
    tables = [table for table in found if len(table.rows) <= MOST_ROWS]
    of_results = [
        table
        for table in tables
        if {*map(quantity_of, map(plain, table.header))} & {*RESULTS} or _turned(table) is not table
    ]
    if len(of_results) == 1 or len(tables) == 1:  # the whole page is about one table
        tables = [replace(table, section=table.page) for table in tables]
    headings = sorted({plain(heading) for table in tables for heading in table.header} - {""})
    for heading in (named or {}).values():
        if heading not in headings and not is_number(heading):
            raise InputError(f"--columns: {path} has no column '{heading}'; it has {', '.join(headings) or 'none'}")
    every = [grid_of(path, _turned(table), named or {}) for table in tables]
    grids = tuple(_with_other_tables(grid, every) for grid in every if _is_of_results(grid, bool(named)))
    for quantity, heading in (named or {}).items():
        if not any(column.quantity == quantity and any(column.figures) for grid in grids for column in grid.columns):
            raise InputError(f"--columns: {path} has no figure that can be read under '{heading}'")
    if not grids:
        return []
    details = {
        "grids": grids,
        "refused": {line for grid in every if grid not in grids for line in grid.lines},
        "quotes": quotes_in(text, grids) if path.suffix.lower() not in (".csv", ".tsv") else [],
    }
    return [Reported(path=path, name=str(path), form=TABLE, details=details)]


def no_table_in(path: Path, text: str) -> str:
    """Return why no table of a file is read: its cells under a known heading hold no figures, or none is known."""
    for table in SUFFIXES.get(path.suffix.lower(), page_tables)(text):
        for at, heading in enumerate(map(plain, table.header)):
            cells = [plain(row.cells[at]) for row in table.rows] if quantity_of(heading) in RESULTS else []
            if any(figure_of(cell, "factor") for cell in cells):
                return f"a column '{heading}' that refers to no other row"
            if words := next((cell for cell in cells if re.search(r"\d", cell)), "")[:LONGEST]:
                return f"a table whose cells under '{heading}' are no single figures, as '{words}'"
    return "no table with a heading that is known of a time, a rate or a speed-up (--columns names them)"


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
    return replace(table, header=("name", *names), rows=tuple(rows[1:]))


def _with_other_tables(grid: Grid, every: Sequence[Grid]) -> Grid:
    """Return a table with the conditions that other tables of the page, without a time or a rate, give to rows of
    its names."""
    columns = list(grid.columns)
    names = [text.lower() for text in grid.columns[0].texts]
    for other in every:
        keys = [text.lower() for text in other.columns[0].texts]
        is_of_speed = any(column.quantity in RESULTS and any(column.figures) for column in other.columns)
        if (
            other is grid
            or is_of_speed
            or sum(map(str.isalpha, "".join({*names} & {*keys}))) < 2
            or len({*names} & {*keys}) < LEAST_TURNED
            or len({*keys}) < len(keys)
        ):
            continue
        rows = [keys.index(name) if name in keys else None for name in names]
        taken = {column.quantity or column.word for column in columns}
        for column in other.columns[1:]:
            name = column.quantity or column.word
            if not name or name in taken or (name in BATCHES and {*BATCHES} & taken):
                continue
            figures = tuple(None if row is None else column.figures[row] for row in rows)
            texts = tuple("" if row is None else column.texts[row] for row in rows)
            columns.append(replace(column, figures=figures, texts=texts, is_of_words=True))
    return replace(grid, columns=tuple(columns))


def _is_of_results(grid: Grid, is_named: bool) -> bool:
    known = {column.quantity for column in grid.columns if column.quantity and any(column.figures)}
    is_enough = is_named or bool(known & {*RESULTS}) or (len(known) > 1 and bool(known & {"batch", "devices"}))
    return bool(known) and is_enough
