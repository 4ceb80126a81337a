"""Read slices of the numbers in a file. No torch.

Not mapped into memory: a mapped file that is truncated kills the process that reads it with SIGBUS, without a
sentence, and Python cannot catch that. A file that is replaced by another of its name, as preprocess_small.py does it,
is read as it was when it was opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import overload

import numpy as np

from testbed.errors import InputError
from testbed.io import open_regular

CHUNK_ITEMS = 1 << 23  # 16 MiB of uint16 at a time: large enough for full disk speed, small enough for any machine


class FileChanged(InputError):
    """The file is no longer the one that was checked."""


class DiskArray:
    """A flat array in a file, read-only. A slice of it is read into memory; `array[:]` is all of it.

    Raises:
        FileChanged: one sentence, from anything that reads: the file is shorter than it was, can no longer be read, or
            (`look`, `is_touched`) has another size.
    """

    def __init__(self, path: Path, dtype: np.dtype | type, length: int, header_bytes: int = 0):
        """Args: length: items that the file must hold behind its header, as its size says."""
        self.path, self.dtype, self._length, self._header_bytes = path, np.dtype(dtype), length, header_bytes
        self._file = open_regular(path)
        try:
            self._accepted = self.look()
        except FileChanged:
            raise FileChanged(f"{path} changed while it was opened; wait until it is whole and start again") from None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, where: slice) -> np.ndarray: ...
    @overload
    def __getitem__(self, where: int) -> np.generic: ...
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

    def place_of(self, position: int) -> tuple[Path, int]:
        """Return the file that holds an item, and the item's place in it."""
        return self.path, position

    @property
    def is_touched(self) -> bool:
        """Return whether the file's times changed since it was opened or last accepted, in about a microsecond; the
        data may be the same all the same. FileChanged: it has another size."""
        return self.look() != self._accepted

    def look(self) -> tuple:
        """Times of the last change in ns: of the data, which anybody can set, and the kernel's own, which also a new
        name or new permissions change. FileChanged: the size is another."""
        found = os.fstat(self._file.fileno())
        if found.st_size != self._header_bytes + self._length * self.dtype.itemsize:
            raise self.changed("its size is another")
        return found.st_mtime_ns, found.st_ctime_ns

    def accept(self, times: tuple) -> None:
        """The data with these times, as `look` gave them, are those that were opened."""
        self._accepted = times

    def _read(self, start: int, length: int) -> np.ndarray:
        wanted, offset = length * self.dtype.itemsize, self._header_bytes + start * self.dtype.itemsize
        try:
            data = os.pread(self._file.fileno(), wanted, offset)
            while len(data) < wanted:  # no call gives more than 2 GiB
                more = os.pread(self._file.fileno(), wanted - len(data), offset + len(data))
                if not more:
                    raise self.changed(f"it ends inside the bytes {offset} to {offset + wanted}")
                data += more
        except OSError as error:  # a disk that fails; a network file system whose file is gone
            raise self.changed(f"it cannot be read ({error.strerror})") from None
        return np.frombuffer(data, self.dtype)

    def changed(self, fault: str) -> FileChanged:
        """Return what to raise, in one sentence."""
        return FileChanged(
            f"{self.path} is no longer the file that was opened: {fault}; put it back as it was and start again (a "
            "training run continues with --resume auto)"
        )
