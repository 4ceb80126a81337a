"""The description of a state's files: which tensors there are, and in which bytes of which file each piece of one lies.

    {"format": 1, "tensors": {NAME: {"dtype": "float32", "size": [6, 4], "pieces": [
        {"offsets": [0, 0], "sizes": [3, 4], "file": "__0_0.distcp", "start": 0, "length": 1577}, ...]}}}

PyTorch's own description (`.metadata`) is a pickle, which whoever reads it runs. This one is JSON.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from testbed.errors import InputError
from testbed.io import is_within, parse_json, read_regular

DESCRIPTION, PICKLED_DESCRIPTION = "tensors.json", ".metadata"
FORMAT = 1
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64")}
LONGEST_NAME, LARGEST, MOST_DIMENSIONS = 500, 1 << 62, 8
MOST_AROUND = 1 << 16  # bytes that torch.save needs besides the numbers; it takes some 1,500
_FILE = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")  # what PyTorch calls the files; no such name leaves its folder


def in_json(metadata: Metadata, written: dict[MetadataIndex, _StorageInfo]) -> str:
    """Return the description of what PyTorch has just written.

    Args:
        written: where each piece lies, by tensor and offsets.
    """
    tensors = {}
    for name, of_tensor in metadata.state_dict_metadata.items():
        assert isinstance(of_tensor, TensorStorageMetadata), "a state holds tensors alone"
        pieces = []
        for chunk in of_tensor.chunks:
            where = written[MetadataIndex(name, chunk.offsets)]
            pieces.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": where.relative_path,
                    "start": where.offset,
                    "length": where.length,
                }
            )
        dtype = str(of_tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(of_tensor.size), "pieces": pieces}
    return json.dumps({"format": FORMAT, "tensors": tensors}) + "\n"


def check_described(directory: Path) -> None:
    """Raise InputError unless a folder has a description."""
    if (directory / DESCRIPTION).is_file():
        return
    if (directory / PICKLED_DESCRIPTION).is_file():
        raise InputError(
            f"{directory} was saved by an earlier version, in a form that is no longer read; resume with the commit "
            "that the run's training_metrics.json names, or begin a new run from its weights with --init_from"
        )
    raise InputError(f"{directory} holds no state of a whole model")


def read_description(directory: Path) -> Metadata:
    """Return what a folder's description says, in the objects that PyTorch's reader plans with.

    Raises:
        InputError: one sentence that names the file: it says what no state of ours holds.
        OSError: it cannot be read.
    """
    path = directory / DESCRIPTION
    if not is_within(path, directory):
        raise InputError(f"{path} is a link that leads out of the checkpoint")
    plain = parse_json(read_regular(path), str(path))
    try:
        return _checked(plain)
    except _Wrong as wrong:
        raise InputError(f"{path} does not describe a state: {wrong}") from None


class _Wrong(Exception):
    """A description that is not one of ours."""


def _checked(plain: Any) -> Metadata:
    """Return the objects that a description in its plain form stands for, made of numbers and names that were looked
    at."""
    if not isinstance(plain, dict) or plain.get("format") != FORMAT or not isinstance(plain.get("tensors"), dict):
        raise _Wrong(f"it is no object of format {FORMAT} with tensors")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, of_tensor in plain["tensors"].items():
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise _Wrong(f"{_shown(name)} is no name of a tensor")
        if not isinstance(of_tensor, dict) or set(of_tensor) != {"dtype", "size", "pieces"}:
            raise _Wrong(f"{_shown(name)} is no tensor with its dtype, size and pieces")
        dtype = of_tensor["dtype"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise _Wrong(f"the dtype of {_shown(name)} is {_shown(dtype)}")
        size = _numbers(of_tensor["size"], f"the size of {_shown(name)}")
        if not isinstance(of_tensor["pieces"], list) or not of_tensor["pieces"]:
            raise _Wrong(f"{_shown(name)} has no pieces")
        chunks, filled = [], 0
        for piece in of_tensor["pieces"]:
            chunk, place = _piece(piece, size, f"a piece of {_shown(name)}")
            if place.length > math.prod(chunk.sizes) * DTYPES[dtype].itemsize + MOST_AROUND:
                raise _Wrong(f"a piece of {_shown(name)} has {place.length:,} bytes for {list(chunk.sizes)} of {dtype}")
            key = MetadataIndex(name, chunk.offsets)
            if key in places:
                raise _Wrong(f"two pieces of {_shown(name)} lie at {list(chunk.offsets)}")
            places[key] = place
            chunks.append(chunk)
            filled += math.prod(chunk.sizes)
        if filled != math.prod(size):
            raise _Wrong(f"the pieces of {_shown(name)} have {filled} elements, but its size is {list(size)}")
        tensors[name] = TensorStorageMetadata(TensorProperties(DTYPES[dtype]), size, chunks)
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _piece(piece: Any, size: torch.Size, what: str) -> tuple[ChunkStorageMetadata, _StorageInfo]:
    if not isinstance(piece, dict) or set(piece) != {"offsets", "sizes", "file", "start", "length"}:
        raise _Wrong(f"{what} is {_shown(piece)}")
    offsets, sizes = _numbers(piece["offsets"], f"{what}: offsets"), _numbers(piece["sizes"], f"{what}: sizes")
    is_inside = len(offsets) == len(sizes) == len(size)
    if not is_inside or any(offset + length > all_ for offset, length, all_ in zip(offsets, sizes, size, strict=True)):
        raise _Wrong(f"{what} of {list(sizes)} at {list(offsets)} does not lie in {list(size)}")
    file = piece["file"]
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise _Wrong(f"{what} lies in {_shown(file)}, which is no file of a state")
    start, length = _numbers([piece["start"], piece["length"]], f"{what}: start and length")
    return ChunkStorageMetadata(offsets, sizes), _StorageInfo(file, start, length)


def _numbers(values: Any, what: str) -> torch.Size:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS:
        raise _Wrong(f"{what} is {_shown(values)}, not a list of up to {MOST_DIMENSIONS} numbers")
    if any(type(value) is not int or not 0 <= value < LARGEST for value in values):
        raise _Wrong(f"{what} is {_shown(values)}, not whole numbers of 0 and above")
    return torch.Size(values)


def _shown(value: Any) -> str:
    return ascii(reprlib.repr(value)[:100])[1:-1] if not isinstance(value, str) else ascii(value[:100])
