"""Read the history in a W&B run's binary log, RUN/run-ID.wandb.

Format: wandb/sdk/internal/datastore.py (LevelDB's log with a header of seven bytes) and
wandb/proto/wandb_internal.proto (Record.history, HistoryRecord.item, HistoryItem.key and value_json).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from testbed.audit.readers.curves import Curves, Point, number
from testbed.audit.readers.protobuf import BYTES, NoRecord, fields
from testbed.errors import InputError
from testbed.io import read_regular

_HEADER = b":W&B\xe1\xbe\x00"
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
STEPS = ("train/global_step", "global_step", "step", "_step")  # what a row is counted by; the last by W&B itself


def read_history(path: Path) -> tuple[Curves, bool]:
    """Return the curves of a log, and whether damage ends it early; none where it is no such log.

    Raises:
        InputError: it cannot be read.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if not content.startswith(_HEADER):
        return {}, True
    curves: Curves = {}
    try:
        for record in _records(content):
            for field in fields(record):
                if (field.number, field.wire) == (2, BYTES):
                    _take_row(field.data, curves)
    except ValueError:
        return curves, True
    return curves, False


def _records(content: bytes) -> Iterator[bytes]:
    """Yield each whole record. The last is cut where the program was killed.

    Raises:
        ValueError: a checksum is wrong, or the parts of a record do not follow each other.
    """
    at, parts = len(_HEADER), None
    while at + 7 <= len(content):
        if _BLOCK - at % _BLOCK < 7:  # too few bytes are left in the block for another record
            at += _BLOCK - at % _BLOCK
            continue
        checksum, length, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + 7 : at + 7 + length]
        if len(data) < length:
            return
        if checksum != zlib.crc32(data, zlib.crc32(bytes([kind]))):
            raise NoRecord("a checksum is wrong")
        at += 7 + length
        if (parts is None) != (kind in (_FULL, _FIRST)):
            raise NoRecord("a part of a record is missing")
        parts = data if parts is None else parts + data
        if kind in (_FULL, _LAST):
            yield parts
            parts = None


def _take_row(history: bytes, curves: Curves) -> None:
    row: dict[str, float] = {}
    for item in fields(history):
        if (item.number, item.wire) != (1, BYTES):
            continue
        keys, value = [], None
        for field in fields(item.data):
            if field.number in (1, 2):  # a key, or the keys above each other of a nested value
                keys.append(field.data.decode("utf-8", "replace"))
            elif field.number == 16:
                value = _number_in(field.data)
        if value is not None:
            row[".".join(keys)] = value
    step = next((row[name] for name in STEPS if name in row), None)
    counted = int(step) if step is not None and abs(step) < 1e15 else None
    for name, value in row.items():
        if not name.startswith("_"):
            curves.setdefault(name, []).append(Point(counted, value, row.get("_timestamp")))


def _number_in(text: bytes) -> float | None:
    """Return the number that a JSON text is; None for anything else."""
    try:
        return number(json.loads(text)) if len(text) < 100 else None
    except (ValueError, RecursionError):
        return None
