"""Read a text file of another program."""

from __future__ import annotations

import io
import re
from pathlib import Path

from testbed.errors import InputError
from testbed.io import read_regular

_BEGINNINGS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip"}
# of a terminal: colours, moves of the cursor, titles; and colours of which a copy has lost the first byte
_CONTROL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])"
    r"|(?:\^\[|\u241b)?\[(?:0|1|[349]\d)(?:;\d{1,3})*m"
)


def text_of(path: Path) -> str:
    """Return the text of a file, with what is no UTF-8 replaced, and UTF-16 as PowerShell writes it.

    Raises:
        InputError: one sentence that names the file, which cannot be read.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    for beginning, program in _PACKED.items():
        if content.startswith(beginning):
            raise InputError(f"{path} cannot be read: {program} packed it; unpack it first")
    text = io.StringIO(content.decode(_encoding(content), "replace"), newline=None).read()
    if re.search(r"\d{400}", text):  # beyond what a float holds, and soon beyond what Python reads
        raise InputError(f"{path} cannot be read: it holds a number with hundreds of digits")
    return text


def _encoding(content: bytes) -> str:
    """Return the encoding by a file's first bytes, or by the zeros between the letters of UTF-16."""
    known = next((name for beginning, name in _BEGINNINGS.items() if content.startswith(beginning)), None)
    if known:
        return known
    first, second = (content[start:1024:2].count(0) for start in (0, 1))
    if max(first, second) < 0.4 * len(content[:1024]):
        return "utf-8"
    return "utf-16-be" if first > second else "utf-16-le"


def log_lines(text: str) -> str:
    """Return a log without the marks of a terminal, damaged lines, and the number in whose digits the file may end."""
    text = _CONTROL.sub("", text.replace("\r", "\n"))
    text = re.sub(r"(?m)^.*\0.*\n?", "", text) if "\0" in text else text
    return text if text.endswith("\n") else re.sub(r"[\d.,eE+-]+\Z", "", text)
