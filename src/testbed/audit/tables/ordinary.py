"""Say what ordinary tables mean by a row that contradicts a formula: a finding stands only where nothing explains it.

explanations.py is about formulas that most rows agree on. These hold for every formula, and each for a kind of table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import permutations

from testbed.audit.tables.agreement import RATIO_OF
from testbed.audit.tables.columns import MEASURED, RATES, Column
from testbed.audit.tables.explanations import is_near, kinds_in
from testbed.audit.tables.fits import SLACK, Grid, Outlier
from testbed.audit.tables.intervals import interval_of

# Headings of counts whose meaning is another program's: LBS, EP, VP, chunks
A_COUNT = re.compile(r"^[A-Z]{2,4}$|(?i:batch|chunk|shard|replica|stage|virtual|group|parallel|ranks|accum)")
PARALLEL = ("dp", "tp", "pp", "cp")
COUNTED = ("devices", "nodes", "dp", "batch")  # subjects of formulas that multiply whole numbers
OF_MANY_ROWS = re.compile(r"(?i)(geo(metric)?[ -]?)?(mean|average|avg|median|sum|overall|total)\.?")
# A time of everything is longer than the steps in it, by evaluation, saving and start-up.
OF_EVERYTHING = ("time = steps x time of a step", "tokens/s = tokens / time")
LONGEST_REST = math.log(1.5)
MEAN_OF_RATES = math.log(1.05)  # times that vary by a fifth
AVERAGE = re.compile(r"(?i)\b(avg|average|mean)\b")
WORD = re.compile(r"[a-z]+[a-z0-9.]*")


def is_explained(grid: Grid, one: Outlier) -> bool:
    """Return whether anything in the table explains why a row contradicts a formula."""
    return any(explains(grid, one) for explains in EXPLANATIONS)


def _is_of_many_rows(grid: Grid, one: Outlier) -> bool:
    """Return whether the row is an average: a mean of ratios is no ratio of means."""
    return any(OF_MANY_ROWS.fullmatch(column.texts[one.row].strip("*: ")) for column in grid.columns)


def _is_mean_of_rates(grid: Grid, one: Outlier) -> bool:
    """Return whether a mean of rates is above the rate of the mean time, by the variance of the times."""
    headings = {term.column.quantity: term.column.heading for term in one.terms}
    measured = [headings[name] for name in ("step_s", *RATES) if name in headings]
    is_of_means = len(measured) == 2 and "step_s" in headings and all(map(AVERAGE.search, measured))
    return is_of_means and one.agreed[0] < one.high and one.low < one.agreed[1] + MEAN_OF_RATES


def _refers_to_the_row_above(grid: Grid, one: Outlier) -> bool:
    """Return whether a ratio is one of the row above, as in a list of improvements on top of each other."""
    if not one.formula.is_definition or one.is_within_row or one.row == 0:
        return False
    above = interval_of(one.terms[1:], one.row - 1, within_row=True)
    slack = one.formula.slack
    return above is not None and one.low - slack <= above[1] and one.high + slack >= above[0]


def _is_of_a_figure_that_is_not_read(grid: Grid, one: Outlier) -> bool:
    """Return whether a ratio of two rows may be one of another column, of steps to a loss or of a cost.

    Several rates and times that agree leave no doubt.
    """
    if not one.formula.is_definition or one.is_within_row or len(one.members) > 1:
        return False
    if sum(column.quantity in RATIO_OF for column in grid.columns) > 1:
        return False
    used = {id(term.column) for term in one.terms}
    return any(
        id(column) not in used and column.quantity is None and _differ(column, (one.row, *one.members))
        for column in grid.columns
    )


def _differ(column: Column, rows: tuple[int, ...]) -> bool:
    """Return whether all these rows have a number in a column, and not one for all."""
    texts = [column.texts[row] for row in rows]
    return all(re.match(r"[-+~]?\d", text) for text in texts) and len(set(texts)) > 1


def _has_the_missing_count(grid: Grid, one: Outlier) -> bool:
    """Return whether one or two other counts of the row give the factor by which it misses.

    A table has counts whose meaning its heading does not tell: a local batch, virtual stages, sharded or expert ranks.
    """
    if any(term.column.quantity in MEASURED for term in one.terms):
        return False
    used = {id(term.column) for term in one.terms}
    may_count = (None, *PARALLEL, *(("micro_batch",) if one.formula.subject == "batch" else ()))
    factors: set[float] = set()
    for column in grid.settings:
        if column.quantity not in may_count or (column.quantity is None and not A_COUNT.search(column.heading)):
            continue
        own = _count(column.texts[one.row])
        others = {_count(column.texts[row]) or 1 for row in one.members}
        if id(column) not in used and own and own not in others:
            factors |= {math.log(own / other) for other in (*others, 1)}
    signed = {sign * factor for factor in factors for sign in (1, -1)}
    return any(is_near(one, factor) for factor in signed | {sum(pair) for pair in permutations(signed, 2)})


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d{0,4}", text) else None


def _is_of_a_group_of_its_own(grid: Grid, one: Outlier) -> bool:
    """Return whether the rows of the same model, or of another setting in common, all agree with it."""
    within_row = not one.formula.is_definition
    in_common = [each for each in grid.settings if {each.texts[row] for row in one.members} == {each.texts[one.row]}]
    rows = [
        row
        for row in range(len(grid.lines))
        if row != one.row and all(each.texts[row] == each.texts[one.row] for each in in_common)
    ]
    for column in grid.settings:
        own = column.texts[one.row]
        alike = [row for row in rows if column.texts[row] == own]
        if column.quantity in COUNTED or own in {column.texts[row] for row in one.members} or not alike:
            continue
        found = [interval_of(one.terms, row, within_row) for row in alike]
        known = [each for each in found if each]
        if known and all(low - SLACK <= one.high and high + SLACK >= one.low for low, high in known):
            return True
    return False


def _has_a_node_that_is_not_full(grid: Grid, one: Outlier) -> bool:
    """Return whether the last of several nodes has fewer devices than the others."""
    nodes = grid.of("nodes")
    if one.formula.subject != "devices" or len(one.terms) != 2 or one.terms[1].column not in nodes:
        return False
    count = one.terms[1].column.figures[one.row]
    ratio = math.exp(one.high - one.agreed[0])
    return count is not None and 1 - 1 / count.value < ratio < 1


def _is_a_time_of_everything(grid: Grid, one: Outlier) -> bool:
    return one.formula.words in OF_EVERYTHING and -LONGEST_REST < one.low < 0


def _lacks_a_word_of_the_others(grid: Grid, one: Outlier) -> bool:
    """Return whether all rows that agree have a word in their label that this one does not: another model's name."""
    if one.formula.is_one or one.formula.is_definition or one.formula.is_of_any_kind:
        return False
    for column in (each for each in grid.settings if each.quantity is None):
        of_members = [_words(column.texts[row]) for row in one.members]
        if of_members and set.intersection(*of_members) - _words(column.texts[one.row]):
            return True
    return False


def _words(text: str) -> set[str]:
    return set(WORD.findall(text.lower())) | kinds_in(text)


EXPLANATIONS: tuple[Callable[[Grid, Outlier], bool], ...] = (
    _is_of_many_rows,
    _is_mean_of_rates,
    _refers_to_the_row_above,
    _is_of_a_figure_that_is_not_read,
    _has_the_missing_count,
    _is_of_a_group_of_its_own,
    _has_a_node_that_is_not_full,
    _is_a_time_of_everything,
    _lacks_a_word_of_the_others,
)
