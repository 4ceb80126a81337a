"""The description of a state's files: which tensors there are, and in which bytes of which file each piece of one lies.

    {"format": 1, "tensors": {NAME: {"dtype": "float32", "size": [6, 4], "pieces": [
        {"offsets": [0, 0], "sizes": [3, 4], "file": "__0_0.distcp", "start": 0, "length": 1577}, ...]}}}

PyTorch's own description (`.metadata`) is a pickle, which whoever reads it runs. This one is JSON.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import torch
from msgspec import Meta
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
from testbed.typed_json import check

DESCRIPTION, PICKLED_DESCRIPTION = "tensors.json", ".metadata"
FORMAT = 1
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64")}
MOST_AROUND = 1 << 16  # bytes that torch.save needs besides the numbers; it takes some 1,500
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Numbers = Annotated[list[_Number], Meta(max_length=8)]  # one for each dimension


class _Piece(TypedDict):
    offsets: _Numbers
    sizes: _Numbers
    file: Annotated[str, Meta(pattern=r"^__[0-9]{1,9}_[0-9]{1,9}\.distcp\Z")]  # it leaves no folder
    start: _Number
    length: _Number


class _Tensor(TypedDict):
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int64"]
    size: _Numbers
    pieces: Annotated[list[_Piece], Meta(min_length=1)]


class _Description(TypedDict):
    format: Literal[1]
    tensors: dict[Annotated[str, Meta(min_length=1, max_length=500)], _Tensor]


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
    try:
        return _planned(check(parse_json(read_regular(path), str(path)), _Description)["tensors"])
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path} does not describe a state: {error}") from None


def _planned(described: dict[str, _Tensor]) -> Metadata:
    """Return the objects that a description stands for. InputError: its pieces do not make up its tensors."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, of_tensor in described.items():
        size, dtype, chunks = torch.Size(of_tensor["size"]), DTYPES[of_tensor["dtype"]], []
        for piece in of_tensor["pieces"]:
            lead, offsets, sizes = f"a piece of {name[:100]!a}", piece["offsets"], piece["sizes"]
            is_inside = len(offsets) == len(sizes) == len(size)
            if not is_inside or any(map(lambda at, length, all_: at + length > all_, offsets, sizes, size)):
                raise InputError(f"{lead} of {sizes} at {offsets} does not lie in {list(size)}")
            if piece["length"] > math.prod(sizes) * dtype.itemsize + MOST_AROUND:
                raise InputError(f"{lead} has {piece['length']:,} bytes for {sizes} of {of_tensor['dtype']}")
            key = MetadataIndex(name, torch.Size(offsets))
            if key in places:
                raise InputError(f"two pieces of {name[:100]!a} lie at {offsets}")
            places[key] = _StorageInfo(piece["file"], piece["start"], piece["length"])
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        filled = sum(math.prod(chunk.sizes) for chunk in chunks)
        if filled != math.prod(size):
            raise InputError(f"the pieces of {name[:100]!a} have {filled} elements, but its size is {list(size)}")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())
