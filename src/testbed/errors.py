"""Text of a file, a path, a library or a person, where we show it: on a terminal, in a page, inside our sentence."""

from __future__ import annotations

import contextlib
import logging
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


class Failure(Exception):
    """Work that could not be done, in one sentence. A program ends with exit code 1."""


class InputError(ValueError):
    """A flag, or a file that it names, cannot be used. One sentence. A program ends with exit code 2.

    Any other ValueError is a mistake in the code.

    Attributes:
        rule: the sentence without `way_out`, its end, which may not be one for who tries many settings.
    """

    def __init__(self, rule: object, way_out: str = "") -> None:
        super().__init__(f"{rule}{way_out}")
        self.rule = str(rule)


@contextlib.contextmanager
def refusals_say(origin: str) -> Iterator[None]:
    """Add in brackets where refused values come from, to each InputError of the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error} ({origin})") from None


SPACES = "Zs"  # no-break and thin spaces move no cursor


def first_line(error: BaseException) -> str:
    """Return the error's kind and first line; the kind alone where the library says nothing."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def one_line(text: str, most: int = 1000) -> str:
    """`text` on one line: `printable`, and the middle of a long one goes."""
    if len(text) > most:  # a text of megabytes is cut before each of its letters is looked at
        text = text[: most // 2 + 1] + text[-most // 2 :]
    shown = printable(text)
    return shown if len(shown) <= most else f"{shown[: most // 2]} ... {shown[-most // 2 :]}"


def printable(text: str, kept: str = "") -> str:
    """`text` with all that a terminal would obey, or that turns the order of letters around, as Python escapes it, but
    for the characters in `kept`. A file may hold anything, and a folder may be called anything."""
    return "".join(
        character
        if character.isprintable() or character in kept or unicodedata.category(character) == SPACES
        else repr(character)[1:-1]
        for character in text
    )


def as_lines(lines: Iterable[str]) -> str:
    """Return lines for a terminal. A line feed in the name of something, which would make two of one, is escaped."""
    return "\n".join(map(printable, lines))


def say(text: object = "", **how: Any) -> None:
    """`print`, for text that quotes files or paths: its lines stay, whatever else would move a cursor is escaped."""
    print(printable(str(text), kept="\n\t"), **how)


def say_if_read(text: object, stream: TextIO | None = None) -> None:
    """`say` at once, to stderr or `stream`. A closed pipe or terminal is ignored."""
    with contextlib.suppress(OSError):
        say(text, file=stream or sys.stderr, flush=True)


@contextlib.contextmanager
def without_library_warnings() -> Iterator[None]:
    """Hide warnings and log lines inside the block: libraries warn while they are imported of parts that are not used
    here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def counted(number: int, noun: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def value_text(value: object) -> str:
    """Return a setting's value as a person writes it: 0.0003 though a tenth of 0.003 is 0.00030000000000000003, and 1
    for 1.0, which is the same setting whichever way a file writes it."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)
