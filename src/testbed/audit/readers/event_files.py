"""Read TensorBoard's event files.

Format: tensorboard/compat/proto/{event,summary,tensor}.proto, in records as in
tensorboard/compat/tensorflow_stub/pywrap_tensorflow.py (length, checksum, data, checksum). The package tensorboard
would do it, but reading runs needs only the dependencies of `pip install .`, and that package comes with training.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from testbed.audit.readers import protobuf
from testbed.audit.readers.curves import Curves, Point
from testbed.audit.readers.protobuf import NoRecord, fields
from testbed.audit.readers.tracked import reported_of
from testbed.audit.reported import Reported
from testbed.errors import InputError
from testbed.io import parse_json, read_regular

FORM = "TensorBoard event files"
LONGEST_SCALAR = 1 << 16  # bytes of a record; pictures, graphs and histograms have more, and their checksums take long
_DT_STRING = 7
_LAYOUTS = {1: "<f", 2: "<d"}  # DT_FLOAT, DT_DOUBLE


def read_event_files(path: Path, is_typed: bool) -> list[Reported]:
    """Read a typed file, or all files of its folder: each restart of a run begins a new one.

    Raises:
        InputError: a file cannot be read, or is none of TensorBoard.
    """
    files = [path] if is_typed else sorted(each for each in path.parent.glob("*tfevents*") if each.is_file())
    if files[:1] != [path]:
        return []
    curves: Curves = {}
    settings: dict[str, str] = {}
    unread: list[str] = []
    for file in files:
        later, is_damaged = _read_file(file, settings)
        for tag, points in later.items():
            _append(curves.setdefault(tag, []), points)
        if is_damaged:
            unread.append(f"what follows the damaged record in {file.name}")
    run = reported_of(path if is_typed else path.parent, FORM, curves, settings, unread)
    return [run] if is_typed or run.has_figures else []


def _append(points: list[Point], later: list[Point]) -> None:
    """Add the points of a restart, which takes the place of what was written beyond its first step."""
    first = later[0].step or 0
    while points and (points[-1].step or 0) >= first:
        points.pop()
    points += later


def _read_file(path: Path, settings: dict[str, str]) -> tuple[Curves, bool]:
    """Return the curves of one file, and whether damage ends it early. Texts are put into `settings`."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if content.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a pointer of git lfs: the file itself was not downloaded")
    curves: Curves = {}
    count = 0
    try:
        for record in _records(content):
            _take_event(record, curves, settings)
            count += 1
    except ValueError as error:
        if not count:
            raise InputError(f"{path} is no event file of TensorBoard: {error}") from None
        return curves, True
    return curves, False


def _records(content: bytes) -> Iterator[bytes]:
    """Yield each whole record. The last is cut where the program was killed, which is no damage.

    Raises:
        ValueError: a checksum is wrong.
    """
    at = 0
    while at + 12 <= len(content):
        length, checksum = struct.unpack_from("<QI", content, at)
        if checksum != _masked_crc(content[at : at + 8]):
            raise NoRecord("the checksum of a record's length is wrong")
        at += 12
        if at + length + 4 > len(content):
            return
        if length <= LONGEST_SCALAR:
            data = content[at : at + length]
            if struct.unpack_from("<I", content, at + length)[0] != _masked_crc(data):
                raise NoRecord("the checksum of a record is wrong")
            yield data
        at += length + 4
    if not at:
        raise NoRecord(f"it has {len(content)} bytes")


def _take_event(event: bytes, curves: Curves, settings: dict[str, str]) -> None:
    time_s, step, summaries = None, 0, []
    for field in fields(event):
        match field.number, field.wire:
            case 1, protobuf.FIXED64:
                (time_s,) = struct.unpack("<d", field.data)
            case 2, protobuf.VARINT:
                step = field.integer - (1 << 64) * (field.integer >> 63)
            case 5, protobuf.BYTES:
                summaries.append(field.data)
    for value in (each.data for summary in summaries for each in fields(summary) if each.number == 1):
        tag, found = _value(value)
        if isinstance(found, float) and not tag.startswith("_hparams_/"):
            curves.setdefault(tag, []).append(Point(step, found, time_s))
        elif isinstance(found, str):
            settings |= _texts(tag.removesuffix("/text_summary"), found)


def _texts(name: str, text: str) -> dict[str, str]:
    """Return the settings in a text: of Megatron-LM one each, of transformers all arguments as JSON."""
    if not text.startswith("{"):
        return {name: text}
    try:
        arguments = parse_json(text.encode(), name)
    except InputError:
        return {}
    return {str(key): str(value) for key, value in arguments.items() if not isinstance(value, dict | list)}


def _value(value: bytes) -> tuple[str, float | str | None]:
    """Return the tag of a summary's value, and its number or text; None for anything else."""
    tag, found = "", None
    for field in fields(value):
        match field.number, field.wire:
            case 1, protobuf.BYTES:
                tag = field.data.decode("utf-8", "replace")
            case 2, protobuf.FIXED32:
                (found,) = struct.unpack("<f", field.data)
            case 8, protobuf.BYTES:
                found = _tensor(field.data)
    return tag, found


def _tensor(tensor: bytes) -> float | str | None:
    """Return the one element of a tensor: a float, a double, or a text."""
    kind, found = 0, None
    for field in fields(tensor):
        if (field.number, field.wire) == (1, protobuf.VARINT):
            kind = field.integer
        elif kind == _DT_STRING and field.number == 8:
            found = field.data.decode("utf-8", "replace")
        elif kind in _LAYOUTS and field.number in (4, 5, 6) and len(field.data) == struct.calcsize(_LAYOUTS[kind]):
            (found,) = struct.unpack(_LAYOUTS[kind], field.data)
    return found


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 * (value & 1)
        table.append(value)
    return table


_CRC = _crc_table()


def _masked_crc(data: bytes) -> int:
    """Return the CRC-32C of data, masked as in TFRecord, so that a checksum of checksums is no zero."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
