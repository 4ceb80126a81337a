"""Find the rows of a table that contradict a formula under every convention, by what the other rows agree on.

A formula is a product of powers of columns that is 1, or one constant for all rows that did the same work. Every figure
is an interval: what its digits leave open. Rows agree where one constant lies in all of their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations, product

from testbed.audit.tables.columns import RATES, Column
from testbed.audit.tables.explanations import is_certain, kinds_in
from testbed.audit.tables.fits import SLACK, Fit, Formula, Grid, Outlier, Term
from testbed.audit.tables.intervals import interval_of, is_reference_row

MOST_CHOICES = 64
RATIO_OF = (*RATES, "time_s", "step_s", "flops", "device_hours")


def best_fits(grid: Grid, formula: Formula) -> Iterator[Fit]:
    """Yield, for each column of the formula's subject, the convention that explains the most rows.

    Its outliers contradict the formula under all conventions, and nothing that the table says explains them.
    """
    for subject in grid.of(formula.subject):
        fits = list(fits_of(grid, formula, subject))
        if not fits:
            continue
        stating = [sum(subject.figures[row] is not None for row in fit.rows) for fit in fits]
        covering = [fit for fit, count in zip(fits, stating, strict=True) if count == max(stating)]
        best = min(covering, key=lambda fit: fit.key)
        explained: set[int] = set()
        for fit in fits:  # a row may follow another convention than the rest
            if formula.is_one or (fit.is_sound and not fit.outliers and len(fit.rows) > 1):
                explained |= set(fit.rows) - {one.row for one in fit.outliers}
        best.outliers = [one for one in best.outliers
                         if best.is_sound and one.row not in explained and is_certain(grid, one)]  # fmt: skip
        yield best


def fits_of(grid: Grid, formula: Formula, subject: Column, of_any_kind: bool = False) -> Iterator[Fit]:
    """Yield how the rows agree with each convention, in each choice of columns and each grouping of the rows."""
    if formula.is_definition:
        yield from _fits_within_rows(grid, formula, subject)
    for powers in formula.variants:
        names = [name for name in powers if name != formula.subject]
        if formula.subject not in powers or any(
            name not in powers and grid.of(name) for name in formula.never_left_out
        ):
            continue
        choices = product(*([column for column in grid.of(name) if column is not subject] for name in names))
        for chosen in islice(choices, MOST_CHOICES):
            if formula.is_definition and not of_any_kind and any(_is_other_kind(subject, column) for column in chosen):
                continue
            terms = (Term(subject, powers[formula.subject]),
                     *(Term(column, powers[name]) for name, column in zip(names, chosen, strict=True)))  # fmt: skip
            yield from _fits_of_choice(grid, formula, terms)


def _is_other_kind(subject: Column, column: Column) -> bool:
    """Return whether two headings name arithmetic or devices, and none in common: FP32 against mixed precision."""
    one, other = kinds_in(subject.heading), kinds_in(column.heading)
    return bool(one and other and not one & other)


def _fits_within_rows(grid: Grid, formula: Formula, subject: Column) -> Iterator[Fit]:
    """Yield how a ratio follows from two columns of one quantity in its own row."""
    for quantity in RATIO_OF:
        for one, other in islice(permutations(grid.of(quantity), 2), MOST_CHOICES):
            terms = (Term(subject, -1), Term(one, 1), Term(other, -1))
            rows = range(len(grid.lines))
            intervals = {row: found for row in rows if (found := interval_of(terms, row, within_row=True))}
            if intervals:
                fit = _fit_to_one(formula, terms, intervals)
                if len(intervals) <= 2 and not fit.is_sound:
                    fit.is_sound = True
                    fit.outliers = [replace(outlier, needs_support=True) for outlier in fit.outliers]
                yield fit


def _fits_of_choice(grid: Grid, formula: Formula, terms: tuple[Term, ...]) -> Iterator[Fit]:
    within = not formula.is_definition
    intervals = {row: found for row in range(len(grid.lines)) if (found := interval_of(terms, row, within))}
    if len(intervals) < 2 and not formula.is_one:
        return
    if formula.is_one:
        yield _fit_to_one(formula, terms, intervals)
        return
    yield _fit(grid, formula, terms, [list(intervals)], intervals)
    used = {id(term.column) for term in terms}
    for column in grid.settings:
        groups: dict[str, list[int]] = {}
        for row in intervals:
            groups.setdefault(column.texts[row], []).append(row)
        if len(groups) > 1 and all(len(rows) > 1 for rows in groups.values()) and id(column) not in used:
            yield _fit(grid, formula, terms, list(groups.values()), intervals)


def _fit_to_one(formula: Formula, terms: tuple[Term, ...], intervals: dict[int, tuple[float, float]]) -> Fit:
    slack = formula.slack
    holds = tuple(row for row, (low, high) in intervals.items() if low <= slack and high >= -slack)
    is_half = len(holds) == 1 and len(intervals) == 2
    fit = Fit(terms, tuple(intervals), is_sound=is_half or (bool(holds) and 3 * len(holds) >= 2 * len(intervals)))
    agreeing = set(holds)
    for row, (low, high) in intervals.items():
        if row not in agreeing:
            fit.outliers.append(Outlier(row, low, high, (0.0, 0.0), holds, terms, formula, is_within_row=True))
    return fit


def _fit(
    grid: Grid,
    formula: Formula,
    terms: tuple[Term, ...],
    groups: list[list[int]],
    intervals: dict[int, tuple[float, float]],
) -> Fit:
    fit = Fit(terms, tuple(intervals))
    for rows in groups:
        agreed = agreed_by_most([intervals[row] for row in rows], formula.slack)
        members = tuple(row for row in rows if intervals[row][0] <= agreed[1] and intervals[row][1] >= agreed[0])
        agreeing = set(members)
        apart = [row for row in rows if row not in agreeing]
        fit.is_sound &= not apart or 3 * len(members) >= 2 * len(rows) or (formula.is_definition and len(rows) == 2)
        is_pair = bool(apart) and len(rows) == 2
        if is_pair:  # a ratio against its reference: the reference is right
            members, apart = _reference_first(terms, rows)
            is_pair = not (members and _bases_agree(grid, terms[0].column, rows))
            fit.is_sound &= bool(members)
            agreed = intervals[members[0]] if members else agreed
        fit.outliers += [
            Outlier(row, *intervals[row], agreed, members, terms, formula, needs_support=is_pair) for row in apart
        ]
    return fit


def _bases_agree(grid: Grid, subject: Column, rows: list[int]) -> bool:
    """Return whether all columns that a ratio may be of say the same of two rows, up or down: they are one base."""
    logs = []
    for column in grid.columns:
        figures = [column.figures[row] for row in rows]
        if column.quantity in RATIO_OF and not _is_other_kind(subject, column) and figures[0] and figures[1]:
            logs.append(abs(math.log(figures[0].value / figures[1].value)))
    return bool(logs) and max(logs) - min(logs) <= SLACK


def _reference_first(terms: tuple[Term, ...], rows: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """Return which of two rows a ratio refers to, and the other; neither where no row is the reference."""
    is_one = [is_reference_row(terms[0].column, row) for row in rows]
    if is_one.count(True) != 1:
        return (), rows
    at = is_one.index(True)
    return (rows[at],), [rows[1 - at]]


def agreed_by_most(intervals: Sequence[tuple[float, float]], slack: float) -> tuple[float, float]:
    """Return the range that lies in the most of some intervals, each half of `slack` wider at both ends."""
    ends = sorted([(low - slack / 2, 0) for low, _ in intervals] + [(high + slack / 2, 1) for _, high in intervals])
    best = count = start = 0
    for index, (_, is_end) in enumerate(ends):
        count += -1 if is_end else 1
        if count > best and not is_end:
            best, start = count, index
    return (ends[start][0], next(end for end, closes in islice(ends, start, None) if closes)) if ends else (0.0, 0.0)
