"""Check columns that compare two others: a speed-up, a ratio or an improvement, in tables of any figures.

The figures of a row may be of any quantity, and one row's need not be another's: "time 28 s, 14 s, 2.0x" and "memory
8 GB, 6 GB, -25 %" stand in one table. Known quantities in columns of one heading are left to relations.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from testbed.audit.finding import FAILS, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.columns import QUANTITIES, quantity_of
from testbed.audit.tables.counts import count_in
from testbed.audit.tables.figures import CLOCK, LONGEST_CLOCK, MARKED, NUMBER, Figure, figures_of, plain
from testbed.audit.tables.grid import Table

COMPARES = re.compile(
    r"(?i)speed-?up|\bratio\b|improve|\bgain\b|faster|change|delta|Δ|reduc|sav(?:ing|ed)|overhead|\bdiff"
)
SUMMARY = re.compile(
    r"(?i)(average|avg\.?|mean|geo\S*( mean)?|overall|median|total|sum|min|max|best|all)"
    r"( (speed-?up|improvement|gain))?"
)  # a row of means, whose comparison is the mean of the others
OF_SPEED = re.compile(r"(?i)speed-?up|\bratio\b")  # says how it is computed
STATED = re.compile(rf"[-+↑↓]?\s*(?:{NUMBER.pattern})\s*(%|x)?[a-z ]*", re.I)
ENOUGH_ROWS = {1: 2, 2: 3, 3: 3}  # number of pairs of columns -> rows that follow from one; of more pairs MANY
MANY = 4
MOST_PAIRS = 200
MOST_COLUMNS = 32
SLACK = 0.02  # of a ratio, beyond rounding
NEAR = 0.05  # in which rows agree on how a comparison is computed
POINT = 0.01  # of a percentage, beyond rounding
OTHER_UNIT = re.compile(r"(?i)[\d%] *(pp|p\.p|points?|ppt|s|sec|ms|us|min|h|[kmgt]i?b|gb|mb|tok|w)\b")  # a difference
MOST_ZEROS = 0.1  # how much the zeros at the end of a whole number may hide

Interval = tuple[float, float]
Values = dict[int, list[tuple[Figure, str] | None]]  # column -> the figure of each row, and its unit


@dataclass(frozen=True)
class Stated:
    """A cell that compares two others: 1.89x, -25 %, 0.93."""

    text: str
    figure: Figure
    is_percent: bool


@dataclass(frozen=True)
class Comparison:
    """A column that follows, in most of its rows, from two others."""

    at: int
    of: tuple[int, int]
    stated: tuple[Stated | None, ...]
    rows: tuple[int, ...]  # that follow from these two
    explained: frozenset[int]  # rows that follow from any two columns


def comparisons_in(table: Table) -> list[Comparison]:
    """Return the columns of a table that compare two others; none of a table whose pairs take long."""
    if len(table.header) > MOST_COLUMNS:
        return []
    values = _values(table)
    pairs = list(combinations(values, 2))[:MOST_PAIRS]
    found = []
    for at in _compared(table):
        stated = tuple(_stated(row.cells[at], row.cells[0]) for row in table.rows)
        followed = {pair: _rows_that_follow(table, pair, values, stated) for pair in pairs}
        if not followed:
            continue
        best, rows = max(followed.items(), key=lambda entry: len(entry[1]))
        if len(pairs) > 1 and 2 * len(_rows_that_follow(table, best, values, (*stated[1:], stated[0]))) > len(rows):
            continue  # the columns give what other rows state as well: they say nothing about it
        comparable = sum(bool(one and _ratio(values, best, row)) for row, one in enumerate(stated))
        is_half = len(pairs) == len(rows) == 1 and comparable == 2 and OF_SPEED.search(plain(table.header[at]))
        is_sound = len(rows) >= ENOUGH_ROWS.get(len(pairs), MANY) and 3 * len(rows) >= 2 * comparable
        quantities = [quantity_of(plain(table.header[column]), []) for column in best]
        is_known = quantities[0] and quantities[0] == quantities[1]
        if (is_half or is_sound) and not is_known:
            explained = frozenset(row for each in followed.values() for row in each)
            found.append(Comparison(at, best, stated, tuple(rows), explained))
    return found


def ratios_follow_from_two_columns(item: Reported) -> Iterator[Finding]:
    """Yield the rows whose comparison no two of their figures give, where two columns give that of the others."""
    for table in item.details.get("compared", ()):
        values = _values(table)
        for comparison in comparisons_in(table):
            for row, one in enumerate(comparison.stated):
                ratio = _ratio(values, comparison.of, row)
                if one and ratio and row not in comparison.explained and not _follows_down(values, comparison, row):
                    yield _finding(
                        item, table, comparison, row, _corrected(values, comparison, row), _options(ratio)[0]
                    )


def _finding(item: Reported, table: Table, comparison: Comparison, row: int, corrected: str, ratio: float) -> Finding:
    told = f"{plain(table.header[comparison.at])} {plain(table.rows[row].cells[comparison.at])}"
    parts = [f"{plain(table.header[column])} {plain(table.rows[row].cells[column])}" for column in comparison.of]
    count = len(comparison.rows)
    message = (
        f"{told} does not follow from {' and '.join(parts)}: their ratio is {ratio:.4g} or {1 / ratio:.4g}; in {count} "
        f"other row{'s' * (count > 1)} it follows from these two columns"
    )
    return Finding(Rule.FOLLOWS, (f"{item.name}:{table.rows[row].line}",), message, FAILS, corrected)


def _compared(table: Table) -> list[int]:
    """Return the columns that compare others, by a word of the heading, or as "A / B" of two that begin with them."""
    headings = [plain(heading) for heading in table.header]
    found = []
    for at, heading in enumerate(headings):
        parts = [part.strip().lower() for part in re.split(r" / | vs\.? ", heading)]
        others = [other.lower() for other in headings if other != heading]
        is_ratio = len(parts) == 2 and all(any(part and other.startswith(part) for other in others) for part in parts)
        if at and (is_ratio or COMPARES.search(heading)):
            found.append(at)
    return found


def _values(table: Table) -> Values:
    """Return the figures of each column that may be compared, with their units; settings are none."""
    found, compared = {}, _compared(table)
    for at, heading in enumerate(table.header):
        quantity = quantity_of(plain(heading), [])
        if at in compared or (quantity and QUANTITIES.get(quantity, ("", ""))[1] == "count"):
            continue
        values = [_value(row.cells[at]) for row in table.rows]
        if sum(value is not None for value in values) > 1:
            found[at] = values
    return found


def _value(cell: str) -> tuple[Figure, str] | None:
    """Return a figure and its unit. Figures of other units are not compared."""
    text = re.sub(r"\([^()]*\)", "", plain(cell)).strip()
    if len(text) < LONGEST_CLOCK and CLOCK.fullmatch(text):
        clock = figures_of([text], "time")[0]
        return (clock, "clock") if clock else None
    figure, match = figures_of([text], "number")[0], NUMBER.match(text)
    if not figure or not match or text.startswith(("+", "-")):
        return None
    hidden = figure.value * (MOST_ZEROS if re.match(r"\d[\d,]", match[2]) else 1.0)
    low, high = max(figure.low, figure.value - hidden), min(figure.high, figure.value + hidden)
    return Figure(figure.value, low, high, text), re.sub(r"^\s*[kmb]?\b", "", text[match.end() :].lower()).strip()


def _stated(cell: str, label: str) -> Stated | None:
    text = re.sub(r"\([^()]*\)", "", plain(cell)).strip()
    match = STATED.fullmatch(text)
    if not match or MARKED.search(text) or OTHER_UNIT.search(text) or SUMMARY.fullmatch(plain(label)):
        return None
    figure = figures_of([text.lstrip("+-↑↓ ")], "factor")[0]
    return Stated(text, figure, match[4] == "%") if figure else None


def _rows_that_follow(
    table: Table,
    pair: tuple[int, int],
    values: Values,
    stated: Sequence[Stated | None],
) -> list[int]:
    counts = [count_in(plain(table.header[column])) for column in pair]
    per_device = counts[0] / counts[1] if counts[0] and counts[1] else 1.0
    found = []
    for row, one in enumerate(stated):
        ratio = _ratio(values, pair, row)
        if not one or not ratio:
            continue
        scaled = [(ratio[0] * factor, ratio[1] * factor) for factor in {1.0, per_device, 1 / per_device}]
        points = _points(values, pair, row, one)
        if any(_fits(one, each) for each in scaled) or (points and _overlaps(points, one.figure, POINT)):
            found.append(row)
    return found


def _ratio(values: Values, pair: tuple[int, int], row: int) -> Interval | None:
    """Return between which numbers the ratio of two figures of a row lies; None: of two units, or none."""
    one, other = (values[column][row] for column in pair)
    if not one or not other or (one[1] != other[1] and one[1] and other[1]):
        return None
    return one[0].low / other[0].high, one[0].high / other[0].low


def _points(values: Values, pair: tuple[int, int], row: int, stated: Stated) -> Interval | None:
    """Return the difference of two figures: of percentages, or where the comparison has no unit."""
    one, other = (values[column][row] for column in pair)
    if not one or not other or (stated.is_percent and one[1] != "%"):
        return None
    low, high = one[0].low - other[0].high, one[0].high - other[0].low
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _fits(stated: Stated, ratio: Interval) -> bool:
    """Return whether a ratio, its inverse, or what either differs from 1 by is what a cell states."""
    for low, high in (ratio, (1 / ratio[1], 1 / ratio[0])):
        less = 0.0 if low <= 1 <= high else min(abs(low - 1), abs(high - 1))
        for each in ((low, high), (less, max(abs(low - 1), abs(high - 1)))):
            if _overlaps(each, stated.figure, POINT if stated.is_percent else SLACK * stated.figure.value):
                return True
    return False


def _overlaps(interval: Interval, figure: Figure, slack: float) -> bool:
    return interval[0] <= figure.high + slack and interval[1] >= figure.low - slack


def _follows_down(values: Values, comparison: Comparison, row: int) -> bool:
    """Return whether a comparison follows from the first row of one column, as a ratio or a difference."""
    stated = comparison.stated[row]
    pairs = [(values[column][row], values[column][0]) for column in comparison.of if row]
    return any(own and first and stated and _follows_from(stated, own[0], first[0]) for own, first in pairs)


def _follows_from(stated: Stated, own: Figure, first: Figure) -> bool:
    away = own.low - first.high, own.high - first.low
    difference = 0.0 if away[0] <= 0 <= away[1] else min(map(abs, away)), max(map(abs, away))
    return _fits(stated, (own.low / first.high, own.high / first.low)) or _overlaps(difference, stated.figure, 0.0)


def _corrected(values: Values, comparison: Comparison, row: int) -> str:
    """Return what would follow from the row's two figures, computed as in most of the rows that follow."""
    figures = {each: _options(ratio) for each in (row, *comparison.rows)
               if (ratio := _ratio(values, comparison.of, each))}  # fmt: skip
    near = [
        sum(abs(figures[each][kind] - stated.figure.value) < NEAR * stated.figure.value for each in comparison.rows
            if each in figures and (stated := comparison.stated[each]))
        for kind in range(len(figures[row]))
    ]  # fmt: skip
    value = figures[row][near.index(max(near))]
    one = comparison.stated[row]
    return f"{100 * value:.3g}% would follow" if one and one.is_percent else f"{value:.4g}x would follow"


def _options(ratio: Interval) -> tuple[float, ...]:
    middle = (ratio[0] * ratio[1]) ** 0.5
    return middle, 1 / middle, abs(middle - 1), abs(1 / middle - 1)
