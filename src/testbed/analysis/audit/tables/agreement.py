"""Find the rows of a table that contradict a formula under every convention, by what the other rows agree on.

A formula is a product of powers of columns that is 1, or one constant for all rows that did the same work. Every figure
is an interval: what its digits leave open. Rows agree where one constant lies in all of their intervals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations, product

from testbed.analysis.audit.tables.columns import RATES, Column
from testbed.analysis.audit.tables.figures import is_reference

Powers = Mapping[str, int]  # quantity -> exponent
SLACK = math.log(1.01)  # beyond rounding: times and rates are averaged over windows that differ a little
SLACK_OF_DEFINITION = math.log(1.002)  # a ratio and what it is computed from
RECOMPUTATION = math.log(4 / 3)  # FLOPs of activation checkpointing, counted or not
FAR = math.log(1.15)  # what two rows alone can hold against a third
MOST_CHOICES = 64
COUNTS = ("devices", "nodes", "dp")  # grow together
BATCHES = ("batch", "micro_batch")
RATIO_OF = (*RATES, "time_s", "step_s", "flops", "device_hours")
# Words in a row's label that stand for other work, other arithmetic or another device.
KIND = re.compile(
    r"fp\d+|tf32|bf16|int\d|amp|mixed|mxfp\d|nvfp4|\b(?:[abhlvt]|gb?h?)\d{2,4}\b|rtx|\b\d+(?:\.\d+)?[bm]\b|lora|frozen"
    r"|seq\w*[\s=_]*\d+|\b\d+k\b|checkpoint\w*|recompute\w*|offload\w*|compile\w*|xla|\bac\b|moe",
    re.I,
)
SIZE = re.compile(r"\d+(?:\.\d+)?[bm]")
NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Grid:
    """The columns of one table, with the line of each row."""

    lines: tuple[int, ...]
    columns: tuple[Column, ...]
    above: str = ""  # its title, and the text between that and the table
    runs: tuple[str, ...] = ()  # where metrics stood in rows: the heading of each of its columns

    def place(self, row: int, column: Column) -> int:
        """Return the line of a figure."""
        return self.lines[row] if column.line is None else column.line

    def label(self, row: int) -> str:
        """Return how a finding names another row."""
        return f"'{self.runs[row]}'" if self.runs else str(self.lines[row])

    def name_of(self, row: int) -> str:
        """Return how a finding names its own row."""
        return f"column '{self.runs[row]}'" if self.runs else "row"

    def of(self, quantity: str) -> list[Column]:
        return [column for column in self.columns if column.quantity == quantity]

    @property
    def settings(self) -> list[Column]:
        return [column for column in self.columns if column.is_setting]


@dataclass(frozen=True)
class Formula:
    """Say that a product of powers is the same for all rows, in words and in each convention that is in use."""

    words: str
    subject: str  # the quantity that a finding is about, in every variant
    variants: tuple[Powers, ...]  # the usual one first
    is_one: bool = False  # the product is 1; else an unknown constant of the table
    is_definition: bool = False  # two rows are enough: a ratio and what it is a ratio of
    hidden: tuple[str, ...] = ()  # quantities that change the constant, where no column gives them
    never_left_out: tuple[str, ...] = ()  # quantities that each variant needs, in a table that has them
    is_of_flops: bool = False  # recomputation may be counted
    is_of_any_kind: bool = False  # holds whatever the arithmetic, the model and the device

    @property
    def slack(self) -> float:
        return SLACK_OF_DEFINITION if self.is_definition else SLACK


@dataclass(frozen=True)
class Term:
    column: Column
    power: int


@dataclass
class Fit:
    """Agreement of the rows with one convention, in one choice of columns and one grouping."""

    terms: tuple[Term, ...]
    rows: tuple[int, ...]  # that have all figures
    outliers: list[Outlier] = field(default_factory=list)
    is_sound: bool = True  # every group has a majority

    @property
    def key(self) -> tuple[bool, int, float]:
        """Return what is least for the fit that explains most; among equals the first convention counts."""
        guessed = sum(one.distance for one in self.outliers if one.needs_support)
        return (not self.is_sound, len(self.outliers), guessed)

    @property
    def form(self) -> tuple[tuple[str | None, int], ...]:
        """Return what fits of the same convention share: of two columns of one quantity also their headings."""
        is_within_row = len({term.column.quantity for term in self.terms[1:]}) < len(self.terms) - 1
        return tuple(
            (term.column.heading if is_within_row else term.column.quantity, term.power) for term in self.terms
        )

    @property
    def support(self) -> int:
        """Return how many rows confirm the convention, those left out that are a reference."""
        apart = {one.row for one in self.outliers}
        figures = [self.terms[0].column.figures[row] for row in self.rows if row not in apart]
        return sum(figure is not None and abs(figure.value - 1) > 1e-9 for figure in figures) if self.is_sound else 0


@dataclass(frozen=True)
class Outlier:
    row: int
    low: float  # of the logarithm of its product
    high: float
    agreed: tuple[float, float]  # of the rows that agree
    members: tuple[int, ...]  # those rows
    terms: tuple[Term, ...]
    formula: Formula
    is_within_row: bool = False  # compared with 1, and not with other rows
    needs_support: bool = False  # by other tables of the file: its own cannot say which convention holds

    @property
    def distance(self) -> float:
        """Return the logarithm of the factor by which the row misses what the others agree on."""
        return max(self.low - self.agreed[1], self.agreed[0] - self.high)


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
                         if best.is_sound and one.row not in explained and _is_certain(grid, one)]  # fmt: skip
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
    for row, (low, high) in intervals.items():
        if row not in holds:
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
    has_one_base = sum(column.quantity in RATIO_OF for column in grid.columns) == 1
    for rows in groups:
        agreed = agreed_by_most([intervals[row] for row in rows], formula.slack)
        members = tuple(row for row in rows if intervals[row][0] <= agreed[1] and intervals[row][1] >= agreed[0])
        apart = [row for row in rows if row not in members]
        fit.is_sound &= not apart or 3 * len(members) >= 2 * len(rows) or (formula.is_definition and len(rows) == 2)
        is_pair = bool(apart) and len(rows) == 2
        if is_pair:  # a ratio against its reference: the reference is right
            members, apart = _reference_first(terms, rows)
            is_pair = not (has_one_base and members)
            fit.is_sound &= bool(members)
            agreed = intervals[members[0]] if members else agreed
        fit.outliers += [
            Outlier(row, *intervals[row], agreed, members, terms, formula, needs_support=is_pair) for row in apart
        ]
    return fit


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
    best, count, found = 0, 0, (0.0, 0.0)
    for index, (place, is_end) in enumerate(ends):
        count += -1 if is_end else 1
        if count > best and not is_end:
            best, found = count, (place, next(end for end, closes in ends[index + 1 :] if closes))
    return found


def interval_of(terms: tuple[Term, ...], row: int, within_row: bool) -> tuple[float, float] | None:
    """Return the logarithms between which the product of a row lies; None where a figure is missing."""
    low = high = 0.0
    is_reference_row = not within_row and _is_only_reference(terms[0].column, row)
    for number, (column, power) in enumerate((term.column, term.power) for term in terms):
        figure = column.figures[row]
        if figure is None:
            if number == 0 and not within_row and is_reference(column.texts[row]):
                continue  # the row that the ratios refer to: its own is 1
            return None
        if number == 0 and is_reference_row:
            continue
        ends = (power * math.log(figure.low), power * math.log(figure.high))
        low, high = low + min(ends), high + max(ends)
    return low, high


def is_reference_row(subject: Column, row: int) -> bool:
    figure = subject.figures[row]
    return figure is None or abs(figure.value - 1) < 1e-9


def _is_only_reference(subject: Column, row: int) -> bool:
    """Return whether this row alone has the ratio 1: it is what the others refer to, and 1 is not rounded."""
    ones = [index for index, figure in enumerate(subject.figures) if figure and abs(figure.value - 1) < 1e-9]
    return ones == [row]


def _is_certain(grid: Grid, one: Outlier) -> bool:
    """Return whether nothing that the table says explains the row, and enough rows speak against it."""
    formula = one.formula
    if one.distance <= formula.slack / 2 or (formula.is_of_flops and _is_near(one, RECOMPUTATION)):
        return False
    if any("(" in term.column.texts[one.row] and term.column.is_setting for term in one.terms):
        return False  # "1 (4 ranks each)": the row says itself that it counts in another way
    if one.needs_support:
        return True
    if formula.is_one:
        return len(one.members) > 1 or one.distance > FAR
    if formula.is_definition:
        return not _is_second_reference(one) and not _has_another_reference(grid, one)
    if len(one.members) < 3 and one.distance <= FAR:
        return False
    if formula.subject == "devices" and any(column.texts[one.row] == "1" for column in grid.of("nodes")):
        return False  # one node need not be full
    return not _differs_in_what_it_ran(grid, one) and not _has_a_hidden_factor(grid, one)


def _differs_in_what_it_ran(grid: Grid, one: Outlier) -> bool:
    """Return whether the row differs from those that agree in something that they have in common."""
    used = {id(term.column) for term in one.terms}
    has_count = any(term.column.quantity in COUNTS for term in one.terms)
    for column in grid.settings:
        if id(column) in used or (column.quantity in COUNTS and has_count):
            continue
        of_members, own = {column.texts[row] for row in one.members}, column.texts[one.row]
        if len(of_members) == 1 and own not in of_members:
            return True
        kinds = [kinds_in(text) for text in of_members]
        if column.quantity is None and kinds and not one.formula.is_of_any_kind:
            added = kinds_in(own).difference(*kinds)
            missing = kinds[0].intersection(*kinds) - kinds_in(own)
            sizes = {kind for each in kinds for kind in each if SIZE.fullmatch(kind)}
            if missing or any(not SIZE.fullmatch(kind) or len(sizes) < 2 for kind in added):
                return True
    return False


def kinds_in(text: str) -> set[str]:
    return set(KIND.findall(text.lower()))


def _has_a_hidden_factor(grid: Grid, one: Outlier) -> bool:
    """Return whether a batch or a count that no column gives may explain the row: it misses by a small whole factor.

    A row whose label has no number that the others' labels do not have, against three others, says of no such thing.
    """
    given = {term.column.quantity for term in one.terms}
    families = (COUNTS, BATCHES)
    given |= {name for family in families if given & set(family) for name in family}
    if given.issuperset(one.formula.hidden) or not _is_small_factor(one):
        return False
    labels = [
        column for column in grid.settings if column.quantity is None and re.search("[a-z]", column.texts[one.row])
    ]
    of_members = {number for column in labels for row in one.members for number in _numbers(column.texts[row])}
    own = {number for column in labels for number in _numbers(column.texts[one.row])}
    return len(one.members) < 3 or not own <= of_members


def _numbers(text: str) -> list[str]:
    return NUMBERS.findall(KIND.sub(" ", text.lower()))


def _is_second_reference(one: Outlier) -> bool:
    """Return whether the row's ratio is 1 or left out, as in the row that the others refer to."""
    subject = one.terms[0].column
    is_one = [is_reference_row(subject, row) for row in (one.row, *one.members)]
    return subject.figures[one.row] is None or (is_one[0] and any(is_one[1:]))


def _has_another_reference(grid: Grid, one: Outlier) -> bool:
    """Return whether the ratio of the row follows from another row of the table that is a reference itself."""
    subject, slack = one.terms[0].column, one.formula.slack
    references = [row for row in range(len(grid.lines)) if row != one.row and is_reference_row(subject, row)]
    bases = (interval_of(one.terms[1:], row, within_row=True) for row in references)
    return not one.is_within_row and any(
        base is not None and one.low - slack <= base[1] and one.high + slack >= base[0] for base in bases
    )


def _is_small_factor(one: Outlier) -> bool:
    return any(_is_near(one, math.log(factor)) for factor in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128))


def _is_near(one: Outlier, factor: float) -> bool:
    """Return whether the row may miss by just a factor, up or down, given as its logarithm."""
    lowest, highest = one.low - one.agreed[1] - SLACK, one.high - one.agreed[0] + SLACK
    return lowest <= factor <= highest or lowest <= -factor <= highest
