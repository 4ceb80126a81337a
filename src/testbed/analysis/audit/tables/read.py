"""Read the tables of a Markdown or CSV file for the audit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.analysis.audit.reported import Reported
from testbed.analysis.audit.tables.agreement import Grid
from testbed.analysis.audit.tables.column_ratios import comparisons_in
from testbed.analysis.audit.tables.columns import check_names, columns_of
from testbed.analysis.audit.tables.figures import plain
from testbed.analysis.audit.tables.grid import Table, csv_tables, markdown_tables
from testbed.analysis.audit.tables.html import html_tables
from testbed.analysis.audit.tables.turned import turned
from testbed.errors import InputError


def tables_of_markdown(text: str) -> list[Table]:
    """Return the pipe tables of a Markdown text, and those in HTML."""
    return markdown_tables(text) + (html_tables(text) if "<table" in text.lower() else [])


FORM = "table"
MOST_ROWS = 2000  # more are the steps of a run, and no table of results
ENOUGH_COUNTS = 3  # batch sizes and ranks, or values and their mean: they can contradict each other
AVERAGED = re.compile(r"(?i)(seed|run)\s*#?\d+|mean|average|avg\.?|median|min(imum)?|max(imum)?")
SUFFIXES = {".md": tables_of_markdown, ".csv": csv_tables, ".tsv": csv_tables}
INFERENCE = re.compile(r"(?i)inference|serving|prefill|decoding|generation")
TRAINING = re.compile(r"(?i)train|fine-?tun")
SHORT = {"gpus": "devices", "mbs": "micro_batch", "gbs": "batch", "seq_len": "length"}  # that --columns takes too
PROMISED = ("expected", "projected", "estimated", "theoretical", "target")  # how a heading of such tables begins


def tables_in(path: Path, text: str, named: Mapping[str, str] | None = None) -> list[Reported]:
    """Return what the tables of a file say, as one; nothing where no column of a table is known.

    `named` is `--columns`. A table that the source calls expected or projected claims no measurement.

    Raises:
        InputError: `named` has a quantity that is not known, or a heading that no table has.
    """
    tables = SUFFIXES.get(path.suffix.lower(), tables_of_markdown)(text)
    compared = tuple(table for table in tables if not _is_promised(table) and comparisons_in(table))
    tables = [turned(table) or table for table in tables]
    if named:
        check_names(named, tables, str(path))
    grids = tuple(grid for table in tables if (grid := _grid(table, named)))
    if not grids and named:
        raise InputError(f"{path} has no table with figures that --columns names")
    if not grids and not compared:
        return []
    return [Reported(path=path, name=str(path), form=FORM, details={"grids": grids, "compared": compared})]


def _grid(table: Table, named: Mapping[str, str] | None) -> Grid | None:
    if not 0 < len(table.rows) <= MOST_ROWS or _is_promised(table):
        return None
    columns = columns_of(table, named)
    if not named and _is_of_inference(table):  # requests run side by side: a latency is no time of a step
        columns = [column for column in columns if column.quantity != "step_s"]
    known = [column for column in columns if column.quantity and any(column.figures)]
    is_of_results = len(known) > 1 and not all(column.is_setting for column in known)
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


def columns_named(typed: Sequence[str]) -> dict[str, str]:
    """Return what `--columns 'devices=#GPUs,length=2048'` says, by quantity."""
    named = {}
    for part in ",".join(typed).split(","):
        quantity, separator, heading = part.partition("=")
        if not separator or not quantity.strip() or not heading.strip():
            raise InputError(f"--columns {part}: write QUANTITY=HEADING, such as devices=#GPUs, or QUANTITY=NUMBER")
        named[SHORT.get(quantity.strip(), quantity.strip())] = heading.strip()
    return named
