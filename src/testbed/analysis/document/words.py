"""Numbers, units and lists in words, alike in every report, table and picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.errors import counted as counted

UNKNOWN = "n/a"
SHOWN = 6  # names in one sentence, before "and 4 more"
BRACKETS = " [{}, {}]"


@dataclass(frozen=True)
class Number:
    """A number as a cell or inside a sentence: value, digits, unit, and its interval where there is one.

    `form` is a format specification or a function. An unknown value reads n/a.
    """

    value: float | None
    form: str | Callable[[float], str]
    low: float | None = None
    high: float | None = None
    unit: str = ""
    interval: str = " ({} to {})"

    def __str__(self) -> str:
        if self.value is None:
            return UNKNOWN
        text = self._spelled(self.value) + self.unit
        if self.low is not None and self.high is not None:
            text += self.interval.format(self._spelled(self.low), self._spelled(self.high))
        return text

    def _spelled(self, value: float) -> str:
        return self.form(value) if callable(self.form) else format(value, self.form)


def digits(value: float) -> str:
    """Return four significant digits, zeros kept: 13.80, 8.000, 1,364; all digits of a larger number: 61,440."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")


def rate(tokens_per_s: float | None) -> str:
    return UNKNOWN if tokens_per_s is None else format(tokens_per_s, ",.0f" if tokens_per_s >= 10 else ".3g")


def times(ratio: float) -> str:
    """Return two decimals; three near 1, where two would not show on which side a bound lies."""
    return f"{ratio:.3f}" if 0.9 < ratio < 1.1 else f"{ratio:.2f}"


def gap(difference: float) -> str:
    """Return the size of a difference between losses: 0.0132, less than 0.0001, or 0."""
    size = abs(difference)
    return f"{size:.4f}" if size >= 0.00005 else "less than 0.0001" if size else "0"


def between(low: float | None, high: float | None, form: Callable[[float], str]) -> str:
    """Return `1.55 to 1.66`; nothing without both bounds."""
    return "" if low is None or high is None else f"{form(low)} to {form(high)}"


def joined(items: Sequence[str], shown: int = SHOWN) -> str:
    """Return `a, b and c`; a long list ends in `and 4 more`."""
    items = [*items[:shown], f"{len(items) - shown} more"] if len(items) > shown + 1 else list(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def ranges(numbers: Sequence[int]) -> str:
    """Return `1-5, 8`: neighbours together."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
