"""Find two columns of ratios whose headings are swapped: each follows from the figures that the other one names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from testbed.audit.finding import FAILS, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.agreement import fits_of
from testbed.audit.tables.columns import Column
from testbed.audit.tables.explanations import kinds_in
from testbed.audit.tables.fits import Fit, Formula, Grid
from testbed.audit.tables.relations import FORMULAS

ENOUGH_ROWS = 3  # that follow, the reference among them


def swapped_columns(grid: Grid, formula: Formula) -> Iterator[tuple[Column, Column]]:
    """Yield pairs of columns that follow from each other's figures in all rows, and not from their own."""
    for one, other in combinations(grid.of(formula.subject), 2):
        if not kinds_in(one.heading) or not kinds_in(other.heading) or kinds_in(one.heading) & kinds_in(other.heading):
            continue
        follow_their_own = any(_follows(fit) for column in (one, other) for fit in fits_of(grid, formula, column))
        if (
            not follow_their_own
            and _follows_from(grid, formula, one, other)
            and _follows_from(grid, formula, other, one)
        ):
            yield one, other


def headings_are_not_swapped(item: Reported) -> Iterator[Finding]:
    for formula in FORMULAS:
        for grid in item.details["grids"] if formula.is_definition else ():
            for one, other in swapped_columns(grid, formula):
                told = [line for line, figure in zip(grid.lines, one.figures, strict=True) if figure]
                message = (
                    f"{one.heading} does not follow from the figures of its own heading in any row, nor does "
                    f"{other.heading}"
                )
                correction = "with the two headings swapped, both columns follow in every row"
                yield Finding(Rule.FOLLOWS, tuple(f"{item.name}:{line}" for line in told), message, FAILS, correction)


def _follows_from(grid: Grid, formula: Formula, subject: Column, other: Column) -> bool:
    """Return whether a column follows from figures whose heading names what the heading of `other` names."""
    return any(
        _follows(fit) and kinds_in(fit.terms[1].column.heading) & kinds_in(other.heading)
        for fit in fits_of(grid, formula, subject, of_any_kind=True)
        if len(fit.terms) == 2
    )


def _follows(fit: Fit) -> bool:
    return fit.is_sound and not fit.outliers and len(fit.rows) >= ENOUGH_ROWS
