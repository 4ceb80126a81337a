"""A library's error in the middle of our sentence."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Kind and first line; the kind alone where the library says nothing."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
