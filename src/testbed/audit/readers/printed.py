"""Take figures, facts and lines out of the text of a log. Every reader of a text log uses these."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from statistics import median

from testbed.audit.log_lines import Figure, LogLine

NUMBER = r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?"
LONGEST_COUNT = 15  # digits: more is damage, not a count of anything in a training run


def figure(text: str, is_truncated: bool = False) -> Figure | None:
    """Return the number that a text begins with, and half of its last digit; None where there is no finite one.

    Args:
        is_truncated: the program cuts digits off instead of rounding: then it is a whole last digit.
    """
    found = re.match(rf"\s*({NUMBER})", text)
    if not found:
        return None
    digits = found[1].replace(",", "")
    mantissa, _, exponent = digits.lower().partition("e")
    value = float(digits)
    if not math.isfinite(value) or len(exponent) > 4:
        return None
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return Figure(value, unit if is_truncated else unit / 2)


def count(text: str) -> int | None:
    """Return a count of things, commas allowed; None for none and for what is no count."""
    digits = text.strip().replace(",", "")
    return (int(digits) or None) if digits.isdecimal() and len(digits) <= LONGEST_COUNT else None


def exact(text: str) -> Figure | None:
    """Return a count as a figure without rounding."""
    found = count(text)
    return None if found is None else Figure(float(found))


def only(pattern: str, text: str) -> str | None:
    """Return the first group of a pattern, where all its places in the text say the same; else None."""
    found = {match[1].strip() for match in re.finditer(pattern, text)}
    return found.pop() if len(found) == 1 else None


def only_count(pattern: str, text: str) -> int | None:
    found = only(pattern, text)
    return None if found is None else count(found)


def only_figure(pattern: str, text: str) -> Figure | None:
    found = only(pattern, text)
    return None if found is None else figure(found)


def figures(pairs: Iterable[tuple[str, Figure | None]]) -> dict[str, Figure]:
    """Return the pairs that hold a figure."""
    return {name: value for name, value in pairs if value is not None}


def in_order(lines: Iterable[LogLine]) -> tuple[LogLine, ...]:
    """Return one line per step, in order.

    Of several lines of one step, as each rank may print one, the first counts. Where the steps go back, a run was
    started again from a checkpoint: its lines take the place of the earlier ones. One of another length is another run,
    and of two runs in a file the last is read.
    """
    kept: list[LogLine] = []
    for line in lines:
        if kept and kept[-1].step > line.step:
            is_other = None not in (line.last_step, kept[-1].last_step) and line.last_step != kept[-1].last_step
            while kept and (is_other or kept[-1].step >= line.step):
                kept.pop()
        if not kept or kept[-1].step < line.step:
            kept.append(line)
    return tuple(kept)


def middle(lines: Sequence[LogLine], name: str) -> float | None:
    """Return the median of a figure over the lines, the first left out where there are more: it has the start-up."""
    values = [value for line in lines if (value := line.value(name)) is not None]
    return median(values[1:] or values) if values else None


def last(lines: Sequence[LogLine], name: str) -> float | None:
    """Return a figure of the last line that has it."""
    return next((value for line in reversed(lines) if (value := line.value(name)) is not None), None)


def last_number(pattern: str, text: str) -> float | None:
    """Return the number in the first group of the pattern's last place; None where that is no finite number."""
    found = re.findall(pattern, text)
    number = figure(found[-1]) if found else None
    return number.value if number else None


def pairs_of(line: str, separator: str = "|") -> Iterator[tuple[str, str]]:
    """Yield the (name, value) of `name: value | name: value`."""
    for part in line.split(separator):
        name, colon, value = part.partition(":")
        if colon:
            yield name.strip(), value.strip()


def clock_s(text: str) -> float | None:
    """Return a date and time such as `2024-04-06 02:59:36` or `2026-05-19 20:23:51,449` in seconds."""
    try:
        return datetime.fromisoformat(text.strip().replace(",", ".")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def is_nan(text: str) -> bool:
    return text.strip().lower().lstrip("+-").startswith("nan")


def longest(text: str, start: str, line: re.Pattern[str]) -> tuple[str, int]:
    """Return the part of a text with the most lines of a run, and how many parts have some.

    Args:
        start: what stands at the beginning of each part.
        line: one line of a run.
    """
    parts = [(len(line.findall(part)), part) for part in re.split(start, text)]
    return max(parts, key=lambda each: each[0])[1], sum(bool(number) for number, _ in parts)


def share(figure_in_percent: float | None) -> float | None:
    """Return a share from a percentage; None below zero, which programs print where they know none."""
    return figure_in_percent / 100 if figure_in_percent is not None and figure_in_percent >= 0 else None


def seconds(milliseconds: float | None) -> float | None:
    """Return a time in seconds; None for one that is not known."""
    return None if milliseconds is None else milliseconds / 1e3


def not_found(looked_for: dict[str, object]) -> tuple[str, ...]:
    """Return what was looked for and not found."""
    return tuple(words for words, value in looked_for.items() if not value)
