"""How one file of `nsys stats` writes its numbers, decided from all of them.

The producing machine's locale groups the digits: 62,14,25,70,603 in India, 1.234.567 in Germany, 1'234'567 in
Switzerland, 1 234 567 with one of three kinds of space in France. One number alone can mean two things (1.895 is less
than two, or nearly two thousand); but a column always has the same number of decimals, so its decimal mark is known,
and a file has one mark and one separator. What contradicts that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SEPARATORS = r"[,.'\u2019 \u00a0\u202f\u2009]"  # comma, dot, apostrophes, spaces: plain, no-break, narrow and thin


class Number(NamedTuple):
    """A cell that should hold a number with this many decimals, and where it stands."""

    text: str
    decimals: int
    line: int
    column: str

    def __str__(self) -> str:
        return f"line {self.line} ({self.column} {self.text!r})"


@dataclass(frozen=True)
class NumberStyle:
    """How one file writes numbers: `decimal` is a character, `group` one or "" where digits are not grouped."""

    decimal: str
    group: str

    def value(self, text: str) -> int | float:
        """The number: a whole one exactly, one with decimals as the nearest float."""
        plain = text.replace(self.group, "") if self.group else text
        return float(plain.replace(self.decimal, ".")) if self.decimal in plain else int(plain)

    def half_of_last_decimal(self, text: str) -> float:
        """How far the printed number can be from the one that was rounded; 0 for a whole number."""
        return 0.5 * 10 ** -len(text.rpartition(self.decimal)[2]) if self.decimal in text else 0.0


def number_style(path: Path, numbers: Iterable[Number]) -> NumberStyle:
    """The one way in which all `numbers` of the file `path` are written.

    ValueError: one of them is no number, or two of them contradict each other.
    """
    # each character, or size of a group, with the number in which it was first seen, to be named in an error
    marks: dict[str, Number] = {}
    separators: dict[str, Number] = {}
    sizes: dict[str, Number] = {}
    ungrouped = None
    for number in numbers:
        mark = rf"(?P<mark>[.,])[0-9]{{{number.decimals}}}" if number.decimals else ""
        parts = re.fullmatch(rf"(?P<whole>[0-9]+(?:{_SEPARATORS}[0-9]+)*){mark}", number.text)
        if parts is None:
            kind = f"a number with {number.decimals} decimal{'s' * (number.decimals > 1)}"
            raise ValueError(
                f"{path} line {number.line}: {number.column} is {number.text!r}, which is not "
                f"{kind if number.decimals else 'a whole number'}"
            )
        if number.decimals:
            marks.setdefault(parts["mark"], number)
        used = re.findall("[^0-9]", parts["whole"])
        if not used:
            # some locales leave four digits alone: 1234, but 12 345
            ungrouped = ungrouped or (number if len(parts["whole"]) > 4 else None)
            continue
        for separator in used:
            separators.setdefault(separator, number)
        first, *middle, last = map(len, re.split("[^0-9]", parts["whole"]))
        if last != 3 or first > 3 or set(middle) - {2, 3}:
            raise ValueError(
                f"{path} line {number.line}: {number.column} is {number.text!r}, in which the digits are not "
                "grouped as in any number"
            )
        for size in [*middle, *([3] if first == 3 else [])]:  # a first group of two fits both ways of grouping
            sizes.setdefault(f"{size} digits", number)
    for name, found in (("decimal mark", marks), ("group separator", separators), ("size of groups", sizes)):
        if len(found) > 1:
            raise ValueError(
                f"{path}: more than one {name}: {'; '.join(f'{key!r} in {at}' for key, at in found.items())}"
            )
    mark, group = next(iter(marks), "."), next(iter(separators), "")
    if group == mark and marks:
        raise ValueError(f"{path}: {mark!r} separates groups in {separators[group]} and decimals in {marks[mark]}")
    if group and ungrouped:
        raise ValueError(f"{path}: digits are grouped in {separators[group]}, but not in {ungrouped}")
    return NumberStyle(mark, group)
