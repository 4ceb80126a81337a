"""Read tokens, times and lists of devices as people write them. No torch."""

from __future__ import annotations

import itertools
import re

from testbed.errors import InputError
from testbed.planner.machines import MOST_DEVICES

SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
DAYS = {"d": 1.0, "h": 1 / 24, "m": 1 / 1440}
MOST_IN_SWEEP = 64


def tokens_of(text: str) -> float:
    """Return the number in `10B`, `300e9` or `2,000,000`. InputError names --tokens."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]{1,3})?)([kmbt]?)", text.strip().lower().replace(",", ""))
    number = float(match[1]) * SUFFIXES[match[2]] if match else 0.0
    if not 0 < number < float("inf"):
        raise InputError(f"--tokens {text}: it is not a number of tokens above 0; write 10B, 300e9 or 2000000")
    return number


def deadline_of(text: str) -> float:
    """Return the days in `3d`, `36h` or `90m`. InputError names --deadline."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([dhm])", text.strip().lower())
    days = float(match[1]) * DAYS[match[2]] if match else 0.0
    if not days:
        raise InputError(f"--deadline {text}: it is not a time above 0; write 3d, 36h or 90m")
    return days


def numbers_of_sweep(text: str) -> list[int]:
    """Return the numbers in `gpus=8,16,...,256`: the dots go on by the factor, or the step, of the two before them.

    Raises:
        InputError: names --sweep.
    """
    words = re.sub(r"\s", "", text)
    match = re.fullmatch(r"gpus=([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*?)(,\.\.\.,([1-9][0-9]{0,8}))?", words)
    numbers = [int(word) for word in match[1].split(",")] if match else []
    if match and match[3] and len(numbers) > 1:
        numbers += _going_on(numbers[-2], numbers[-1], int(match[3]))
    if not match or (match[3] and len(numbers) < 3) or numbers != sorted(set(numbers)):
        raise InputError(f"--sweep {text}: it is not a list of devices; write gpus=8,16,32 or gpus=8,16,...,4096")
    if numbers[-1] > MOST_DEVICES:
        raise InputError(f"--sweep {text}: a plan has at most {MOST_DEVICES:,} devices")
    if len(numbers) > MOST_IN_SWEEP:
        raise InputError(f"--sweep {text}: more than {MOST_IN_SWEEP} numbers of devices; take longer steps")
    return numbers


def _going_on(before: int, last: int, end: int) -> list[int]:
    """Return what comes after `last`, up to `end`: by the same factor where that is whole and meets the end, else by
    the same step."""
    factor = last // before if last % before == 0 else 1
    numbers = list(itertools.takewhile(lambda number: number < end, (last * factor**power for power in range(1, 64))))
    if factor > 1 and [last, *numbers][-1] * factor == end:
        return [*numbers, end]
    step = max(1, last - before)
    return [*range(last + step, end, step)[:MOST_IN_SWEEP], end]
