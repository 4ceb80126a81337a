"""Compute between which numbers the product of a row's figures lies."""

from __future__ import annotations

import math

from testbed.audit.tables.columns import Column
from testbed.audit.tables.figures import is_reference
from testbed.audit.tables.fits import Term

RATIOS = ("speedup", "ratio", "efficiency")


def interval_of(terms: tuple[Term, ...], row: int, within_row: bool) -> tuple[float, float] | None:
    """Return the logarithms between which the product of a row lies; None where a figure is missing."""
    low = high = 0.0
    for number, (column, power) in enumerate((term.column, term.power) for term in terms):
        figure = column.figures[row]
        if figure is None:
            if number == 0 and not within_row and is_reference(column.texts[row]):
                continue  # the row that the ratios refer to: its own is 1
            return None
        if not within_row and column.quantity in RATIOS and _is_only_reference(column, row):
            continue
        ends = (power * math.log(figure.low), power * math.log(figure.high))
        low, high = low + min(ends), high + max(ends)
    return low, high


def is_reference_row(subject: Column, row: int) -> bool:
    figure = subject.figures[row]
    return figure is None or abs(figure.value - 1) < 1e-9


def _is_only_reference(subject: Column, row: int) -> bool:
    """Return whether this row alone has the ratio 1: it is what the others refer to, and 1 is not rounded."""
    own = subject.figures[row]
    if own is None or abs(own.value - 1) >= 1e-9:
        return False
    return sum(figure is not None and abs(figure.value - 1) < 1e-9 for figure in subject.figures) == 1
