"""Read a file as text, whatever its encoding, and a large log in parts."""

from __future__ import annotations

import os
import re
from pathlib import Path

from testbed.errors import InputError
from testbed.io import open_regular

READ_WHOLE = 24_000_000  # bytes; of more the two ends are read, and parts between: medians and ends need no more
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
AT_AN_END, BETWEEN, PARTS = 8_000_000, 500_000, 8  # bytes of each
_BEGINNINGS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip"}
# of a terminal: colours, moves of the cursor, titles; and colours of which a copy has lost the first byte
_CONTROL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\^_])"
    r"|(?:\^\[|\u241b)?\[(?:0|1|[349]\d)(?:;\d{1,3})*m"
)
LOOKED_AT = 1_000_000  # characters at either end of a log, where marks of a terminal show


def text_of(path: Path) -> str:
    """Return the text of a file, with what is not UTF-8 replaced, and UTF-16 as PowerShell writes it.

    Raises:
        InputError: one sentence that names the file, which cannot be read.
    """
    try:
        content = _content_of(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    for beginning, program in _PACKED.items():
        if content.startswith(beginning):
            raise InputError(f"{path} cannot be read: {program} packed it; unpack it first")
    encoding = next((name for beginning, name in _BEGINNINGS.items() if content.startswith(beginning)), "utf-8")
    text = content.decode(encoding, "replace")
    del content  # of a large log two copies are much
    text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    if re.search(r"\d{400}", text):  # beyond what a float holds, and soon beyond what Python reads
        raise InputError(f"{path} cannot be read: it holds a number with hundreds of digits")
    return text


def log_lines(text: str) -> str:
    """Return a log without the marks of a terminal, damaged lines, and the number in whose digits the file may end."""
    if any(_CONTROL.search(part) for part in (text[:LOOKED_AT], text[-LOOKED_AT:])) or "\x1b" in text:
        text = _CONTROL.sub("", text)
    text = re.sub(r"(?m)^.*\0.*\n?", "", text) if "\0" in text else text
    return text if text.endswith("\n") else re.sub(r"[\d.,eE+-]+\Z", "", text)


def is_read_in_parts(path: Path) -> bool:
    """Return whether a file is so large that parts of it alone are read."""
    return path.is_file() and path.stat().st_size > READ_WHOLE


def _content_of(path: Path) -> bytes:
    """Return the bytes of a file, or whole lines of its two ends and of parts between. OSError as `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= READ_WHOLE:
            return file.read()
        first = file.read(AT_AN_END)
        if first.startswith(UTF_16):  # whose lines do not end at a byte
            raise InputError(f"{path} cannot be read: it holds {size:,} bytes in UTF-16; save it as UTF-8")
        found = [first.rpartition(b"\n")[0]]
        inner = size - 2 * AT_AN_END
        for number in range(PARTS):
            file.seek(AT_AN_END + number * inner // PARTS)
            found.append(file.read(BETWEEN).partition(b"\n")[2].rpartition(b"\n")[0])
        file.seek(size - AT_AN_END)
        found.append(file.read().partition(b"\n")[2])
    return b"\n".join(found)
