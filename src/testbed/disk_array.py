"""Numbers in a file, read where they lie: what a token file's ids are to those who read windows of it. No torch.

Not mapped into memory: a mapped file that somebody truncates kills the process that reads it with SIGBUS, without a
sentence, and Python cannot catch that. A file that is replaced by another of its name, as preprocess_small.py does it,
goes on being read as it was when it was opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from testbed.regular_file import open_regular

CHUNK_ITEMS = 1 << 23  # 16 MiB of uint16 at a time: large enough for full disk speed, small enough for any machine


class FileChanged(ValueError):
    """What is read is no longer the file that was checked."""


class DiskArray:
    """A flat array in a file, read-only. A slice of it is read into memory; `array[:]` is all of it.

    Raises:
        FileChanged: one sentence, from anything that reads: the file is shorter than it was, can no longer be read, or
            (`check_unchanged`) has another size or was written to since it was opened.
    """

    def __init__(self, path: Path, dtype: np.dtype | type, length: int):
        """Args: length: items that the file must hold, as whoever looked at its size found."""
        self.path, self.dtype, self._length = path, np.dtype(dtype), length
        self._file = open_regular(path)
        self._stamp = self._look()
        if self._stamp[0] != length * self.dtype.itemsize:
            raise FileChanged(f"{path} changed while it was opened; wait until it is whole and start again")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: int | slice) -> np.ndarray | np.generic:
        if not isinstance(where, slice):
            return self._read(range(self._length)[where], 1)[0]
        start, stop, step = where.indices(self._length)
        assert step == 1, "neighbours are read"
        return self._read(start, max(0, stop - start))

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(place of the first, items), from the first to the last, as much at a time as any machine's memory holds."""
        for start in range(0, self._length, CHUNK_ITEMS):
            yield start, self[start : start + CHUNK_ITEMS]

    def check_unchanged(self) -> None:
        """Size and time of the last change are those at opening; about a microsecond. After reading: what was written
        before is seen then, and what is written later was not read."""
        if self._look() != self._stamp:
            raise FileChanged(self._words("its size or the time of its last change is another"))

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _read(self, start: int, length: int) -> np.ndarray:
        wanted, offset = length * self.dtype.itemsize, start * self.dtype.itemsize
        try:
            data = os.pread(self._file.fileno(), wanted, offset)
            while len(data) < wanted:  # no call gives more than 2 GiB
                more = os.pread(self._file.fileno(), wanted - len(data), offset + len(data))
                if not more:
                    raise FileChanged(self._words(f"it ends inside the bytes {offset} to {offset + wanted}"))
                data += more
        except OSError as error:  # a disk that fails; a network file system whose file is gone
            raise FileChanged(self._words(f"it cannot be read ({error.strerror})")) from None
        return np.frombuffer(data, self.dtype)

    def _words(self, fault: str) -> str:
        return (
            f"{self.path} is no longer the file that was opened: {fault}; put it back as it was and start again (a "
            "training run goes on with --resume auto)"
        )
