"""Read a figure of a table's cell, and the interval of numbers that could have been printed so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = re.compile(
    r"([-+]?)\s*(\d{1,3}(?:[,_']\d{3})+(?:\.\d+)?|\d+,\d{1,2}(?!\d)|\d+(?:\.\d+)?|\.\d+)(e[-+]?\d{1,3})?", re.I
)
# Signs that are written in several ways, as one.
SIGNS = str.maketrans({
    "\N{MULTIPLICATION SIGN}": "x", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{MINUS SIGN}": "-",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{TILDE OPERATOR}": "~", "\N{ALMOST EQUAL TO}": "~",
    "\N{NO-BREAK SPACE}": " ",
})  # fmt: skip
# What the source itself marks as uncertain, or with a footnote, is no figure to hold against it.
MARKED = re.compile(
    r"[~<>≤≥^†‡§?*¹²³⁴]|\bapprox|\best\b|\bestimate|\bca\.|\bup to\b|\[\d+\]|\bOOM\b|\btbd\b|\bpp\b", re.I
)
# A time of several units, each smaller than the one before: 2h 15min, 24m 00s, 1:02:03.5.
CLOCK = re.compile(
    r"(?=.*\d\s*[dhm]\w*\s*\d)(?:(\d+)\s*d(?:ays?)?\s*)?(?:(\d+)\s*h(?:ours?|rs?)?\s*)?(?:(\d+)\s*m(?:in(?:ute)?s?)?\s*)?"
    r"(?:(\d+(?:\.\d+)?)\s*s(?:ec(?:ond)?s?)?)?|(\d{1,3}):([0-5]\d):([0-5]\d(?:\.\d+)?)",
    re.I,
)
LONGEST_CLOCK = 40
REFERENCE = re.compile(r"-*|n/?a|\(?(baseline|base|ref|reference)\.?\)?", re.I)
THOUSANDS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "thousand": 1e3, "million": 1e6, "billion": 1e9}
SUFFIXED = re.compile(r"[\d.,]+\s*[kmbgt](?![a-z/])", re.I)
UNITS = {
    "time": {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "msec": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0,
             "seconds": 1.0, "m": 60.0, "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0,
             "hr": 3600.0, "hrs": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0, "day": 86400.0,
             "days": 86400.0},
    "memory": {"mb": 1e6, "mib": 2.0**20, "m": 2.0**20, "gb": 1e9, "gib": 2.0**30, "g": 2.0**30, "tb": 1e12},
    "flops": {"gflops": 1e9, "tflops": 1e12, "pflops": 1e15, "tflop": 1e12, "pflop": 1e15, "t": 1e12, "p": 1e15},
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A positive number, and the lowest and highest that rounding or cutting off would print the same."""

    value: float
    low: float
    high: float
    text: str  # as it is printed


def plain(cell: str) -> str:
    """Return a cell's text without its markup."""
    text = re.sub(r"<[^<>]*>", " ", cell)
    text = re.sub(r"\[([^\[\]]*)\]\([^()]*\)", r"\1", text).replace("&nbsp;", " ").replace("\\", "").translate(SIGNS)
    text = re.sub(r"\*\*|__|`|\$", "", text)
    return re.sub(r"^\*([^*]+)\*$", r"\1", text.strip()).strip()


def is_reference(cell: str) -> bool:
    """Return whether a cell of a ratio says that its row is what the others are divided by."""
    return REFERENCE.fullmatch(plain(cell)) is not None


def figures_of(cells: Sequence[str], dimension: str, scale: float = 1.0) -> list[Figure | None]:
    """Return the figures of one column; None: empty, text, marked as an estimate, or several numbers.

    `dimension` is count (exact), ratio (percent or factor), or a key of UNITS. `scale` is the unit of the heading.
    """
    texts = [plain(cell) for cell in cells]
    last = _last_place(texts)
    figures = [_figure(text, dimension, scale, last) for text in texts]
    suffixed = [bool(SUFFIXED.match(text)) for text in texts]
    if 2 * sum(suffixed) > len(texts):  # 1.31 among 1.30M and 9.21M has lost its suffix
        figures = [figure if is_suffixed else None for figure, is_suffixed in zip(figures, suffixed, strict=True)]
    values = [figure.value for figure in figures if figure]
    if dimension == "share" and values and max(values) > 1.5 and not any("%" in text for text in texts):
        return [figure and _times(figure, 0.01) for figure in figures]  # a column of percent without its sign
    return figures


def _figure(text: str, dimension: str, scale: float, last_of_whole: float) -> Figure | None:
    if MARKED.search(text):
        return None
    text = re.sub(r"\([^()]*\)", "", text).strip()
    if dimension == "time" and len(text) < LONGEST_CLOCK and (clock := CLOCK.fullmatch(text)):
        return _clock(clock)
    if dimension == "count" and (several := re.match(r"(\d{1,6})\s*x\s*[A-Za-z]", text)):  # 8x H100
        text = several[1]
    match = NUMBER.match(text)
    if not match or match[1] == "-":
        return None
    digits = match[2].replace("_", "").replace("'", "")
    digits = digits.replace(",", ".") if re.fullmatch(r"\d+,\d{1,2}", digits) else digits.replace(",", "")
    rest = text[match.end() :].strip().lower()
    spread, rest = _spread(rest)
    factor = _factor(rest, dimension, scale)
    if factor is None or len(digits) > 30:
        return None
    power = int(match[3][1:]) if match[3] else 0
    if abs(power) > 30:
        return None
    exponent = 10.0**power
    value = float(digits) * exponent * factor
    decimals = len(digits.partition(".")[2])
    whole = last_of_whole if factor == scale else max(last_of_whole, 1.0)  # 12M among 3.8M
    last = 10.0**-decimals if "." in digits else whole
    is_exact = dimension == "count" and "." not in digits and factor == scale and exponent == 1
    unit = (0.0 if is_exact else last * exponent * factor) + spread * factor
    if not 0 < value < 1e30:
        return None
    return Figure(value, max(value - unit, 0.01 * value), value + unit, text)


def _clock(match: re.Match[str]) -> Figure | None:
    """Return seconds, as exact as the smallest unit that is given."""
    parts = [match[1], match[2] or match[5], match[3] or match[6], match[4] or match[7]]
    seconds = (86400.0, 3600.0, 60.0, 1.0)
    value = sum(float(part) * unit for part, unit in zip(parts, seconds, strict=True) if part)
    last = next(at for at in (3, 2, 1, 0) if parts[at])
    unit = seconds[last] * 10.0 ** -len(str(parts[last]).partition(".")[2])
    return Figure(value, max(value - unit, 0.01 * value), value + unit, match[0]) if value else None


def _spread(rest: str) -> tuple[float, str]:
    """Return what stands behind +/-, and the rest without it."""
    match = re.match(r"(?:±|\+/-|\+-)\s*(\d+(?:\.\d+)?)\s*", rest)
    return (float(match[1]), rest[match.end() :]) if match else (0.0, rest)


def _factor(rest: str, dimension: str, scale: float) -> float | None:
    """Return what a figure is multiplied by for what stands behind it; None: it is no single figure."""
    if re.search(r"\d", rest):
        return None
    word = re.match(r"%|x(?![a-z])|[a-zµ]+|", rest)
    unit = word[0] if word else ""
    if unit == "%":
        return 0.01
    if unit in ("x", ""):
        return None if re.match(r"[-:+,~]", rest) else scale
    if unit in UNITS.get(dimension, {}):
        return UNITS[dimension][unit]
    if unit in THOUSANDS and dimension not in ("time", "memory"):
        return THOUSANDS[unit] * (1.0 if dimension == "count" else scale if scale not in THOUSANDS.values() else 1.0)
    return scale


def _last_place(texts: Sequence[str]) -> float:
    """Return the place to which the whole numbers of a column are rounded: the zeros at the end of all of them.

    Between numbers with decimals a whole one stands for itself, about: 2 among 1.55 and 1.80.
    """
    if decimals := sum(re.match(r"\d+\.\d", text) is not None for text in texts):
        return 0.1 if 2 * decimals >= len(texts) else 0.5
    whole = [text.replace(",", "") for text in texts]
    whole = [digits[0] for text in whole if (digits := re.match(r"\d+(?![\d.])", text)) and int(digits[0][:30])]
    zeros = min((min(len(text) - len(text.rstrip("0")), len(text) - 1) for text in whole), default=0)
    return 10.0**zeros


def _times(figure: Figure, factor: float) -> Figure:
    return Figure(figure.value * factor, figure.low * factor, figure.high * factor, figure.text)
