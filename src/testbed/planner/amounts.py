"""Read times and lists of devices as people write them. No torch."""

from __future__ import annotations

import re

from testbed.errors import InputError
from testbed.planner.machines import MOST_DEVICES

DAYS = {"d": 1.0, "h": 1 / 24, "m": 1 / 1440}


def deadline_of(text: str) -> float:
    """Return the days in `3d`, `36h` or `90m`. InputError names --deadline."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([dhm])", text.strip().lower())
    days = float(match[1]) * DAYS[match[2]] if match else 0.0
    if not days:
        raise InputError(f"--deadline {text}: it is not a time above 0; write 3d, 36h or 90m")
    return days


def numbers_of_sweep(text: str) -> list[int]:
    """Return the numbers in `gpus=8,16,24`, or `gpus=8,16,...,256`, whose dots go on by the factor of the two before.

    Raises:
        InputError: names --sweep.
    """
    words = re.sub(r"\s", "", text)
    match = re.fullmatch(r"gpus=([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*?)(,\.\.\.,([1-9][0-9]{0,8}))?", words)
    numbers = [int(word) for word in match[1].split(",")] if match else []
    is_list = match is not None
    if match and match[3]:
        factor, rest = divmod(numbers[-1], numbers[-2]) if len(numbers) > 1 else (1, 0)
        while factor > 1 and numbers[-1] < int(match[3]):
            numbers.append(numbers[-1] * factor)
        is_list = factor > 1 and not rest and numbers[-1] == int(match[3])
    if not is_list or numbers != sorted(set(numbers)):
        raise InputError(f"--sweep {text}: it is not a list of devices; write gpus=8,16,24 or gpus=8,16,...,4096")
    if numbers[-1] > MOST_DEVICES:
        raise InputError(f"--sweep {text}: a plan has at most {MOST_DEVICES:,} devices")
    return numbers
