"""Read tensors out of an archive that `torch.save` made, wherever it comes from.

An archive is a zip with a pickle in it. PyTorch reads the pickle with a machine that makes tensors, plain containers
and what its caller names (`weights_only`), and nothing else. It does unpack members that are compressed, so that a few
kilobytes could fill the memory; `torch.save` compresses none, and what is larger unpacked is not read.
"""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import torch

from testbed.errors import InputError, one_line

MOST_DESCRIBING_BYTES = 1 << 28  # far above what a rank of a large model has
# The records at the end of a zip, as in its specification (APPNOTE 4.3.14 to 4.3.16).
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_FULL = 0xFFFFFFFF  # in the short record: the 64-bit one has the number
_GROWING_CODECS = ("hex", "base64", "uu", "quopri", "quotedprintable")  # from bytes to more bytes
# All that torch.load, zipfile and pickle raise on bytes that someone changed (the fuzz finds them); a hostile file must
# end in one sentence.
_FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, NotImplementedError),
    *(pickle.UnpicklingError, RecursionError, RuntimeError, struct.error, TypeError, ValueError, zipfile.BadZipFile),
)


def load_tensors(
    file: BinaryIO, name: str, also: tuple[Any, ...] = (), map_location: Any = "cpu", is_mapped: bool = False
) -> Any:
    """Return the content of an archive.

    Args:
        file: seekable.
        name: what it is called in a sentence.
        also: further classes that it may name, as for torch.serialization.safe_globals.
        is_mapped: leave the numbers in the file until they are looked at: the ranks of a host then share one copy of
            them. The file must not be cut while they are in use.

    Raises:
        InputError: one sentence that begins with `name`: it is damaged, or holds what it must not.
        OSError: it cannot be read.
    """
    with _in_one_sentence(name):
        _check_members(file)
        file.seek(0)
        with torch.serialization.safe_globals(list(also)):
            # PyTorch maps by a name; this one is of the file that was checked, whatever has its path by now
            source = f"/proc/self/fd/{file.fileno()}" if is_mapped else file
            return torch.load(source, map_location=map_location, weights_only=True, mmap=is_mapped)


def check_finite(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError, one sentence that begins with `name`, where a number of it is NaN or infinite."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise InputError(f"{name} holds numbers that are NaN or infinite, from which no training can go on")


def check_plain(tensors: list[tuple[Any, Any]], num_bytes: int, name: str) -> None:
    """Check that tensors of an archive are numbers in rows that its bytes hold: one of stride 0 could claim any size.

    Raises:
        InputError: one sentence that begins with `name`.
    """
    held: dict[int, int] = {}
    for key, tensor in tensors:
        is_plain = (
            isinstance(tensor, torch.Tensor)
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and (tensor.is_floating_point() or str(key).endswith(".attn.bias"))
            and tensor.is_contiguous()
        )
        if not is_plain:
            raise InputError(f"{name}: {one_line(str(key), 80)} is no plain tensor of numbers")
        held[tensor.data_ptr()] = max(held.get(tensor.data_ptr(), 0), tensor.nbytes)
    if sum(held.values()) > num_bytes:
        raise InputError(f"{name} has tensors of {sum(held.values()):,} bytes in a file of {num_bytes:,}")


def is_apart(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no two tensors share memory, as no weights of a GPT-2 do: an update would change both."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return len(set(places)) == len(places)


def _check_members(file: BinaryIO) -> None:
    _check_one_directory(file)
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.filename.endswith("constants.pkl") for member in members):
            raise InputError("it holds a program of TorchScript")
        size = file.seek(0, 2)
        if sum(member.file_size for member in members) > size:
            raise InputError("its members are larger than the file, so they are compressed or a lie")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise InputError("its members are compressed, which torch.save does not do")
        describing = [member for member in members if member.filename.endswith(".pkl")]
        if sum(member.file_size for member in describing) > MOST_DESCRIBING_BYTES:
            raise InputError("what describes its tensors is too large")
        for member in describing:
            _check_makes_no_bytes(archive.read(member))


def _check_makes_no_bytes(described: bytes) -> None:
    """Check that a pickle does not make bytes that its archive does not have.

    PyTorch lets a pickle call bytearray, which fills as much memory as it is told to, and `_codecs.encode`, with which
    `torch.save` writes bytes, and which doubles them with the codec "hex", as often as it is called.
    """
    for _, value, _ in pickletools.genops(described):
        if not isinstance(value, str):
            continue
        if value.rpartition(" ")[2] == "bytearray":
            raise InputError("it names bytearray, which no tensor needs")
        codec = re.sub("[^a-z0-9]", "", value.lower())
        if codec.removesuffix("codec") in _GROWING_CODECS:
            raise InputError(f"it names the codec {codec}, which no tensor needs")


def _check_one_directory(file: BinaryIO) -> None:
    """Check that the archive fills the file, from its first member to its end record.

    Python's zipfile reads the directory that ends before the end record, PyTorch the one at the record's offset. In a
    file with two directories the sizes that are checked would not be the sizes that are unpacked.
    """
    size = file.seek(0, 2)
    file.seek(0)
    first = file.read(4)
    file.seek(max(0, size - _END.size - _LOCATOR.size - _END_64.size))
    records = file.read()
    if first != b"PK\3\4" or len(records) < _END.size:
        raise InputError("it is not an archive of torch.save")
    signature, *_, length, start, comment = _END.unpack(records[-_END.size :])
    if signature != b"PK\5\6" or comment:
        raise InputError("bytes follow the end of its archive")
    end = size - _END.size
    locator = records[-_END.size - _LOCATOR.size : -_END.size]
    if locator[:4] == b"PK\6\7" and len(records) > _END.size + _LOCATOR.size:
        _, _, end_64, _ = _LOCATOR.unpack(locator)
        end -= _LOCATOR.size + _END_64.size
        if end != end_64 or records[:4] != b"PK\6\6":
            raise InputError("the end records of its archive contradict each other")
        *_, length_64, start_64 = _END_64.unpack(records[: _END_64.size])
        if length not in (length_64, _FULL) or start not in (start_64, _FULL):
            raise InputError("the end records of its archive contradict each other")
        length, start = length_64, start_64
    if start + length != end:
        raise InputError("its directory is not where its end record says")


@contextlib.contextmanager
def _in_one_sentence(name: str) -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        words = _words(error)
        kind = [] if isinstance(error, InputError) else [type(error).__name__]
        fault = ": ".join([*kind, *([words] if words else [])])
        raise InputError(f"{name} cannot be read as tensors ({fault})") from None


def _words(error: BaseException) -> str | None:
    """Return what PyTorch found wrong, without its advice how to run the file all the same."""
    text = str(error).strip()
    if named := re.search(r"GLOBAL (\S+)", text):
        return f"it names {one_line(named[1], 100)}, which no tensor needs"
    lines = text.rpartition("WeightsUnpickler error: ")[2].strip().splitlines()
    return one_line(lines[0], 200) if lines and not lines[0].startswith("Weights only load failed") else None
