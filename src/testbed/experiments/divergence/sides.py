"""The records of a side, read from its files and put together from the parts of its ranks. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import Failure, InputError
from testbed.io import replacing

# in the order of computation
PHASES = ("data", "weights", "forward", "backward", "synchronisation", "clipping", "update")
MODULES = "wte wpe ln_1 attn.c_attn attention attn.c_proj ln_2 mlp.c_fc mlp.c_proj".split()
LARGEST_FILE = 4 << 30  # bytes, unpacked
FACTS = "facts"
PRECISION = "precision"  # a file beside the fingerprints: what --precision auto came to
SUM, SQUARES, FIRST = 0, 1, 2  # the numbers of a bin: these two, then the projections; squares do not add up


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """Where a record belongs."""

    step: int
    phase: str
    name: str

    def order(self) -> tuple[Any, ...]:
        """Return a key that sorts places in the order of computation."""
        found = _order_of_name(self.name)
        if self.phase in ("backward", "synchronisation"):  # from the end
            found = (-found[0], -found[1], found[2])
        return (self.step, PHASES.index(self.phase), *found)


def _order_of_name(name: str) -> tuple[int, int, str]:
    """Return layer and place inside it."""
    if name in ("norm", "learning rate") or name.startswith("weight decay"):  # what comes next follows from it
        return -2, 0, name
    if found := re.search(r"(?:^| )h\.(\d+)(?:\.(.*))?$", name):
        inner = found[2] or ""
        place = next((number for number, module in enumerate(MODULES) if inner.startswith(module)), len(MODULES))
        return int(found[1]), place, name
    if "ln_f" in name:
        return 10**6, 0, name
    outer = next((number for number, module in enumerate(MODULES[:2]) if f"{module}" in name), None)
    return (-1, outer, name) if outer is not None else (10**6, 1, name)


Parts = dict[str, dict[int, np.ndarray]]  # part -> rank -> numbers
Records = dict[Place, Parts]


@dataclasses.dataclass
class Side:
    """What a side recorded.

    Attributes:
        facts: of its start; "failed" among them, and why, where the run came to no end.
    """

    records: Records
    facts: dict[str, Any]

    def whole(self, place: Place) -> np.ndarray:
        """Return what all ranks' parts make: (rows of the global batch, bins, numbers), (bins, numbers) or (1,)."""
        parts = self.records[place]
        arrays = [(part, next(iter(of_ranks.values()))) for part, of_ranks in sorted(parts.items())]
        if arrays[0][1].ndim < 3:
            return np.sum([array for _, array in arrays], axis=0)
        last = max(_first_row(part) + len(array) for part, array in arrays)
        found = np.zeros((last, *arrays[0][1].shape[1:]))
        for part, array in arrays:
            first = _first_row(part)
            found[first : first + len(array)] += array
        return found

    def of_rank(self, place: Place, rank: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the parts that a rank has."""
        for part, of_ranks in self.records.get(place, {}).items():
            if rank in of_ranks:
                yield part, of_ranks[rank]

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for parts in self.records.values() for of_ranks in parts.values() for rank in of_ranks})

    def rows_of_rank(self, rank: int) -> tuple[int, int]:
        """Return the first row and the one after the last that a rank reads of a global batch."""
        for part, array in self.of_rank(Place(1, "data", "inputs"), rank):
            return _first_row(part), _first_row(part) + len(array)
        return 0, 0

    @property
    def steps(self) -> int:
        return max((place.step for place in self.records), default=-1)


def _first_row(part: str) -> int:
    return int(part.partition(":")[0])


def file_name(step: int, rank: int) -> str:
    """Return the name of what a rank wrote of a step, 0 before the first."""
    return f"step_{step:04d}_rank_{rank:04d}.npz"


def read_folder(folder: Path, facts: dict[str, Any], ranks: int) -> Side:
    """Read what the ranks of a run left. A run that failed has the first steps, those that all ranks wrote."""
    records: Records = {}
    for step in itertools.count():
        paths = [folder / file_name(step, rank) for rank in range(ranks)]
        if not all(path.exists() for path in paths):
            break
        for path in paths:
            with np.load(path) as file:
                _add(records, file)
    if (decided := folder / PRECISION).is_file():
        facts = facts | {"precision": decided.read_text(encoding="utf-8")}
    return Side(records, facts)


def _add(records: Records, file: Any) -> None:
    """Add the arrays of a file, which are called by step, rank, phase, name and part."""
    for key in file.files:
        if key != FACTS:
            step, rank, phase, name, part = key.split("|")
            PHASES.index(phase)
            parts = records.setdefault(Place(int(step), phase, name), {})
            parts.setdefault(part, {})[int(rank)] = array = file[key]
            if int(rank) < 0 or array.dtype != np.float64 or not 1 <= array.ndim <= 3 or not array.size:
                raise InputError(f"{key} holds no fingerprints")


def save(side: Side, path: Path) -> None:
    """Write a side into one file. Raises Failure."""
    arrays = {
        f"{place.step}|{rank}|{place.phase}|{place.name}|{part}": array
        for place, parts in side.records.items()
        for part, of_ranks in parts.items()
        for rank, array in of_ranks.items()
    }
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:  # savez would add a suffix to a name
            np.savez_compressed(file, **{FACTS: np.array(json.dumps(side.facts))}, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise Failure(f"--save {path} cannot be written: {error.strerror or error}") from None


def read_file(path: Path) -> Side:
    """Read what `save` wrote. Raises InputError."""
    records: Records = {}
    try:
        with np.load(path) as file:
            if sum(entry.file_size for entry in file.zip.infolist()) > LARGEST_FILE:
                raise InputError("it unpacks to more than a file of fingerprints holds")
            facts = json.loads(str(file[FACTS]))
            dict(facts["work"])
            _add(records, file)
    except Exception as error:  # numpy, zip and zlib have many
        raise InputError(f"{path} is no file of fingerprints ({type(error).__name__}); make one with --save") from None
    return Side(records, facts)
