"""Types of flags: text to value, or argparse.ArgumentTypeError. No torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import TypeVar

AUTO = "auto"
LARGEST_REAL = 3.4e38  # of float32, in which the optimizer computes; PyTorch ends with a RuntimeError above
LARGEST_COUNT = 2**63 - 1  # what PyTorch and the metrics file hold
MOST_THREADS = 1024  # of one process. Ten thousands end it in a segmentation fault
LONGEST_WAIT_S = 7 * 86_400.0  # timers of Python and PyTorch overflow at 1e10 s
Number = TypeVar("Number", int, float)


def _whole(text: str, least: int, rule: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if abs(number) > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is larger than any count, which ends at {LARGEST_COUNT}")
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {rule}")
    return number


def _real(text: str, is_allowed: Callable[[float], bool], rule: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan  # in no range
    if not is_allowed(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}")
    return number


def positive(text: str) -> int:
    return _whole(text, 1, "positive whole number")


def positive_or_auto(text: str) -> int | str:
    return text if text == AUTO else positive(text)


def token_count(text: str) -> int:
    """Return a number of tokens: 10B, 500M, 2.5e9, 1_000_000 or 1,000,000."""
    text = text.replace(",", "")
    factor = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}.get(text[-1:].lower())
    try:
        number = Decimal(text[:-1] if factor else text) * (factor or 1)  # floats would round 16.1k up
    except InvalidOperation:
        number = Decimal(0)
    if not number.is_finite() or not 1 <= number <= LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens from 1 upwards, such as 500M or 10B")
    return math.ceil(number)


def on_off_or_auto(text: str) -> bool | None:
    """Return True, False, or None for auto. Files of earlier versions have true and false."""
    known = {"on": True, "true": True, "off": False, "false": False, AUTO: None}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of auto, on, off")
    return known[text.lower()]


def not_negative(text: str) -> int:
    return _whole(text, 0, "whole number from 0 upwards")


def not_negative_number(text: str) -> float:
    rule = f"a number from 0 to {LARGEST_REAL:g}, the largest in float32"
    return _real(text, lambda number: 0 <= number <= LARGEST_REAL, rule)


def positive_number(text: str) -> float:
    return _real(text, lambda number: 0 < number < math.inf, "a number above 0")


def _at_most(kind: Callable[[str], Number], most: Number, why: str) -> Callable[[str], Number]:
    """Return a type that refuses a number above `most`, for the reason `why`."""

    def number_of(text: str) -> Number:
        number = kind(text)
        if number > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most:.0f}, {why}; give less")
        return number

    number_of.__name__ = kind.__name__
    return number_of


thread_count = _at_most(positive, MOST_THREADS, "the most threads of one process, and more than any machine's cores")
layer_count = _at_most(positive, 1000, "and each block is built before the first step")  # the deepest GPT has 96
steps_ahead = _at_most(not_negative, 1024, "and every step read ahead is kept in memory")
sample_length = _at_most(not_negative, 1_000_000, "and a text ends at the model's last position anyway")
waiting_time = _at_most(positive_number, LONGEST_WAIT_S, "the seconds of a week")
bucket_size = _at_most(positive_number, 1_048_576.0, "a bucket of 1 TiB")  # PyTorch counts its bytes in 64 bits


def fraction(text: str) -> float:
    return _real(text, lambda number: 0 <= number < 1, "from 0 up to (but not including) 1")


def share(text: str) -> float:
    return _real(text, lambda number: 0 < number <= 1, "above 0 and at most 1")


def duration(text: str) -> float:
    """Return the seconds in 90s, 15m or 2h. A bare number is refused, for it may be meant in minutes."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:].lower(), 0)
    number = _real(text[:-1] if unit else text, lambda number: 0 < number < math.inf, "a time such as 90s, 15m or 2h")
    if not unit:
        raise argparse.ArgumentTypeError(f"{text} has no unit; give {text}m for minutes, or {text}s or {text}h")
    if number * unit > LONGEST_WAIT_S:
        raise argparse.ArgumentTypeError(f"{text} is longer than a week (168h); give a shorter time")
    return number * unit


def percentage(text: str) -> float:
    """Return the fraction in 2%; a bare number is per cent too."""
    number = _real(text.removesuffix("%"), lambda number: 0 <= number < 100, "a percentage such as 2%")
    return number / 100
