"""Opening a file that anybody may have put there. A FIFO would be waited for and a device never ends: both are refused.

A link is followed: a token file on another disk is a common thing. Whoever must not leave a folder asks `is_within`.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

LARGEST_TEXT = 1 << 30  # bytes of a file that is read whole: the record of a million steps has a third of that
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


class NotAFile(OSError):
    """Something else stands where a file was looked for."""


def open_regular(path: Path) -> BinaryIO:
    """The file open for reading, in bytes.

    Raises:
        OSError: it is not there or cannot be read; IsADirectoryError, NotAFile: it is something else than a file. One
            sentence in `strerror`, which open's own errors have too.
    """
    _check_kind(path, Path(path).stat())  # before it is opened: that alone makes some devices do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # a FIFO then opens at once
    try:
        _check_kind(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_kind(path: Path, found: os.stat_result) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise NotAFile(errno.EINVAL, f"it is {name_of_kind(found)}, not a file", str(path))


def name_of_kind(found: os.stat_result) -> str:
    """What stands where a file or a folder should, in words."""
    return _KINDS.get(stat.S_IFMT(found.st_mode), "something else")


def read_regular(path: Path) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: as `open_regular`; and NotAFile: it has more than LARGEST_TEXT, which no such file has.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_TEXT:
            raise NotAFile(errno.EFBIG, f"it holds more than {LARGEST_TEXT:,} bytes", str(path))
        return file.read()


def read_unpacked(path: Path) -> bytes:
    """All bytes of a file; of what is in it where its name says that gzip packed it.

    Raises:
        OSError: as `read_regular`; a few kilobytes can be made to unpack to more than LARGEST_TEXT.
        EOFError, zlib.error: the file is damaged.
    """
    if not str(path).endswith(".gz"):
        return read_regular(path)
    with open_regular(path) as file, gzip.open(file) as unpacked:
        content = unpacked.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise NotAFile(errno.EFBIG, f"it holds more than {LARGEST_TEXT:,} bytes", str(path))
    return content


def read_text(path: Path, errors: str = "strict") -> str:
    """The UTF-8 text of a file, every line ended by \\n. Errors as in `read_regular` and in bytes.decode."""
    return io.StringIO(read_regular(path).decode("utf-8", errors), newline=None).read()


def is_within(path: Path, folder: Path) -> bool:
    """Whether a path that exists lies in a folder once every link is followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
