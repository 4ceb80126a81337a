"""Read tensors out of an archive that `torch.save` made, wherever it comes from.

An archive is a zip with a pickle in it. PyTorch reads the pickle with a machine that makes tensors, plain containers
and what its caller names (`weights_only`), and nothing else. It does unpack members that are compressed, so that a few
kilobytes could fill the memory; `torch.save` compresses none, and what is larger unpacked is not read.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from testbed.errors import InputError, one_line

MOST_DESCRIBING_BYTES = 1 << 28  # far above what a rank of a large model has
# All that torch.load, zipfile and pickle raise on bytes that someone changed (the fuzz finds them); a hostile file must
# end in one sentence.
_FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, NotImplementedError),
    *(pickle.UnpicklingError, RecursionError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile),
)


def load_tensors(file: BinaryIO, name: str, also: tuple[Any, ...] = (), map_location: Any = "cpu") -> Any:
    """Return the content of an archive.

    Args:
        file: seekable.
        name: what it is called in a sentence.
        also: further classes that it may name, as for torch.serialization.safe_globals.

    Raises:
        InputError: one sentence that begins with `name`: it is damaged, or holds what it must not.
        OSError: it cannot be read.
    """
    with _in_one_sentence(name):
        _check_members(file)
        file.seek(0)
        with torch.serialization.safe_globals(list(also)):
            return torch.load(file, map_location=map_location, weights_only=True)


def check_finite(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError, one sentence that begins with `name`, where a number of it is NaN or infinite."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise InputError(f"{name} holds numbers that are NaN or infinite, from which no training can go on")


def _check_members(file: BinaryIO) -> None:
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if any(member.filename.endswith("constants.pkl") for member in members):
        raise InputError("it holds a program of TorchScript")
    size = file.seek(0, 2)
    if sum(member.file_size for member in members) > size:
        raise InputError("its members are larger than the file, so they are compressed or a lie")
    describing = [member.file_size for member in members if member.filename.endswith(".pkl")]
    if sum(describing) > MOST_DESCRIBING_BYTES:
        raise InputError("what describes its tensors is too large")


@contextlib.contextmanager
def _in_one_sentence(name: str) -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        words = _words(error)
        fault = type(error).__name__ if words is None else f"{type(error).__name__}: {words}"
        raise InputError(f"{name} cannot be read as tensors ({fault})") from None


def _words(error: BaseException) -> str | None:
    """Return what PyTorch found wrong, without its advice how to run the file all the same."""
    text = str(error).strip()
    if named := re.search(r"GLOBAL (\S+)", text):
        return f"it names {one_line(named[1], 100)}, which no tensor needs"
    lines = text.rpartition("WeightsUnpickler error: ")[2].strip().splitlines()
    return one_line(lines[0], 200) if lines and not lines[0].startswith("Weights only load failed") else None
