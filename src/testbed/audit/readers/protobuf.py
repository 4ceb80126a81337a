"""Read the wire format of protocol buffers: the fields of one message, without its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class NoRecord(ValueError):
    """Bytes that are not what a format says. A reader ends there, and keeps what came before."""


class Field(NamedTuple):
    """One field of a message."""

    number: int
    wire: int  # its wire type
    integer: int = 0  # of a varint
    data: bytes = b""  # of any other


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message in their order.

    Raises:
        NoRecord: these bytes are no message.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            integer, at = _varint(message, at)
            yield Field(number, wire, integer)
            continue
        if wire == BYTES:
            length, at = _varint(message, at)
        elif wire in (FIXED64, FIXED32):
            length = 8 if wire == FIXED64 else 4
        else:
            raise NoRecord(f"wire type {wire} is not known")
        if at + length > len(message):
            raise NoRecord("a field ends behind its message")
        yield Field(number, wire, data=message[at : at + length])
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(message[at : at + 10]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    raise NoRecord("a varint does not end")
