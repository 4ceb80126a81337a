"""A library's error, or what somebody typed, in the middle of our sentence."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Kind and first line; the kind alone where the library says nothing."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def one_line(text: str, most: int = 1000) -> str:
    """`text` on one line: what would break it or move a cursor is escaped, and the middle of a long one goes."""
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return shown if len(shown) <= most else f"{shown[: most // 2]} ... {shown[-most // 2 :]}"
