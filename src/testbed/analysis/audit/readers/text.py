"""Read a text file of another program."""

from __future__ import annotations

import re
from pathlib import Path

from testbed.errors import InputError
from testbed.io import read_text


def text_of(path: Path) -> str:
    """Return the text of a file, with what is no UTF-8 replaced.

    Raises:
        InputError: one sentence that names the file, which cannot be read.
    """
    try:
        text = read_text(path, errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if re.search(r"\d{400}", text):  # beyond what a float holds, and soon beyond what Python reads
        raise InputError(f"{path} cannot be read: it holds a number with hundreds of digits")
    return text
