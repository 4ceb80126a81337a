"""Make the findings of formulas: rows of a table whose figures do not follow from one another."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.agreement import best_fits
from testbed.audit.tables.columns import MEASURED, Column
from testbed.audit.tables.explanations import COUNTS
from testbed.audit.tables.figures import NUMBER
from testbed.audit.tables.fits import Fit, Formula, Grid, Outlier
from testbed.audit.tables.intervals import is_reference_row
from testbed.audit.tables.ordinary import is_explained
from testbed.audit.tables.relations import FORMULAS
from testbed.audit.tables.swapped import swapped_columns

ENOUGH_SUPPORT = 2  # rows elsewhere in the file that confirm a convention
SHOWN_LINES = 4
TABLE = "table of the file"


def figures_follow_from_one_another(item: Reported) -> Iterator[Finding]:
    """Yield one finding for each row that contradicts a formula under every convention."""
    grids: tuple[Grid, ...] = item.details["grids"]
    pools = pooled(grids)
    found: dict[tuple[int, int], list[tuple[Grid, Outlier]]] = {}
    for formula in FORMULAS:
        fits: list[tuple[Grid, Fit]] = [(grid, fit) for grid in grids for fit in best_fits(grid, formula)]
        if formula.is_definition:
            swapped = {id(one) for grid in grids for pair in swapped_columns(grid, formula) for one in pair}
            fits = [(grid, fit) for grid, fit in fits if id(fit.terms[0].column) not in swapped]
        for grid, fit in fits:
            support = sum(other.support for _, other in fits if other is not fit and other.form == fit.form)
            for outlier in fit.outliers:
                if not outlier.needs_support or support >= ENOUGH_SUPPORT:
                    found.setdefault(_key(grid, outlier.row), []).append((grid, outlier))
        if not (formula.is_one or formula.is_definition):
            alone = {grid.lines[row] for grid, fit in fits if len(fit.rows) > 2 for row in fit.rows}
            for grid, outlier in _of_pools(pools, formula):
                if grid.lines[outlier.row] not in alone:
                    found.setdefault(_key(grid, outlier.row), []).append((grid, outlier))
    for _, contradictions in sorted(found.items()):
        outliers = [pair for pair in contradictions if not is_explained(*pair)]
        if not outliers:
            continue
        grid, worst = max(outliers, key=lambda pair: (len(pair[1].members), pair[1].distance))
        message = f"{said(grid, worst)}"
        if others := sorted({one.formula.words for _, one in outliers} - {worst.formula.words}):
            message += f"; nor does the row fit: {'; '.join(others)}"
        severity = FAILS if says_a_result(grid, worst.row) else NOTE  # a row of a plan claims nothing
        lines = [grid.place(worst.row, worst.terms[0].column)]
        if len(worst.members) == 1 and not grid.runs:
            lines.append(grid.lines[worst.members[0]])
        runs = tuple(f"{item.name}:{number}" for number in lines)
        yield Finding(Rule.FOLLOWS, runs, message, severity, corrected(grid, worst))


def pooled(grids: Sequence[Grid]) -> list[Grid]:
    """Return tables of one layout as one, with their titles as a column: a constant may hold in all of them."""
    by_layout: dict[tuple[str, ...], list[Grid]] = {}
    for grid in (grid for grid in grids if not grid.runs):
        by_layout.setdefault(tuple(column.heading for column in grid.columns), []).append(grid)
    found = []
    for members in by_layout.values():
        quantities = {tuple(column.quantity for column in grid.columns) for grid in members}
        if len(members) < 2 or len(quantities) > 1:
            continue
        columns = [
            replace(
                each[0],
                figures=sum((column.figures for column in each), ()),
                texts=sum((column.texts for column in each), ()),
            )
            for each in zip(*(grid.columns for grid in members), strict=True)
        ]
        titles = tuple(f"{number}" for number, grid in enumerate(members) for _ in grid.lines)
        columns.append(Column(TABLE, None, (None,) * len(titles), titles))
        found.append(Grid(tuple(line for grid in members for line in grid.lines), tuple(columns)))
    return found


def _of_pools(pools: Sequence[Grid], formula: Formula) -> Iterator[tuple[Grid, Outlier]]:
    """Yield the outliers among tables of one layout whose own table agrees with the others in another row."""
    for pool in pools:
        tables = next(column.texts for column in pool.columns if column.heading == TABLE)
        for fit in best_fits(pool, formula):
            for outlier in fit.outliers:
                if tables[outlier.row] in {tables[row] for row in outlier.members}:
                    yield pool, outlier


def _key(grid: Grid, row: int) -> tuple[int, int]:
    """Return the row of a finding: its line, or the column of a table whose metrics stand in rows."""
    return grid.lines[row], row if grid.runs else 0


def says_a_result(grid: Grid, row: int) -> bool:
    """Return whether a row of results has one; in a table of settings alone every row counts."""
    results = [column for column in grid.columns if column.quantity in MEASURED]
    return not results or any(column.figures[row] for column in results)


def said(grid: Grid, one: Outlier) -> str:
    """Return the formula, the figures of the row, and what the other rows agree on."""
    left = [shown(term.column.heading, term.column.texts[one.row]) for term in one.terms if term.power > 0]
    right = [shown(term.column.heading, term.column.texts[one.row]) for term in one.terms if term.power < 0]
    product = " x ".join(left) or "1"
    product += "".join(f" / {text}" for text in right)
    lines = [grid.label(row) for row in one.members if row != one.row]
    listed = ", ".join(lines[:SHOWN_LINES]) + (
        f" and {len(lines) - SHOWN_LINES} more" if len(lines) > SHOWN_LINES else ""
    )
    kind = "column" if grid.runs else "line"
    rest = f" ({kind}{'s' * (len(lines) > 1)} {listed})" if lines else " of the file's other tables"
    factor = math.exp(_middle(one.low, one.high) - _middle(*one.agreed))
    subject = one.terms[0].column
    if not one.is_within_row and one.formula.is_definition and is_reference_row(subject, one.row):
        return (
            f"the figures of {subject.heading} in other rows{rest} do not refer to this row: {product} is {factor:.4g} "
            "times what they refer to"
        )
    compared = (
        f"times what it has to be; it holds in {len(lines)} other rows{rest if lines else ''}" if one.is_within_row
        else f"times what it is in the rows that agree{rest}"
    )  # fmt: skip
    return (
        f"{subject.heading} does not follow from the {grid.name_of(one.row)}: {one.formula.words}, but {product} is "
        f"{factor:.4g} {compared}"
    )


def corrected(grid: Grid, one: Outlier) -> str | None:
    """Return the figure of the formula's subject that would follow, if the row's other figures are right.

    A speed-up that other rows divide by a number of devices may have another meaning in its own: no figure is given.
    """
    if one.formula.subject in ("speedup", "ratio") and any(term.column.quantity in COUNTS for term in one.terms):
        return None
    is_reference = (
        not one.is_within_row and one.formula.is_definition and is_reference_row(one.terms[0].column, one.row)
    )
    term = one.terms[1] if is_reference else one.terms[0]
    factor = math.exp((_middle(*one.agreed) - _middle(one.low, one.high)) / term.power)
    text = term.column.texts[one.row]
    number = NUMBER.search(text)
    if not number:
        return None
    plain = number[2].replace(",", "").replace("_", "")
    if not re.fullmatch(r"[\d.]+", plain):
        return None
    decimals = len(plain.partition(".")[2])
    value = float(plain) * (10.0 ** int(number[3][1:]) if number[3] else 1.0) * factor
    written = f"{value:.{len(number[2].partition('.')[2])}e}" if number[3] else f"{value:,.{decimals}f}"
    return f"{term.column.heading} {written}{text[number.end() :]} would follow from the row's other figures"


def shown(heading: str, text: str) -> str:
    return f"{heading} {text or '(empty: 1)'}"


def _middle(low: float, high: float) -> float:
    return (low + high) / 2
