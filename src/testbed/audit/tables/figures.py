"""Read the figure of a cell: its value in plain units, and what its digits leave open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.audit.words import SIGNS

LONGEST = 100  # characters of a heading or a figure; more is a text, and patterns take quadratic time
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "mins": 60.0,
           "minutes": 60.0, "h": 3600.0, "hours": 3600.0, "hr": 3600.0, "d": 86400.0, "days": 86400.0}  # fmt: skip
# in a cell; in a heading "m" may be millions
_SECONDS_OF_CELL = {**SECONDS, "m": 60.0, "minute": 60.0, "hour": 3600.0, "hrs": 3600.0, "day": 86400.0, "second": 1.0,
                    "secs": 1.0}  # fmt: skip
_NUMBER = re.compile(r"\+?(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(e[-+]?\d{1,2})?", re.I)
# Bounds ("<5") are not read, and neither are figures that the source marks with a footnote or as an estimate.
_MARKED = re.compile(r"[~<>≤≥^†‡§?*¹²³⁴]|\best\b|\bestimate|\bup to\b|\[\d+\]|\bOOM\b", re.I)
_REFERENCE = re.compile(r"-*|n/?a|\(?(baseline|base|ref|reference)\.?\)?", re.I)
MOST_SHARE = 1.2  # of an efficiency without a percent sign
SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Figure:
    """A positive number, and the lowest and highest that rounding or cutting off would print the same."""

    value: float
    low: float
    high: float

    def over(self, other: Figure) -> Figure:
        """Return how many times the other figure this one is."""
        return Figure(self.value / other.value, self.low / other.high, self.high / other.low)


def exactly(value: float) -> Figure:
    return Figure(value, value, value)


def is_number(text: str) -> bool:
    return re.fullmatch(r"\d[\d,.]*\s?[kKmMbB%]?", text) is not None


def plain(cell: str) -> str:
    """Return a cell's text without its markup."""
    text = re.sub(r"<[^<>]*>", " ", cell)
    text = re.sub(r"\[([^\[\]]*)\]\([^()]*\)", r"\1", text).replace("&nbsp;", " ").replace("\\", "").translate(SIGNS)
    text = re.sub(r"\*\*|__|`|\$", "", text)
    return re.sub(r"^\*([^*]+)\*$", r"\1", text.strip()).strip()


def is_reference(cell: str) -> bool:
    """Return whether a cell of a ratio says that its row is what the others are divided by."""
    return _REFERENCE.fullmatch(cell) is not None


def last_place(texts: Sequence[str]) -> float:
    """Return what rounding leaves open in the whole numbers of a column: half the place of the zeros that all end with.

    Whole numbers without such zeros may be cut off too: 1.
    """
    matches = (re.match(r"[1-9][\d,]*(?![\d.])", text[:LONGEST]) for text in texts)
    whole = [match[0].replace(",", "") for match in matches if match]
    zeros = min((len(digits) - len(digits.rstrip("0")) for digits in whole), default=0)
    return 0.5 * 10.0**zeros if zeros else 1.0


def figure_of(text: str, kind: str, scale: float = 1.0, last_of_whole: float = 1.0) -> Figure | None:
    """Return the figure of a cell; None: empty, text, marked as an estimate, or several numbers.

    `kind` is count (exact), number, time (in seconds), share or factor. `scale` is the unit of the heading.
    """
    text = text.strip()
    if kind == "count":  # a footnote changes no number of devices
        text = re.sub(r"(?:\\?\*|[†‡§¹²³⁴]|\[\^\w+\])+$", "", text)
    if len(text) > LONGEST or _MARKED.search(text):
        return None
    text = re.sub(r"(?<=\d) (?=\d{3}(?:\D|$))", "", text)  # 4 310
    text = re.sub(r"\([^()]*\)| ?(?:±|\+/-) ?[\d.,]+ ?%?", "", text).strip()
    text = re.sub(r"^x ?(?=\d)", "", text) if kind == "factor" else text
    text = re.sub(r"^(\+?\d+),(\d{1,2}|\d{4,})(?!\d|,)", r"\1.\2", text)  # 2,9 is 2.9, and 2,900 is not
    match = _NUMBER.match(text)
    if not match:
        return None
    digits, power = match[1].replace(",", ""), int(match[2][1:]) if match[2] else 0
    if kind == "factor" and re.fullmatch(r"\+\d+(?:\.\d+)? ?%", text):  # +41 % is 1.41 times
        share, last = float(digits) / 100, 0.01 * _last_digit(digits)
        return Figure(1 + share, 1 + share - last, 1 + share + last)
    factor = _factor(text[match.end() :].strip().lower(), kind, scale)
    if factor is None or len(digits) > 30 or abs(power) > 30:
        return None
    last = _last_digit(digits) if "." in digits else last_of_whole if factor == scale and not power else 1.0
    factor *= 10.0**power
    value = float(digits) * factor
    if not 0 < value < 1e30:
        return None
    unit = 0.0 if kind == "count" and factor == 1 else last * factor
    return Figure(value, max(value - unit, 0.01 * value), value + unit)


def _last_digit(digits: str) -> float:
    """Return the place of the last digit of a number: 0.01 of 1.25."""
    return 10.0 ** -len(digits.partition(".")[2])


def _factor(rest: str, kind: str, scale: float) -> float | None:
    """Return what a figure is multiplied by for what stands behind it; None: it is not a single figure."""
    rest = re.sub(r"^/ ?s(?:ec)?$", "", rest) if kind == "number" else rest
    if re.search(r"\d", rest) or re.match(r"[-:+,~/]", rest):
        return None
    unit = re.match(r"%|[^\W\d_]*", rest)
    word = unit[0] if unit else ""
    if word == "%":
        return 0.01 if kind == "share" else None  # +55 % is another convention than 1.55x, and 30 % of a model no size
    if kind == "time":
        return _SECONDS_OF_CELL.get(word) if word else scale
    if word in SUFFIXES and kind in ("number", "count"):
        return SUFFIXES[word]
    return scale


def are_factors(cells: Sequence[str]) -> bool:
    """Return whether all figures of a column end with x."""
    figures = [cell for cell in map(plain, cells) if re.search(r"\d", cell)]
    return bool(figures) and all(re.match(r"~? ?\d+(?:[.,]\d+)? ?x\b", figure) for figure in figures)


def are_shares(cells: Sequence[str]) -> bool:
    """Return whether the figures of a column are shares, in percent or of 1, with what measurements scatter."""
    figures = [figure_of(plain(cell), "number") for cell in cells if re.search(r"\d", cell)]
    are_small = all(figure and figure.value <= MOST_SHARE for figure in figures)
    return bool(figures) and (are_small or all("%" in cell for cell in cells if re.search(r"\d", cell)))
