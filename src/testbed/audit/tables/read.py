"""Read the tables of a Markdown or CSV file for the audit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from testbed.audit.readers.curves import number
from testbed.audit.reported import Reported
from testbed.audit.tables.column_ratios import comparisons_in
from testbed.audit.tables.columns import QUANTITIES, Column, check_names, columns_of, is_number
from testbed.audit.tables.figures import plain
from testbed.audit.tables.fits import Grid
from testbed.audit.tables.grid import Table, csv_tables, markdown_tables
from testbed.audit.tables.html import html_tables
from testbed.audit.tables.turned import turned
from testbed.errors import InputError


def tables_of_markdown(text: str) -> list[Table]:
    """Return the pipe tables of a Markdown text, and those in HTML."""
    return markdown_tables(text) + (html_tables(text) if "<table" in text.lower() else [])


FORM = "table"
MOST_ROWS = 2000  # more are the steps of a run, and no table of results
MOST_KNOWN = 24  # columns: their combinations take minutes
ENOUGH_COUNTS = 3  # batch sizes and ranks, or values and their mean: they can contradict each other
AVERAGED = re.compile(r"(?i)(seed|run)\s*#?\d+|mean|average|avg\.?|median|min(imum)?|max(imum)?")
STEP = re.compile(r"(?i)((global|train|training|optimizer)[ _])?(step|iter|iteration|epoch)s?")
FEWEST_STEPS = 10
SUMS = ("tokens", "time_s", "device_hours")
SUFFIXES = {".md": tables_of_markdown, ".csv": csv_tables, ".tsv": csv_tables}
INFERENCE = re.compile(r"(?i)inference|serving|prefill|decoding|generation")
TRAINING = re.compile(r"(?i)train|fine-?tun")
SHORT = {"gpus": "devices", "mbs": "micro_batch", "gbs": "batch", "seq_len": "length"}  # that --columns takes too
PROMISED = ("expected", "projected", "estimated", "theoretical", "target")  # how a heading of such tables begins


def tables_in(path: Path, text: str, named: Mapping[str, str] | None = None) -> list[Reported]:
    """Return what the tables of a file say, as one; nothing where no column of a table is known.

    `named` is `--columns`. A table that the source calls expected or projected claims no measurement.

    Raises:
        InputError: `named` has a heading that no table has, or one without figures.
    """
    tables = SUFFIXES.get(path.suffix.lower(), tables_of_markdown)(text)
    compared = tuple(table for table in tables if not _is_promised(table) and comparisons_in(table))
    tables = [turned(table) or table for table in tables]
    if named:
        check_names(named, tables, str(path))
    grids = tuple(grid for table in tables if (grid := _grid(table, named)))
    for quantity, heading in (named or {}).items():
        columns = [column for grid in grids for column in grid.of(quantity)]
        if not any(any(column.figures) for column in columns if column.heading in (heading, f"{quantity}={heading}")):
            raise InputError(f"--columns: {path} has no figure that can be read under '{heading}'")
    if not grids and not compared:
        return []
    return [Reported(path=path, name=str(path), form=FORM, details={"grids": grids, "compared": compared})]


def _grid(table: Table, named: Mapping[str, str] | None) -> Grid | None:
    if not 0 < len(table.rows) <= MOST_ROWS or _is_promised(table):
        return None
    columns = _without_running_totals(columns_of(table, named))
    if not named and _is_of_inference(table):  # requests run side by side: a latency is no time of a step
        columns = [column for column in columns if column.quantity != "step_s"]
    known = [column for column in columns if column.quantity and any(column.figures)]
    if len(known) > MOST_KNOWN:
        return None
    is_of_results = bool(named) or (len(known) > 1 and not all(column.is_setting for column in known))
    averages = [column for column in columns if AVERAGED.fullmatch(column.heading)]
    if not is_of_results and len(known) < ENOUGH_COUNTS and len(averages) < ENOUGH_COUNTS:
        return None
    runs = tuple(plain(row.cells[0]) for row in table.rows) if table.lines_of_columns else ()
    return Grid(tuple(row.line for row in table.rows), tuple(columns), f"{table.title}\n{table.context}", runs)


def _is_of_inference(table: Table) -> bool:
    words = f"{table.title} {' '.join(table.header)}"
    return bool(INFERENCE.search(words) or (INFERENCE.search(table.context) and not TRAINING.search(table.context)))


def _is_promised(table: Table) -> bool:
    return table.title.lower().startswith(PROMISED)


def _without_running_totals(columns: Sequence[Column]) -> list[Column]:
    """Return the columns, in a table of a run's steps without what adds up over them: its start is in every sum."""
    if not any(STEP.fullmatch(column.heading) and _grows(column.texts) for column in columns):
        return list(columns)
    empty = (None,) * len(columns[0].texts)
    return [
        replace(column, quantity=None, figures=empty) if column.quantity in SUMS and _grows(column.texts) else column
        for column in columns
    ]


def _grows(texts: Sequence[str]) -> bool:
    values = [value for text in texts if (value := number(text)) is not None]
    return FEWEST_STEPS <= len(texts) == len(values) and all(before < after for before, after in pairwise(values))


def columns_named(typed: Sequence[str]) -> dict[str, str]:
    """Return what `--columns 'devices=#GPUs,length=2048'` says, by quantity. A heading may hold commas.

    Raises:
        InputError: it is no list of QUANTITY=HEADING, has another quantity than QUANTITIES, or one of two twice.
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
