"""Files appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it takes the place of `path` in one move.

    Whatever fails, an earlier `path` stays as it was and no temporary file stays behind; an OSError names `path`, not
    the temporary file, which nobody knows.
    """
    # by thread, as a process that is ended from a second thread writes its last file while the first may be writing it
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    try:
        yield temporary
        put_in_place(temporary, path)
    except BaseException as error:
        with contextlib.suppress(NotADirectoryError):  # a file has taken the folder's place
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a finished temporary file its name; a crash leaves the old file or the new one, never half of one."""
    with temporary.open("rb") as written:
        os.fsync(written.fileno())  # else a power cut can leave the new name on an empty file
    temporary.replace(final)


def write_text(path: Path, text: str) -> None:
    """Write a text file in one move."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
