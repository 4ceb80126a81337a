"""Hold the lines of a training log as printed, with the relations between their figures.

A figure is an interval: the printed number and half of its last digit to both sides. Figures disagree only where no
number in the intervals fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

FLOAT_NOISE = 1e-6  # relative: programs compute what they print in float32
SMALLEST = 1e-200  # the reciprocal of a smaller number may overflow
FEWEST_THAT_AGREE = 3
MOST_THAT_DISAGREE = 0.01  # of the lines: where more do, the program counts in another way than the relation
ALWAYS_FEW = 2  # a figure that enters the next line's too makes two lines disagree


@dataclass(frozen=True)
class Figure:
    """A printed number, and how far the number behind it may lie from it."""

    value: float
    slack: float = 0.0

    @property
    def low(self) -> float:
        return self.value - self.slack - abs(self.value) * FLOAT_NOISE

    @property
    def high(self) -> float:
        return self.value + self.slack + abs(self.value) * FLOAT_NOISE

    def times(self, factor: float) -> Figure:
        return Figure(self.value * factor, self.slack * abs(factor))

    def minus(self, other: Figure) -> Figure:
        return Figure(self.value - other.value, self.slack + other.slack)


@dataclass(frozen=True)
class LogLine:
    """One step as a log prints it."""

    step: int
    figures: dict[str, Figure] = field(default_factory=dict)
    at_s: float | None = None  # date and time of the line, in seconds since a fixed moment
    is_nan: bool = False  # its training loss is not a number
    last_step: int | None = None  # of the whole run, as the line says it

    def value(self, name: str) -> float | None:
        return self.figures[name].value if name in self.figures else None


@dataclass(frozen=True)
class Product:
    """A figure of a log's header that must be the product of others: (words, number) each."""

    factors: tuple[tuple[str, int], ...]
    result: tuple[str, int]


@dataclass(frozen=True)
class Relation:
    """Figures of a line whose product, each to its power, is one number in every line of a run."""

    words: str  # as a formula of the names that the log uses
    powers: dict[str, int]
    expected: Figure | None = None  # the number, where the log's header gives it
    source: str = ""  # where the header says it, in words
    is_fixed: bool = False  # nothing but an error changes the number in this log: two lines that differ are enough

    def interval(self, line: LogLine) -> tuple[float, float] | None:
        """Return the least and the greatest product that the printed figures allow, none of them below 0.

        None where a figure is missing, or so small that its digits do not tell it from 0.
        """
        figures = [(line.figures.get(name), power) for name, power in self.powers.items()]
        known = [(found, power) for found, power in figures if found is not None and not _has_no_power(found, power)]
        if len(known) < len(figures):
            return None
        low = high = 1.0
        for found, power in known:
            if found.high <= 0:  # a count that falls: no product of positive figures
                return (0.0, 0.0)
            if found.low <= 0:
                return None
            ends = (found.low**power, found.high**power)
            low, high = low * min(ends), high * max(ends)
        return (low, high) if low > 0 and math.isfinite(high) else None


def _has_no_power(figure: Figure, power: int) -> bool:
    """Return whether a figure is 0 below a fraction's line, or of a size that only damage gives."""
    return abs(figure.value) < SMALLEST and (power < 0 or figure.value != 0)


@dataclass(frozen=True)
class Disagreement:
    """Lines that a relation does not allow."""

    relation: Relation
    constant: float  # of the lines that agree, or of the header
    lines: tuple[LogLine, ...]
    num_checked: int

    @property
    def is_of_every_line(self) -> bool:
        return len(self.lines) == self.num_checked


def disagreement(relation: Relation, lines: Sequence[LogLine]) -> Disagreement | None:
    """Return the lines that contradict the others, or the header; None where there are none.

    None too where many lines differ, or where those that differ agree among themselves: then something that the log
    does not print has changed, or the program counts in another way.
    """
    intervals = [(line, ends) for line in lines if (ends := relation.interval(line))]
    if not intervals:
        return None
    constant, outside = _outside(intervals, relation.expected)
    if not outside:
        return None
    found = Disagreement(relation, constant, tuple(line for line, _ in outside), len(intervals))
    agreeing, few = len(intervals) - len(outside), few_of(len(intervals))
    if relation.expected and not agreeing:
        # The lines have to agree on another number: else the relation is not this program's.
        return found if len(_outside(intervals, None)[1]) <= few else None
    are_alike = len(outside) > 1 and not _outside(outside, None)[1]
    if len(outside) > few or are_alike:
        return None
    if relation.expected or (relation.is_fixed and agreeing >= len(outside)):
        return found
    return found if agreeing >= max(FEWEST_THAT_AGREE, 2 * len(outside)) else None


def few_of(count: int) -> float:
    """Return how many of so many lines may be wrong."""
    return max(ALWAYS_FEW, MOST_THAT_DISAGREE * count)


def _outside(
    intervals: Sequence[tuple[LogLine, tuple[float, float]]], expected: Figure | None
) -> tuple[float, list[tuple[LogLine, tuple[float, float]]]]:
    """Return the number that most intervals hold, or the expected one, and the intervals that do not hold it."""
    if expected:
        low, high = expected.low, expected.high
    else:
        # At the low end of some interval the most intervals hold a number.
        starts = sorted(ends[0] for _, ends in intervals)
        stops = sorted(ends[1] for _, ends in intervals)
        open_now, most, low, stop_at = 0, 0, starts[0], 0
        for start in starts:
            while stops[stop_at] < start:
                stop_at, open_now = stop_at + 1, open_now - 1
            open_now += 1
            if open_now > most:
                most, low = open_now, start
        high = min(ends[1] for _, ends in intervals if ends[0] <= low <= ends[1])
    outside = [(line, ends) for line, ends in intervals if ends[1] < low or ends[0] > high]
    return (low + high) / 2, outside
