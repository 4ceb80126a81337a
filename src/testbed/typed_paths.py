"""A path that somebody typed: whether it is there and of the kind that is needed, else why not, in words. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from testbed.regular_file import name_of_kind


def not_a_folder(path: Path) -> str | None:
    """What is wrong with a path that should be a folder, to follow its name; None where it is one."""
    if path.is_dir():
        return None
    return "is a file, not a folder" if path.exists() else missing(path)


def not_a_file(path: Path) -> str | None:
    """What is wrong with a path that should lead to a file, to follow its name; None where it does."""
    if path.is_dir():
        return "is a folder, not a file"
    if not path.exists():
        return missing(path)
    return None if path.is_file() else f"is {name_of_kind(path.stat())}, not a file"


def missing(path: Path) -> str:
    """That a path does not exist, and the whole path of the folder that should hold it."""
    folder = path.absolute().parent
    if folder.is_dir():
        return f"does not exist (looked for in {folder})"
    kind = "is a file" if folder.exists() else "does not exist either"
    return f"does not exist (looked for in {folder}, which {kind})"


def cannot_become_a_folder(path: Path) -> str | None:
    """Why no folder can be made at a path: a file or a broken link is in the way. None where nothing is."""
    for part in (path, *path.parents):
        if part.is_dir():
            return None
        if os.path.lexists(part):
            what = "a file" if part.exists() else "a link that leads nowhere"
            return f"is {what}, not a folder" if part == path else f"lies below {part}, which is {what}"
    return None


def holds_text(path: Path, looked_at: int = 4096) -> bool:
    """Whether the first bytes of a file are plain text, which numbers in binary form never are for long."""
    with path.open("rb") as file:
        start = file.read(looked_at)
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:  # else a letter that was cut in two
            return False
        text = start[: error.start].decode("utf-8")
    return bool(text) and all(letter.isprintable() or letter in "\r\n\t\f" for letter in text)
