"""Turn a table whose metrics stand in rows, so that each of its columns is a run."""

from __future__ import annotations

import re
from dataclasses import replace

from testbed.audit.tables.columns import quantity_of
from testbed.audit.tables.figures import plain
from testbed.audit.tables.grid import Row, Table

ENOUGH_METRICS = 2
# Columns that compare or explain the others, and hold no run.
NO_RUN = re.compile(
    r"(?i)speed-?up|ratio|improve|gain|change|delta|\bdiff|Δ|reduc|saving|efficiency|overhead|note|comment|unit|"
    r"descri|remark|status|winner|impact|target|source|\bvs\b|better|why|meaning|details?$|^%|scaling|ideal|expected|"
    r"theor|estimat|project|predict|goal"
)
AVERAGES = re.compile(r"(?i)(mean|avg\.?|average|median|min(imum)?|max(imum)?|std.*)")


def turned(table: Table) -> Table | None:
    """Return the table with a row for each of its runs, or None where its rows are runs already.

    Metrics stand in rows where the first column names two quantities and the heading names none.
    """
    if len(table.header) < 2 or any(AVERAGES.fullmatch(plain(heading)) for heading in table.header):
        return None
    metrics = {quantity_of(plain(row.cells[0]), row.cells[1:]) for row in table.rows} - {None}
    runs = [at for at, heading in enumerate(table.header) if at and not NO_RUN.search(plain(heading))]
    headings = [quantity_of(plain(table.header[at]), []) for at in runs]
    if len(metrics) < ENOUGH_METRICS or not runs or any(headings):
        return None
    rows = tuple(Row(table.line, (table.header[at], *(row.cells[at] for row in table.rows))) for at in runs)
    header = (table.header[0] or "run", *(row.cells[0] for row in table.rows))
    lines = (table.line, *(row.line for row in table.rows))
    return replace(table, header=header, rows=rows, lines_of_columns=lines)
