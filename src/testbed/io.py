"""Write files whole, read regular files and JSON, check typed paths. No torch."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import os
import re
import reprlib
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from testbed.errors import Failure, InputError

SOURCE = Path(__file__).resolve().parents[1]  # the folder that holds the package


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it takes the place of `path` in one move, so that a crash
    leaves the old file or the new one.

    Whatever fails, an earlier `path` stays as it was and no temporary file stays behind; an OSError names `path`, not
    the temporary file, which nobody knows.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # /dev/null would become a file
        raise OSError(errno.EINVAL, "it is a device or a FIFO, and a file is written in one move", str(path))
    # by thread, as a process that is ended from a second thread writes its last file while the first may be writing it
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # else a power cut can leave the new name on an empty file
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(NotADirectoryError):  # a file has taken the folder's place
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in one move."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, name: str) -> None:
    """Write a JSON file in one move. Failure, one sentence that begins with `name`, where it cannot be written."""
    try:
        write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    except (OSError, ValueError) as error:  # ValueError: "." is not a file's name
        raise Failure(f"{name} cannot be written: {getattr(error, 'strerror', None) or error}") from None


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # JSON can spell one half alone, which no text can be written with


def read_json(path: Path, name: str | None = None) -> Any:
    """Return whatever a JSON file holds. InputError, one sentence that begins with `name`, when it cannot be read as
    JSON.

    Args:
        name: what the file is called in the sentence (default: its path).
    """
    name = str(path) if name is None else name
    return parse_json(read_whole(path, name), name)


def read_whole(path: Path, name: str) -> bytes:
    """Return the bytes of a regular file. InputError, one sentence that begins with `name`, when it cannot be read."""
    try:
        return read_regular(Path(path))
    except FileNotFoundError:
        raise InputError(f"{name} {missing(Path(path))}") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder, not a file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None


class _TwoKeys(Exception):
    """An object has one key twice."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise _TwoKeys(key)
        content[key] = value
    return content


def parse_json(content: bytes, name: str, keys_once: bool = False) -> Any:
    """Return the value that the bytes of a JSON text stand for; a byte order mark may come first. Errors as in
    `read_json`.

    Args:
        keys_once: also refuse an object that has a key twice, of which Python would take the last.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{name} is not JSON: it is not UTF-8 text") from None
    try:
        value = json.loads(text, object_pairs_hook=_each_once if keys_once else None)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise InputError(f"{name} is not JSON that can be read: it holds half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{name} is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except _TwoKeys as error:
        raise InputError(f"{name} has the key {reprlib.repr(error.args[0])} twice in one object; keep one") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        raise InputError(f"{name} cannot be read: it holds a number with thousands of digits") from None
    except RecursionError:
        raise InputError(f"{name} is not JSON that can be read: it is nested too deeply") from None


@contextlib.contextmanager
def holding_together(name: object) -> Iterator[None]:
    """Raise InputError, one sentence that names the file, for whatever its content does to the code inside.

    An InputError that names the file passes as it is. Another one gets the name.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, InputError) and str(name) in str(error):
            raise
        if isinstance(error, InputError):
            fault = f"cannot be used: {error}"
        elif isinstance(error, KeyError):
            fault = f"lacks {reprlib.repr(error.args[0])}"
        else:
            fault = f"does not hold together ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise InputError(f"{name} {fault}") from None


LARGEST_TEXT = 1 << 30  # bytes of a file that is read whole: the record of a million steps has a third of that
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


class NotAFile(OSError):
    """Something else stands where a file was looked for."""


def open_regular(path: Path) -> BufferedReader:
    """Return the file open for reading, in bytes. OSError has one sentence in `strerror`, also where it is no file."""
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
    """Name what stands where a file or a folder should."""
    return _KINDS.get(stat.S_IFMT(found.st_mode), "something else")


def read_regular(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Return all bytes of a file. OSError as `open_regular`, and above `most` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise NotAFile(errno.EFBIG, f"it holds more than {most:,} bytes", str(path))
        try:
            return file.read()
        except OSError as error:  # of a damaged disk, which does not say of which file
            error.filename = str(path)
            raise


def read_unpacked(path: Path) -> bytes:
    """Return all bytes of a file, or of what is in it where its name says that gzip packed it.

    OSError as `read_regular`, since a few kilobytes can unpack to gigabytes; EOFError or zlib.error: it is damaged.
    """
    if not str(path).endswith(".gz"):
        return read_regular(path)
    with open_regular(path) as file, gzip.open(file) as unpacked:
        content = unpacked.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise NotAFile(errno.EFBIG, f"it holds more than {LARGEST_TEXT:,} bytes", str(path))
    return content


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the UTF-8 text of a file, every line ended by \\n. Errors as in `read_regular` and in bytes.decode."""
    return io.StringIO(read_regular(path).decode("utf-8", errors), newline=None).read()


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path that exists lies in a folder once every link is followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def now_utc() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: TID251 - a moment, for people


def result_head(schema_version: str | int, command_line: str) -> dict[str, Any]:
    """Return the first fields of every file of results that a program of this repository writes."""
    return {"schema_version": schema_version, "timestamp_utc": now_utc(), "command_line": command_line}


def not_a_folder(path: Path) -> str | None:
    """Return what is wrong with a path that should be a folder, to follow its name; None where it is one."""
    try:
        if path.is_dir():
            return None
        return "is a file, not a folder" if path.exists() else missing(path)
    except OSError as error:  # a name longer than any file system takes
        return f"cannot be looked at ({error.strerror})"


def not_a_file(path: Path) -> str | None:
    """Return what is wrong with a path that should lead to a file, to follow its name; None where it does."""
    try:
        if path.is_dir():
            return "is a folder, not a file"
        if not path.exists():
            return missing(path)
        return None if path.is_file() else f"is {name_of_kind(path.stat())}, not a file"
    except OSError as error:  # a name longer than any file system takes
        return f"cannot be looked at ({error.strerror})"


def missing(path: Path) -> str:
    """That a path does not exist, and the whole path of the folder that should hold it."""
    folder = path.absolute().parent
    if folder.is_dir():
        return f"does not exist (looked for in {folder})"
    kind = "is a file" if folder.exists() else "does not exist either"
    return f"does not exist (looked for in {folder}, which {kind})"


def cannot_become_a_folder(path: Path) -> str | None:
    """Return why no folder can be made at a path: a file or a broken link is in the way. None where nothing is."""
    for part in (path, *path.parents):
        if part.is_dir():
            return None
        if os.path.lexists(part):
            what = "a file" if part.exists() else "a link that leads nowhere"
            return f"is {what}, not a folder" if part == path else f"lies below {part}, which is {what}"
    return None


def holds_text(path: Path) -> bool:
    """Return whether the first bytes of a file are plain text, which numbers in binary form never are for long."""
    with path.open("rb") as file:
        start = file.read(4096)
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:  # else a letter that was cut in two
            return False
        text = start[: error.start].decode("utf-8")
    return bool(text) and all(letter.isprintable() or letter in "\r\n\t\f" for letter in text)
