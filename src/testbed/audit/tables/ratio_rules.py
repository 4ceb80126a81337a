"""Note ratios of rows that differ in more than their number of devices."""

from __future__ import annotations

import re
from collections.abc import Iterator

from testbed.audit.finding import NOTE, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.agreement import best_fits
from testbed.audit.tables.columns import Column
from testbed.audit.tables.fits import Fit, Grid
from testbed.audit.tables.intervals import interval_of, is_reference_row
from testbed.audit.tables.relations import FORMULAS

SAME_WORK = ("micro_batch", "length", "params")  # what scaling over more devices leaves as it is
OF_SCALING = re.compile(r"(?i)scaling|efficiency")


def scaled_rows_do_the_same_work(item: Reported) -> Iterator[Finding]:
    """Compare each row of an efficiency or a scaling with the one reference that its figure follows from.

    Strong scaling shares one batch among the devices: its micro batch may shrink.
    """
    for formula in (formula for formula in FORMULAS if formula.is_definition):
        for grid in item.details["grids"]:
            for fit in best_fits(grid, formula):
                subject = fit.terms[0].column
                if OF_SCALING.search(subject.heading) and fit.is_sound and not fit.outliers:
                    yield from _other_work(item, grid, fit, subject)


def _other_work(item: Reported, grid: Grid, fit: Fit, subject: Column) -> Iterator[Finding]:
    for row in fit.rows:
        references = _references(fit, subject, row)
        if is_reference_row(subject, row) or len(references) != 1:
            continue
        names = SAME_WORK[1:] if _is_strong(grid, subject, row, references[0]) else SAME_WORK
        differ = [
            f"{column.heading} {column.texts[row]} against {column.texts[references[0]]}"
            for name in names
            for column in grid.of(name)
            if _differs(column, row, references[0])
        ]
        if differ:
            runs = tuple(f"{item.name}:{grid.lines[each]}" for each in (row, references[0]))
            message = f"{subject.heading} {subject.texts[row]} compares rows that differ in more: {'; '.join(differ)}"
            yield Finding(Rule.EQUAL_WORK, runs, message, NOTE)


def _references(fit: Fit, subject: Column, row: int) -> list[int]:
    """Return the reference rows that the ratio of a row follows from."""
    low, high = interval_of(fit.terms, row, within_row=False) or (0.0, 0.0)
    found = []
    for other in fit.rows:
        base = interval_of(fit.terms, other, within_row=False)
        if other != row and is_reference_row(subject, other) and base and base[0] <= high and base[1] >= low:
            found.append(other)
    return found


def _differs(column: Column, row: int, other: int) -> bool:
    one, two = column.figures[row], column.figures[other]
    return one is not None and two is not None and (one.low > two.high or two.low > one.high)


def _is_strong(grid: Grid, subject: Column, row: int, other: int) -> bool:
    batches = grid.of("batch")
    return "strong" in subject.heading.lower() or any(not _differs(column, row, other) for column in batches)
