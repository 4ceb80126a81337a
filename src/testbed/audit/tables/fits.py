"""Hold a table's columns, a formula between them, and how far its rows agree with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from testbed.audit.tables.columns import Column

Powers = Mapping[str, int]  # quantity -> exponent
SLACK = math.log(1.01)  # beyond rounding: times and rates are averaged over windows that differ a little
SLACK_OF_DEFINITION = math.log(1.002)  # a ratio and what it is computed from


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
