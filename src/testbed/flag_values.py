"""How the text of a flag becomes its value, and which texts are refused. No torch."""

from __future__ import annotations

import argparse

AUTO = "auto"
LARGEST_COUNT = 2**63 - 1  # what PyTorch and the metrics file hold


def _whole(text: str) -> int:
    number = int(text)
    if abs(number) > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is larger than any count, which ends at {LARGEST_COUNT}")
    return number


def positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return number


def positive_or_auto(text: str) -> int | str:
    return text if text == AUTO else positive(text)


def on_off_or_auto(text: str) -> bool | None:
    """True, False, or None where the program is to decide. Files of earlier versions say true and false."""
    known = {"on": True, "true": True, "off": False, "false": False, AUTO: None}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of auto, on, off")
    return known[text.lower()]


def not_negative(text: str) -> int:
    number = _whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def not_negative_number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 upwards")
    return number


def fraction(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 up to (but not including) 1")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
