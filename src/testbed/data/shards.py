"""Read many token files as one stream: `--train_data_path 'fineweb/edu_train_*.bin'`, as FineWeb-Edu is published.

The shards lie behind one another in the order of their names, in which numbers count by their value. Windows cross
their borders, and the seed decides the order of windows as it does in one file.

Every token is read once, to check it and to hash it. `token_shards.json` in the folder of the shards keeps what was
found, so that later starts look at sizes and times alone.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import fnmatch
import glob
import hashlib
import itertools
import os
import re
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from tqdm import tqdm

from testbed.data.disk_array import DiskArray, FileChanged
from testbed.errors import Failure, InputError, one_line
from testbed.io import read_json, write_json

MANIFEST = "token_shards.json"
FORMAT = 1
MOST_THREADS = 8  # that hash at once
SPARE_FILES = 512  # of everything else in a process


@dataclass(frozen=True)
class _Entry:
    """What is known of a shard: its size and its times, and what reading it whole found."""

    num_bytes: int
    times_ns: tuple[int, int]  # as `DiskArray.look` gives them: a copy has others, and is read once
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    max_token_id: Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class _Manifest:
    format_version: Literal[1]
    shards: dict[str, _Entry]


class ShardedArray(DiskArray):
    """The numbers of several files behind one another."""

    def __init__(self, path: Path, shards: Sequence[DiskArray], sidecars: Sequence[str | None]):
        """
        Args:
            path: the pattern that the files match.
            sidecars: the SHA-256 that the sidecar of each has; None: it has none.
        """
        self.path, self.shards, self.dtype, self.sidecars = path, tuple(shards), shards[0].dtype, tuple(sidecars)
        self._starts = [0, *itertools.accumulate(map(len, shards))]
        self._length, self._accepted = self._starts[-1], tuple(shard._accepted for shard in shards)

    def look(self) -> tuple:
        """The times of all shards."""
        return tuple(shard.look() for shard in self.shards)

    def accept(self, times: tuple) -> None:
        super().accept(times)
        for shard, seen in zip(self.shards, times, strict=True):
            shard.accept(seen)

    def changed(self, fault: str) -> FileChanged:
        touched = (shard for shard in self.shards if shard.is_touched)
        return next(touched, self.shards[0]).changed(fault)

    def place_of(self, position: int) -> tuple[Path, int]:
        number = bisect.bisect_right(self._starts, position) - 1
        return self.shards[number].path, position - self._starts[number]

    def _read(self, start: int, length: int) -> np.ndarray:
        stop, number = start + length, max(0, bisect.bisect_right(self._starts, start) - 1)
        parts = []
        while start < stop:
            first = self._starts[number]
            end = min(stop, self._starts[number + 1])
            if end > start:
                parts.append(self.shards[number][start - first : end - first])
                start = end
            number += 1
        return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.empty(0, self.dtype)


def is_pattern(path: Path) -> bool:
    """Return whether a path names several files; one that exists by this name is a file."""
    return glob.has_magic(str(path)) and not os.path.lexists(path)


def paths_of_shards(pattern: Path, flag: str) -> list[Path]:
    """Return the files that a pattern names, in order. InputError, one sentence that begins with `flag`: none does."""
    if glob.has_magic(str(pattern.parent)):
        raise InputError(f"{flag} {pattern} has a pattern in the name of a folder; the shards lie in one, name it")
    try:
        names = [path.name for path in pattern.parent.iterdir()]
    except OSError as error:
        raise InputError(f"{flag} {pattern}: {pattern.parent} cannot be read ({error.strerror})") from None
    found = [name for name in fnmatch.filter(names, pattern.name) if name.endswith(".bin") and not name.startswith(".")]
    if not found:
        raise InputError(f"{flag} {pattern} matches no .bin file; see which there are with: ls {pattern.parent}")
    return [pattern.parent / name for name in sorted(found, key=_by_numbers)]


def _by_numbers(name: str) -> tuple[list[int | str], str]:
    """Return the key by which shard 2 comes before shard 10, the same on every machine."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)], name


def is_at_hand(path: Path) -> bool:
    """Return whether a token file is there, or a file that a pattern names; False where it cannot be looked at."""
    try:
        return bool(paths_of_shards(path, "")) if is_pattern(path) else path.is_file()
    except (OSError, InputError):
        return False


def have_room_for_files(number: int) -> None:
    """Let this process have so many more files open, as far as the system's limit for it goes."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if least < number + SPARE_FILES:
        wanted = number + SPARE_FILES if most == resource.RLIM_INFINITY else min(number + SPARE_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(least, wanted), most))


def scan_shards(array: ShardedArray) -> tuple[int, str]:
    """Return the largest id of all shards, and the SHA-256 of their SHA-256s in order.

    Shards that MANIFEST knows are not read again unless their size or times changed; the others are, and are added.

    Raises:
        InputError: a shard that MANIFEST knows is missing or holds other tokens.
    """
    folder = array.path.parent
    known = _read_manifest(folder / MANIFEST)
    names = [shard.path.name for shard in array.shards]
    if gone := sorted(name for name in known if fnmatch.fnmatch(name, array.path.name) and name not in names):
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise InputError(
            f"{folder / gone[0]}{more} was among the shards when {MANIFEST} was written and is missing; put it back, "
            f"or delete {folder / MANIFEST} to train on what there is"
        )
    new = [shard for shard in array.shards if not _is_known(shard, known.get(shard.path.name))]
    for shard, entry in zip(new, _read_all(new), strict=True):
        before = known.get(shard.path.name)
        if before is not None and before.sha256 != entry.sha256:
            raise InputError(
                f"{shard.path} holds other tokens than when {MANIFEST} was written (SHA-256 {entry.sha256[:12]}…, it "
                f"says {before.sha256[:12]}…); put it back, or delete {folder / MANIFEST} to train on what there is"
            )
        known[shard.path.name] = entry
    entries = [known[name] for name in names]
    for name, entry, written in zip(names, entries, array.sidecars, strict=True):
        if written not in (None, entry.sha256):
            raise InputError(
                f"{folder / name} has sha256 {entry.sha256[:12]}… but its sidecar says {written[:12]}…: the tokens "
                "changed after they were written; make the shard again"
            )
    if new:
        content = {"format_version": FORMAT, "shards": {name: asdict(known[name]) for name in sorted(known)}}
        with contextlib.suppress(Failure):  # a folder that may only be read: every start reads the tokens then
            write_json(folder / MANIFEST, content, MANIFEST)
    digest = hashlib.sha256("\n".join(entry.sha256 for entry in entries).encode())
    return max(entry.max_token_id for entry in entries), digest.hexdigest()


def _read_manifest(path: Path) -> dict[str, _Entry]:
    """Return what is known, by the names of shards. InputError, one sentence: the file is not one of ours."""
    if not path.exists():
        return {}
    try:
        return dict(msgspec.convert(read_json(path), _Manifest, strict=True).shards)
    except msgspec.ValidationError as error:
        fault = one_line(str(error), 200)
        raise InputError(
            f"{path} is not what this program writes there ({fault}); delete it, and it is made again"
        ) from None


def _is_known(shard: DiskArray, entry: _Entry | None) -> bool:
    size = len(shard) * shard.dtype.itemsize
    return entry is not None and (entry.num_bytes, entry.times_ns) == (size, shard.look())


def _read_all(shards: Sequence[DiskArray]) -> list[_Entry]:
    """Read shards whole, several at once: hashing leaves the interpreter's lock."""
    if not shards:
        return []
    num_bytes = sum(len(shard) * shard.dtype.itemsize for shard in shards)
    workers = min(MOST_THREADS, os.cpu_count() or 1, len(shards))
    with (
        tqdm(total=num_bytes, unit="B", unit_scale=True, desc="reading shards once", disable=None, leave=False) as bar,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        return list(pool.map(lambda shard: _read_one(shard, bar), shards))


def _read_one(shard: DiskArray, bar: Any) -> _Entry:
    digest, largest = hashlib.sha256(), 0
    times_ns = shard.look()
    for _, chunk in shard.chunks():
        digest.update(chunk.data)
        largest = max(largest, int(chunk.max()))
        bar.update(chunk.nbytes)
    if shard.look() != times_ns:
        raise shard.changed("it was written to while it was read")
    return _Entry(len(shard) * shard.dtype.itemsize, times_ns, digest.hexdigest(), largest)
